"""The fabric that the deployer demands, and whether it is the one in use.

A fall-back to a slow fabric must be an error where the fast one was asked for. Over UCX that is
enforced: UCX is allowed the transports of that fabric alone, and does not start, or does not
connect, without it. LIBFABRIC's plugin chooses the provider by itself (cxi, efa, tcp, sockets, in
this order) and does not tell which; the address that it gave itself and the device files that it
opened do.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from pushkv.core.errors import ConfigurationError, TransportError

from ._fabric import may_share_memory, may_use_rdma, may_use_tcp, present_rdma_devices, ucx_setting

__all__ = ["FABRICS", "check_provider", "device_files", "provider_of", "restricted_ucx"]

FABRICS = {"UCX": ("rdma", "tcp"), "LIBFABRIC": ("efa", "cxi", "tcp")}
"""What can be demanded, by backend. Not UCX's shared memory: UCX needs another transport beside it
for what is not a copy, and does not tell which of the two it takes for a WRITE."""

_UCX_TLS = {"rdma": "ib,cuda_copy", "tcp": "tcp,cuda_copy"}
_DEVICES = {"/dev/infiniband/uverbs": "efa", "/dev/cxi": "cxi"}
_ADDRESS = b"dest_data_ep_0"
_SOCKET_FAMILIES = {(2).to_bytes(2, "little"), (10).to_bytes(2, "little")}


def restricted_ucx(
    fabric: str | None, environment: Mapping[str, str], options: Mapping[str, str]
) -> dict[str, str]:
    """The backend's options under which UCX uses `fabric` or nothing.

    Raises:
        ConfigurationError: UCX_TLS is set and allows another.
    """
    if fabric is None:
        return dict(options)
    tls = ucx_setting("TLS", environment, options)
    if not tls:
        config = [options.get("engine_config", ""), f"TLS={_UCX_TLS[fabric]}"]
        return {**options, "engine_config": ",".join(filter(None, config))}
    others = {
        "shared memory": may_share_memory(tls),
        "TCP": fabric != "tcp" and may_use_tcp(tls),
        "RDMA": fabric != "rdma" and may_use_rdma(tls),
    }
    allowed = [name for name, may in others.items() if may]
    if allowed:
        raise ConfigurationError(
            "fabric",
            fabric,
            f"UCX_TLS={tls} to allow nothing else, but it allows {' and '.join(allowed)}; "
            f"unset it, or set it to {_UCX_TLS[fabric]}",
        )
    return dict(options)


def device_files() -> Counter[str]:
    """How often this process holds each file of an RDMA device open."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith(tuple(_DEVICES)):
            found[target] += 1
    return found


def provider_of(metadata: bytes, opened: Counter[str]) -> str:
    """The provider of LIBFABRIC in use: "efa", "cxi", "tcp", or "" if that cannot be told.

    Args:
        metadata: The agent's own, which holds its address.
        opened: The device files that were opened for it.
    """
    at = metadata.find(_ADDRESS)
    if at < 0:
        return ""
    address = metadata[at + len(_ADDRESS) + 8 :]
    found = {name for file in opened for begin, name in _DEVICES.items() if file.startswith(begin)}
    if address[:2] in _SOCKET_FAMILIES and address[2:4] != b"\x00\x00":
        return "" if found else "tcp"
    return found.pop() if len(found) == 1 else ""


def check_provider(fabric: str | None, provider: str) -> None:
    """Refuse a provider that was not asked for. Without a demand every one but tcp will do.

    Raises:
        TransportError: It is another one, or cannot be told.
    """
    if provider and provider == (fabric or provider) and (fabric or provider != "tcp"):
        return
    devices = present_rdma_devices()
    raise TransportError(
        f"LIBFABRIC uses provider {provider or 'that cannot be told'}, but "
        f"{fabric or 'efa or cxi'} was asked for; this host has RDMA devices "
        f"{', '.join(devices) or 'none'}. Check the provider (`fi_info -p efa`), FI_PROVIDER and "
        'FI_EFA_*; fabric="tcp" allows TCP'
    )
