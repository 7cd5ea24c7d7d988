"""A fabric that was asked for is the one in use, or an error says which one is."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from pushkv.core.errors import ConfigurationError, TransportError
from pushkv.core.ids import EngineId, Incarnation, Worker
from pushkv_nixl import NixlTransport
from pushkv_nixl._demand import check_provider, provider_of, restricted_ucx
from pushkv_nixl._fabric import may_use_tcp, present_rdma_devices

WORKER = Worker(EngineId("P"), Incarnation(1), 0)
SOCKET = b"\x02\x00\x97C\x0a\x53\x00\x01" + bytes(48)
GID = b"\xfe\x80" + bytes(6) + b"\x10\x20\x30\xff\xfe\x40\x50\x60" + bytes(40)
EFA, CXI = Counter({"/dev/infiniband/uverbs0": 2}), Counter({"/dev/cxi0": 1})


def metadata(address: bytes) -> bytes:
    size = len(address).to_bytes(8, "little")
    return b"nixlSerDes|num_rails" + b"|dest_data_ep_0" + size + address + b"|"


@pytest.mark.parametrize(
    ("address", "opened", "provider"),
    [
        (SOCKET, Counter(), "tcp"),
        (b"\x0a\x00" + SOCKET[2:], Counter(), "tcp"),
        (GID, EFA, "efa"),
        (GID, CXI, "cxi"),
        (GID, Counter(), ""),
        (GID, EFA + CXI, ""),
        (SOCKET, EFA, ""),
        (bytes(56), Counter(), ""),
    ],
)
def test_the_provider_shows_in_its_address_and_its_device_files(
    address: bytes, opened: Counter[str], provider: str
) -> None:
    assert provider_of(metadata(address), opened) == provider
    assert provider_of(b"something else", opened) == ""


def test_tcp_is_no_silent_fall_back() -> None:
    for fabric, provider in ((None, "efa"), (None, "cxi"), ("efa", "efa"), ("tcp", "tcp")):
        check_provider(fabric, provider)
    for fabric, provider in ((None, "tcp"), (None, ""), ("efa", "tcp"), ("efa", ""), ("tcp", "")):
        with pytest.raises(TransportError) as error:
            check_provider(fabric, provider)
        assert (provider or "cannot be told") in str(error.value)
        assert (fabric or "efa or cxi") in str(error.value)


@pytest.mark.parametrize(
    ("fabric", "tls", "config", "expected"),
    [
        ("rdma", "", "", "TLS=ib,cuda_copy"),
        ("tcp", "", "A=b", "A=b,TLS=tcp,cuda_copy"),
        ("tcp", "tcp,cuda_copy", "", ""),
        ("rdma", "rc,ud,cuda_copy", "", ""),
        ("rdma", "srd", "", ""),
        (None, "all", "", ""),
    ],
)
def test_ucx_is_allowed_the_fabric_alone(
    fabric: str | None, tls: str, config: str, expected: str
) -> None:
    options = {"engine_config": config} if config else {}
    environment = {"UCX_TLS": tls} if tls else {}
    found = restricted_ucx(fabric, environment, options)
    assert found.get("engine_config", "") == (expected or config)


@pytest.mark.parametrize(
    ("fabric", "tls", "named"),
    [
        ("rdma", "rc,tcp", "TCP"),
        ("rdma", "rc,sm", "shared memory"),
        ("rdma", "all", "shared memory and TCP"),
        ("tcp", "tcp,rc_x", "RDMA"),
        ("tcp", "^rc", "shared memory and RDMA"),
    ],
)
def test_a_setting_that_allows_a_fall_back_is_refused(fabric: str, tls: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"fabric.*allows {named}"):
        restricted_ucx(fabric, {"UCX_TLS": tls}, {})


def test_which_settings_allow_tcp() -> None:
    assert [may_use_tcp(tls) for tls in ("", "all", "tcp", "rc,tcp:aux", "^rc")] == [True] * 5
    assert [may_use_tcp(tls) for tls in ("rc,cma", "ib", "^tcp")] == [False] * 3


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("backend", "fabric"), [("UCX", "shm"), ("UCX", "efa"), ("LIBFABRIC", "rdma")]
)
def test_a_fabric_that_cannot_be_demanded_is_named(backend: str, fabric: str) -> None:
    with pytest.raises(ConfigurationError, match=f"fabric = '{fabric}'"):
        NixlTransport(backend=backend, fabric=fabric)


@pytest.mark.nixl
def test_ucx_does_not_start_without_the_rdma_that_was_asked_for() -> None:
    if present_rdma_devices():
        pytest.skip("this host has RDMA devices")
    transport = NixlTransport(fabric="rdma")
    with pytest.raises(TransportError, match="did not start"):
        transport.start(WORKER, [], time.monotonic_ns, lambda: None)
    assert transport.close(5.0)


@pytest.mark.nixl
def test_ucx_starts_with_the_tcp_that_was_asked_for() -> None:
    transport = NixlTransport(fabric="tcp")
    assert not transport.capabilities.shared_memory
    transport.start(WORKER, [], time.monotonic_ns, lambda: None)
    assert transport.close(5.0)
