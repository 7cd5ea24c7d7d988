"""The transport itself: options, capabilities, and hand-over to the thread that owns the agent."""

from __future__ import annotations

import atexit
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import final

from pushkv.core.capabilities import Capabilities
from pushkv.core.errors import ConfigurationError, TransportError
from pushkv.core.ids import Duration, Worker, seconds
from pushkv.transport import Arrival, Completion, Region, Write, WriteOutcome

from ._agents import Agents
from ._demand import FABRICS, check_provider, device_files, provider_of, restricted_ucx
from ._fabric import open_rdma_devices, present_rdma_devices, ucx_fabric
from ._library import load_library
from ._loop import Setup
from ._outbox import Outbox
from ._regions import RegionTable

__all__ = ["NixlTransport"]

_log = logging.getLogger("pushkv.nixl")

_BACKENDS = ("UCX", "LIBFABRIC")

_PROGRESS_DELAY_US = {"UCX": 100_000, "LIBFABRIC": 400}
"""UCX's progress thread wakes on events and only as a fallback after the delay; LIBFABRIC's sleeps
for the delay, so that it is the least latency there."""

_DEATH_BOUND_S = {"UCX": 10.0, "LIBFABRIC": None}
"""How long after the certain death of the writing process its bytes may land. Copies made by the
writer's CPU (cma, xpmem) end with it, and a process has ended only when the kernel has closed its
sockets and queue pairs: what is left is in TCP's buffers, or on a wire. Over cma and loopback TCP
nothing was ever seen to land once the kernel reported the death of a writer killed amid 512 MiB.
Over LIBFABRIC nothing was measured."""

_CALL_TIMEOUT_S = {"UCX": 60.0, "LIBFABRIC": 10.0}
_CONNECTIONS_MOST = {"UCX": 64, "LIBFABRIC": 200}
_CONNECTIONS_LIMIT = 254

_EXIT_S = 2.0
_CLOSE_BY_THREAD = "the transport was closed before this WRITE ended"


