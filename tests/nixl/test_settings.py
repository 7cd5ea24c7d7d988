"""Options, capabilities, the table of outcomes, the fabric, and the promise to report once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from tests.nixl.test_bytes import ATTEMPT, write

from pushkv.core.errors import ConfigurationError, MissingDependencyError, TransportError
from pushkv.core.ids import EngineId, Incarnation, Worker, seconds
from pushkv.transport import Arrival, Transport, WriteOutcome
from pushkv_nixl import NixlTransport
from pushkv_nixl._fabric import ucx_fabric
from pushkv_nixl._outbox import Outbox
from pushkv_nixl._outcomes import ERRORS, Meaning, Phase, meaning

WORKER = Worker(EngineId("P"), Incarnation(1), 0)


def test_importing_the_package_loads_neither_nixl_nor_torch() -> None:
    code = (
        "import sys, pushkv_nixl\n"
        "print([name for name in sys.modules if name.split('.')[0] in"
        " ('nixl', 'nixl_cu12', 'nixl_cu13', 'torch')])"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert seen.stdout.strip() == "[]"


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, f"{name}._bindings", raising=False)
    with pytest.raises(MissingDependencyError, match="install nixl-cu13 or nixl-cu12"):
        NixlTransport()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"backend": "GDS"}, "backend"),
        ({"backend_options": {"num_threads": 2}}, "backend_options"),
        ({"backend_options": {"ucx_error_handling_mode": "none"}}, "ucx_error_handling_mode"),
        ({"progress_delay_us": 0}, "progress_delay_us"),
        ({"progress_delay_us": 1.5}, "progress_delay_us"),
        ({"poll_interval_s": 0}, "poll_interval_s"),
        ({"poll_interval_s": True}, "poll_interval_s"),
        ({"write_bound_s": -1.0}, "write_bound_s"),
        ({"death_bound_s": float("inf")}, "death_bound_s"),
        ({"start_timeout_s": "30"}, "start_timeout_s"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        NixlTransport(**options)  # type: ignore[arg-type]


@pytest.mark.nixl
def test_capabilities_say_what_the_backend_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    transport: Transport = NixlTransport()
    promised = transport.capabilities
    assert promised.name == "nixl/UCX"
    assert promised.done_means_visible
    assert promised.write_bound is None
    assert promised.death_bound == seconds(10)
    assert not promised.reaches_successor
    assert promised.shared_memory
    assert transport.version.startswith("nixl 1.")
    assert transport.version.endswith(" UCX")

    monkeypatch.setenv("UCX_TLS", "tcp")
    bounded = NixlTransport(write_bound_s=0.5, death_bound_s=2).capabilities
    assert not bounded.shared_memory
    assert bounded.write_bound == seconds(0.5)
    assert bounded.death_bound == seconds(2)

    weak = NixlTransport(backend="LIBFABRIC").capabilities
    assert not weak.done_means_visible
    assert weak.reaches_successor
    assert weak.death_bound is None
    assert weak.shared_memory


@pytest.mark.nixl
def test_calls_before_start_and_a_second_start_are_refused() -> None:
    transport = NixlTransport()
    for early in (transport.memory, lambda: transport.post(write())):
        with pytest.raises(TransportError, match="start"):
            early()
    assert transport.close(0.1) is True
    assert transport.poll() == []


@pytest.mark.nixl
def test_a_backend_that_does_not_start_says_what_to_do() -> None:
    transport = NixlTransport(backend_options={"engine_config": "NET_DEVICES=nosuch,TLS=nosuch"})
    with pytest.raises(TransportError, match="UCX"):
        transport.start(WORKER, [], time.monotonic_ns, lambda: None)
    with pytest.raises(TransportError, match="once"):
        transport.start(WORKER, [], time.monotonic_ns, lambda: None)
    assert transport.close(5.0) is True


def test_only_an_error_before_the_post_is_a_failure() -> None:
    """R14: every other error, known or not, leaves the outcome UNKNOWN."""
    kinds = {kind for table in ERRORS.values() for kind in table} | {"nixlSomethingNew"}
    for kind in kinds:
        assert meaning(Phase.PREPARE, kind).outcome is WriteOutcome.FAILED
        assert meaning(Phase.POST, kind).outcome is WriteOutcome.UNKNOWN
        assert meaning(Phase.CHECK, kind).outcome is WriteOutcome.UNKNOWN
    lost = Meaning(WriteOutcome.UNKNOWN, peer_lost=True)
    assert meaning(Phase.POST, "nixlRemoteDisconnectError") == lost
    assert meaning(Phase.CHECK, "nixlRemoteDisconnectError") == lost
    assert not meaning(Phase.PREPARE, "nixlInvalidParamError").peer_lost


@pytest.mark.nixl
def test_the_table_names_exceptions_that_nixl_has() -> None:
    from pushkv_nixl._library import load_library

    bindings = load_library().bindings
    for kind in {kind for table in ERRORS.values() for kind in table}:
        assert issubclass(getattr(bindings, kind), Exception)


@pytest.mark.parametrize(
    ("tls", "config", "shared"),
    [
        ("", "", True),
        ("all", "", True),
        ("tcp", "", False),
        ("rc_x,cuda_copy,tcp", "", False),
        ("rc,cma", "", True),
        ("rc,cuda_ipc", "", True),
        ("rc,sm", "", True),
        ("^cma", "", True),
        ("^cma,knem,xpmem,sysv,posix", "", False),
        ("^sm", "", False),
        ("", "TLS=tcp,USE_MT_MUTEX=y", False),
        ("all", "TLS=tcp", True),
    ],
)
def test_shared_memory_is_assumed_unless_the_settings_exclude_it(
    tls: str, config: str, shared: bool
) -> None:
    environment = {"UCX_TLS": tls} if tls else {}
    fabric = ucx_fabric(environment, {"engine_config": config}, (), ())
    assert fabric.shared_memory is shared


def test_a_silent_fallback_to_tcp_is_warned_about() -> None:
    fallen = ucx_fabric({"UCX_NET_DEVICES": "mlx5_9:1"}, {}, ["mlx5_0"], [])
    assert "mlx5_0" in fallen.warnings[0]
    assert "mlx5_9:1" in fallen.summary
    assert "TCP" in fallen.summary
    for fine in (
        ucx_fabric({}, {}, ["mlx5_0"], ["uverbs0"]),
        ucx_fabric({"UCX_TLS": "tcp,cma"}, {}, ["mlx5_0"], []),
        ucx_fabric({}, {}, [], []),
    ):
        assert fine.warnings == ()
    assert "RDMA (uverbs0)" in ucx_fabric({}, {}, ["mlx5_0"], ["uverbs0"]).summary


def test_a_write_is_reported_once_whoever_is_first() -> None:
    outbox = Outbox()
    numbers = [outbox.owe(write()) for _ in range(2000)]
    start = threading.Barrier(3)

    def report(outcome: WriteOutcome) -> None:
        start.wait()
        for number in numbers:
            outbox.report(number, outcome)

    threads = [
        threading.Thread(target=report, args=(outcome,))
        for outcome in (WriteOutcome.DONE, WriteOutcome.UNKNOWN)
    ]
    for thread in threads:
        thread.start()
    start.wait()
    for thread in threads:
        thread.join()
    assert len(outbox.drain()) == 2000
    assert outbox.drain() == []


def test_the_reader_is_woken_once_per_flush_and_its_errors_stay_outside() -> None:
    woken: list[int] = []
    outbox = Outbox()

    def wake() -> None:
        woken.append(len(woken))
        raise RuntimeError("the reader's own")

    outbox.wake = wake
    outbox.flush()
    assert woken == []
    outbox.arrived(Arrival(ATTEMPT, 0, 0))
    outbox.arrived(Arrival(ATTEMPT, 1, 0))
    outbox.flush()
    outbox.flush()
    assert woken == [0]
    assert [arrival.part for arrival in outbox.drain()] == [0, 1]