@final
class NixlTransport:
    """A `pushkv.transport.Transport` over NIXL 1.5.

    `start` and `close` block within their bounds; every other method returns at once and may be
    called from any one thread at a time.
    """

    def __init__(
        self,
        backend: str = "UCX",
        backend_options: Mapping[str, str] | None = None,
        write_bound_s: float | None = None,
        death_bound_s: float | None = None,
        poll_interval_s: float = 0.0002,
        progress_delay_us: int | None = None,
        start_timeout_s: float = 30.0,
        call_timeout_s: float | None = None,
        connections_most: int | None = None,
        fabric: str | None = None,
    ) -> None:
        """Check the options and load NIXL.

        Args:
            backend: "UCX" or "LIBFABRIC".
            backend_options: NIXL's own options of that backend, strings both.
            write_bound_s: The deployer's word for how long after its permit check a WRITE can still
                land, in seconds; None where nobody can say. NIXL itself bounds nothing.
            death_bound_s: The same after the certain death of the writing process; None for what
                suits the backend, see `_DEATH_BOUND_S`.
            poll_interval_s: Between two looks at open WRITEs, or for arrivals, in seconds.
            progress_delay_us: The fallback interval of NIXL's progress thread in microseconds, at
                least 1; None for the one that suits the backend.
            start_timeout_s: How long `start` may take, in seconds.
            call_timeout_s: How long one call into NIXL may take before its agent is given up, in
                seconds; None for 60 over UCX, 10 over LIBFABRIC.
            connections_most: After how many connections that cost it something for good an agent
                is replaced; None for 64 over UCX, 200 over LIBFABRIC, where 255 is NIXL's limit.
            fabric: What WRITEs must go over; another fabric is then an error, not a fall-back. Over
                UCX "rdma" or "tcp", or None for what UCX chooses. Over LIBFABRIC "efa", "cxi" or
                "tcp", or None for any but TCP.

        Raises:
            ConfigurationError: An option is wrong.
            MissingDependencyError: NIXL is not installed.
        """
        options = dict(backend_options or {})
        _check_backend(backend, options)
        delay_us = _PROGRESS_DELAY_US[backend] if progress_delay_us is None else progress_delay_us
        if type(delay_us) is not int or delay_us < 1:
            raise ConfigurationError("progress_delay_us", delay_us, "an integer of at least 1")
        _check_time("poll_interval_s", poll_interval_s)
        _check_time("start_timeout_s", start_timeout_s)
        if call_timeout_s is None:
            call_timeout_s = _CALL_TIMEOUT_S[backend]
        _check_time("call_timeout_s", call_timeout_s)
        if connections_most is None:
            connections_most = _CONNECTIONS_MOST[backend]
        if type(connections_most) is not int or not 1 <= connections_most <= _CONNECTIONS_LIMIT:
            raise ConfigurationError(
                "connections_most", connections_most, f"1 to {_CONNECTIONS_LIMIT}"
            )
        if fabric is not None and fabric not in FABRICS[backend]:
            raise ConfigurationError("fabric", fabric, f"None or one of {FABRICS[backend]}")
        self._backend = backend
        self._fabric = fabric
        if backend == "UCX":
            options = restricted_ucx(fabric, os.environ, options)
            self._options = _without_spinlock(options)
        else:
            self._options = options
        self._poll_interval_s = poll_interval_s
        self._progress_delay_us = delay_us
        self._start_timeout_s = start_timeout_s
        self._library = load_library()
        if not self._library.version.startswith("1.5."):
            _log.warning("NIXL %s was never tested with pushkv; 1.5.1 was", self._library.version)
        over_ucx = self._reconnects = backend == "UCX"
        self._call_timeout_s = call_timeout_s
        self._connections_most = connections_most
        self._capabilities = Capabilities(
            name=f"nixl/{backend}",
            done_means_visible=over_ucx,
            write_bound=_bound("write_bound_s", write_bound_s),
            death_bound=_bound(
                "death_bound_s",
                _DEATH_BOUND_S[backend] if death_bound_s is None else death_bound_s,
            ),
            reaches_successor=not over_ucx,
            # LIBFABRIC's efa takes shared memory by itself to a peer of the same host.
            shared_memory=(
                ucx_fabric(os.environ, options, (), ()).shared_memory
                if over_ucx
                else fabric != "tcp"
            ),
        )
        self._outbox = Outbox()
        self._agents: Agents | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What is promised; constant. See the package's docstring for the reasons."""
        return self._capabilities

    @property
    def version(self) -> str:
        """NIXL's exact version and the backend: peers of different NIXL versions have crashed."""
        return f"nixl {self._library.version} {self._backend}"

    @property
    def dropped_arrivals(self) -> int:
        """How many notifications were dropped: not from pushkv, damaged, or for somebody else."""
        return 0 if self._agents is None else self._agents.dropped

    def start(
        self,
        worker: Worker,
        regions: Sequence[Region],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        """Make `regions` writable and begin; blocks until the agent stands.

        Raises:
            ConfigurationError: A region is wrong.
            TransportError: The agent did not come to stand, or the transport was started before.
        """
        if self._agents is not None:
            raise TransportError("a NixlTransport is started once: make a new one")
        self._outbox.wake = wake
        setup = Setup(
            self._library,
            self._backend,
            self._options,
            self._progress_delay_us,
            self._poll_interval_s,
            self._capabilities,
            worker,
            RegionTable.of(regions),
            clock,
            self._reconnects,
            self._connections_most,
            self._call_timeout_s,
        )
        agents = self._agents = Agents(setup, self._outbox, receiver_writes=self._reconnects)
        thread = agents.receiver
        # A peer that vanishes without disconnecting has been seen to break the other's queue pair.
        atexit.register(self._at_exit)
        before = device_files()
        thread.start()
        if not thread.started.wait(self._start_timeout_s):
            agents.stop()
            raise TransportError(
                f"the NIXL agent did not come to stand within {self._start_timeout_s} s: look at "
                "the UCX_* environment (UCX_NET_DEVICES, UCX_TLS) and at the log of UCX"
            )
        if isinstance(thread.error, TransportError):
            raise thread.error
        if thread.error is not None:
            raise TransportError(
                f"the NIXL agent did not start: {thread.error!r}; check that the regions are "
                "mapped memory, `ulimit -l`, and the UCX_* environment"
            ) from thread.error
        self._check_fabric(worker, provider_of(thread.memory, device_files() - before))

    def memory(self) -> bytes:
        """What a peer needs to WRITE here; what was told before stays good.

        Raises:
            TransportError: The transport is not started.
        """
        memory = self._started().memory()
        if not memory:
            raise TransportError("the NIXL agent does not stand: start() failed")
        return memory

    def add_peer(self, peer: Worker, memory: bytes) -> None:
        """Learn `peer`, or connect a lost one anew. What is wrong is the cause of WRITEs to it."""
        self._started().add_peer(peer, memory)

    def remove_peer(self, peer: Worker) -> None:
        """Forget `peer` once WRITEs to it are over; those with nothing posted FAIL at once."""
        self._started().remove_peer(peer)

    def post(self, write: Write) -> None:
        """Order a WRITE; one of no bytes is DONE, with nothing posted and no arrival."""
        self._started().post(write)

    def look_for_arrivals(self, active: bool) -> None:
        """Look for arrivals every poll interval from now on, or stop."""
        self._started().look(active)

    def poll(self) -> Sequence[Completion | Arrival]:
        """What has happened since the last call, oldest first; takes no lock."""
        return self._outbox.drain()

    def close(self, timeout_s: float) -> bool:
        """Stop. Nothing more is posted; what is posted is waited for up to `timeout_s` seconds.

        Returns:
            Whether every handle ended and the memory is withdrawn: only then may it be freed. If
            not, what was open is reported UNKNOWN, the thread goes on waiting for it in the
            background, and `close` may be called again.
        """
        agents = self._agents
        if agents is None:
            return True
        agents.stop()
        ended = agents.join(timeout_s)
        self._outbox.report_all(WriteOutcome.UNKNOWN, _CLOSE_BY_THREAD, source_idle=False)
        self._outbox.flush()
        if not ended:
            return False
        atexit.unregister(self._at_exit)
        return True

    def _at_exit(self) -> None:
        if not self.close(_EXIT_S):
            _log.warning("the process ends while WRITEs of NIXL are open")

    def _started(self) -> Agents:
        if self._agents is None:
            raise TransportError("the transport is not started: call start() first")
        return self._agents

    def _check_fabric(self, worker: Worker, provider: str) -> None:
        if self._backend == "LIBFABRIC":
            try:
                check_provider(self._fabric, provider)
            except TransportError:
                self.close(_EXIT_S)
                raise
            _log.info("%s writes over %s, provider %s", worker, self.version, provider)
            return
        opened = open_rdma_devices()
        fabric = ucx_fabric(os.environ, self._options, present_rdma_devices(), opened)
        if self._fabric == "rdma" and not opened:
            self.close(_EXIT_S)
            raise TransportError(
                f"fabric rdma was asked for, but UCX opened no RDMA device: {fabric.summary}; this "
                f"host has {', '.join(present_rdma_devices()) or 'none'}"
            )
        _log.info("%s writes over %s: %s", worker, self.version, fabric.summary)
        for warning in fabric.warnings:
            _log.warning("%s", warning)


def _check_backend(backend: str, options: Mapping[str, str]) -> None:
    if backend not in _BACKENDS:
        raise ConfigurationError("backend", backend, f"one of {_BACKENDS}")
    for key, value in options.items():
        if type(key) is not str or type(value) is not str:
            raise ConfigurationError("backend_options", {key: value}, "strings only")
    if options.get("ucx_error_handling_mode", "peer") != "peer":
        # In mode "none" notifications to a dead peer succeed, and nothing tells it from a live one.
        raise ConfigurationError(
            "backend_options['ucx_error_handling_mode']",
            options["ucx_error_handling_mode"],
            "'peer': otherwise a dead peer goes unnoticed",
        )


def _without_spinlock(options: Mapping[str, str]) -> dict[str, str]:
    """UCX locks its worker with a spinlock by default.

    Its progress thread and ours wake each other while one of them holds it; where they share a core
    (measured on two) the other then spins away its whole time slice, and a post takes 1 to 6 ms
    instead of 0.1.
    """
    config = options.get("engine_config", "")
    if "USE_MT_MUTEX=" in config:
        return dict(options)
    return {**options, "engine_config": ",".join(filter(None, (config, "USE_MT_MUTEX=y")))}


def _check_time(field: str, value: float) -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ConfigurationError(field, value, "a finite number of seconds above 0")


def _bound(field: str, value: float | None) -> Duration | None:
    if value is None:
        return None
    _check_time(field, value)
    return seconds(value)
