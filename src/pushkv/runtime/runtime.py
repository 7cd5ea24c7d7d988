"""One worker rank's runtime: an endpoint, a transport and a channel, in an event loop.

The loop is one in a thread of its own (`Runtime.start`), or the caller's (`Runtime.run`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING

import anyio
import anyio.abc
from attrs import evolve

from pushkv.core import rules
from pushkv.core.endpoint import Identity
from pushkv.core.errors import (
    ConfigurationError,
    LocalProtocolError,
    MissingDependencyError,
    PushKVError,
    TransportError,
)
from pushkv.core.events import Event
from pushkv.core.messages import Hello, RankAddress
from pushkv.layout import join_memory
from pushkv.transport import Transport
from pushkv.wire import PROTOCOL, frame

from .bridge import Bridge
from .channel import Channel
from .config import RuntimeConfig
from .credentials import Tls
from .failures import Failures
from .health import Health
from .loop import Loop
from .processes import this_process
from .steps import Steps
from .wakeup import Wakeup

if TYPE_CHECKING:
    from .admin.ages import Ages
    from .admin.server import AdminServer

__all__ = ["Runtime"]

log: logging.Logger = logging.getLogger("pushkv.runtime")

START_S = 60.0
STOP_MARGIN_S = 5.0
CLOSE_S = 1.0
"""For what is still queued, and for the transport, once everything has drained."""
CUT_S = 0.1
"""The same when it has not, and nobody waits any longer."""
HELLO_BYTES = 1024 * 1024
"""A peer's HELLO may be so much longer than four times our own."""
LOUD = frozenset(
    {
        "accept_failed",
        "channel_full",
        "channels_full",
        "dial_failed",
        "malformed_hello",
        "no_descriptors",
        "plaintext_refused",
        "stranger_dropped",
        "tls_failed",
        "too_many_connections",
        "too_many_messages",
        "wrong_identity",
    }
)
"""Causes that an operator should see, but not as often as a stranger likes."""
LOUD_EVERY_S = 10.0
"""A loud cause is a warning so often; between two it is a line for debugging."""


class Runtime:
    """Moves one worker rank's transfers, whatever the engine does.

    Build, `start` once, talk through `bridge`, `stop`. All methods may be called from any thread. A
    program that has an event loop may `await tasks.start(runtime.run)` there instead of `start`,
    and end it with `stop_soon`.

    Should it ever die, the engine is not left waiting: each attempt without an outcome is reported
    as not delivered, and so is each later one. Blocks are not reported as released then.
    """

    protocol = PROTOCOL
    """The newest that HELLO offers."""

    def __init__(self, config: RuntimeConfig, transport: Transport) -> None:
        self.config = config
        self.counters: Counter[str] = Counter()
        """How often each cause was counted (I5, I8); read-only for others."""
        self._transport = transport
        self._wakeup = Wakeup()
        self._failures = Failures(config.rank, self.counters)
        self.bridge: Bridge = Bridge(self._wakeup.set, self._failures.cut_off)
        """The engine's side: `submit`, `take`, `wait`."""
        self.steps: Steps = Steps(self._wakeup.set)
        """What the engine says of steps that compute what it has announced (`Computed.step`)."""
        self._loop: Loop | None = None
        self._inbox: deque[Event] = deque()
        self._quiet_until_s: dict[str, float] = {}
        self._port = 0
        self._lock = threading.Lock()
        self._is_used = False
        self._listens = threading.Event()
        self._is_safe = threading.Event()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._stop_at: float | None = None
        self._owns_transport = False
        self._drained = False
        self._thread = threading.Thread(
            target=self._main, name=f"pushkv-{config.engine}-{config.rank}", daemon=True
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which peers reach the control channel, once started."""
        return (self.config.advertise_host or self.config.listen_host, self._port)

    @property
    def health(self) -> Health | None:
        """The blocks of this moment, or None before the start. Any thread; never blocks."""
        if self._loop is None:
            return None
        return evolve(self._loop.health(), is_running=not self._ended.is_set())

    @property
    def written_bytes(self) -> int:
        """Bytes of WRITEs that were DONE. Any thread; never blocks."""
        return 0 if self._loop is None else self._loop.written_bytes

    def start(self) -> None:
        """Register memory, listen, and begin. Blocks until that is done (R13: and safe).

        Raises:
            ConfigurationError: The address cannot be listened on, or HELLO cannot hold a setting.
            TransportError: The transport cannot start.
            LocalProtocolError: It was started or stopped before.
        """
        with self._lock:
            self._claim()
            self._thread.start()
        if not self._listens.wait(START_S):
            self._stop_at = 0.0
            raise TransportError(f"the transport did not start within {START_S:g} s")
        self._is_safe.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    async def run(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> bool:
        """Live in the caller's event loop until stopped; `started` when `start` would return.

        Where this is cancelled or fails, it ends as a runtime does whose thread dies. Closing the
        transport may block for up to a second.

        Returns:
            Whether everything drained. Where not, peers may still WRITE: do not reuse the memory.

        Raises:
            ConfigurationError: The address cannot be listened on, or HELLO cannot hold a setting.
            TransportError: The transport cannot start.
            LocalProtocolError: It was started or stopped before.
        """
        with self._lock:
            self._claim()
        drained = False
        try:
            drained = await self._run(task_status)
        except Exception as error:
            self._died(error)
            raise
        finally:
            self._end(drained)
        return self._drained

    def _claim(self) -> None:
        if self._is_used:
            raise LocalProtocolError("a runtime is started once: make a new one")
        self._is_used = True

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Give up every transfer, let WRITEs drain for up to `timeout_s`, and end the thread.

        May be called again, and before `start`.

        Returns:
            Whether everything drained. Where not, peers may still WRITE: do not reuse the memory.
        """
        with self._lock:
            if not self._is_used:
                self._is_used = True
                self._end(drained=True)
                return True
        self.stop_soon(timeout_s)
        self._ended.wait(timeout_s + STOP_MARGIN_S)
        return self._drained

    def stop_soon(self, timeout_s: float = 5.0) -> None:
        """Begin to end, as `stop` does, and do not wait for it. The first call's time counts."""
        if self._stop_at is None:
            self._stop_at = timeout_s
        self._wakeup.set()

    def drain(self, *, on: bool = True) -> None:
        """Take nothing new from now on, and finish what is under way; or take it again.

        Blocks that are offered come back as not delivered (`Reason.CLOSED`), and so does what a
        peer registers for a request that had not arrived. `left` says how much is under way. Any
        thread; never blocks; nothing before the start.
        """
        if self._loop is not None:
            self._loop.drain.is_on = on
            self._wakeup.set()

    @property
    def left(self) -> int:
        """Attempts, prefills and WRITEs under way; 0 in a drained engine: it may be stopped.

        A quarantine counts until it ends. Any thread; never blocks.
        """
        return 0 if self._loop is None else self._loop.left

    # -- the event loop

    def _main(self) -> None:
        """All of it, in a thread of its own."""
        drained = False
        try:
            if self.config.cores:
                self._move_to(self.config.cores)
            drained = anyio.run(self._run)
        except BaseException as error:  # noqa: BLE001 - nothing else would tell the engine
            self._died(error)
        self._end(drained)

    def _died(self, error: BaseException) -> None:
        self._error = error
        if self._listens.is_set():
            log.critical(
                "the runtime of %s died; its transfers have failed",
                self.config.engine,
                exc_info=error,
            )

    def _end(self, drained: bool) -> None:
        """Tell the engine first; then nothing more is posted, and nothing is left open."""
        for report in self.bridge.end():
            self._failures.cut_off(report)
        if self._owns_transport:
            idle = self._transport.close(CLOSE_S if drained else CUT_S)
            drained = drained and idle
        else:
            drained = True  # nobody was ever told of the memory
        self._wakeup.close()
        self._drained = drained
        self._listens.set()
        self._is_safe.set()
        self._ended.set()

    def _move_to(self, cores: frozenset[int]) -> None:
        """The thread that starts us may be pinned to a model's core, and threads inherit."""
        try:
            os.sched_setaffinity(0, cores)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigurationError(
                "cores", sorted(cores), f"cores we may use ({error})"
            ) from None

    async def _run(
        self, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> bool:
        """Everything from the first socket to the last; returns whether all was drained."""
        config = self.config
        tls = None if config.credentials is None else Tls(config.credentials, config.engine)
        if config.plaintext:
            log.warning(
                "control channel of %s on %s is plaintext: whoever reaches it can overwrite the "
                "KV cache",
                config.engine,
                config.listen_host,
            )
        channel = Channel(
            self._deliver,
            self._count,
            config.limits,
            tls,
            plaintext=config.plaintext,
            network=config.network,
            random_bytes=config.random_bytes,
            protocol=self.protocol,
        )
        loop: Loop | None = None
        admin: AdminServer | None = None
        ages = self._ages()
        try:
            self._port = await channel.listen(config.listen_host, config.listen_port)
            identity = self._start_transport()
            if not config.limits.hello_bytes_most:
                channel.hello_bytes_most = HELLO_BYTES + 4 * len(frame(identity.hello))
            loop = Loop(
                config,
                identity,
                self._transport,
                channel,
                self.bridge,
                self.counters,
                self._failures,
                self._deliver,
                self.steps,
                ages,
            )
            self._loop = loop
            if ages is not None:
                admin = await self._admin(loop, identity.hello, ages, tls)
            return await self._serve(channel, loop, admin, task_status)
        finally:
            with anyio.CancelScope(shield=True):
                await channel.close(0)
                if admin is not None:
                    await admin.close()
            if loop is not None:
                loop.close()

    async def _serve(
        self,
        channel: Channel,
        loop: Loop,
        admin: AdminServer | None,
        task_status: anyio.abc.TaskStatus[None],
    ) -> bool:
        async with anyio.create_task_group() as tasks:
            channel.serve(tasks)
            loop.serve(tasks)
            if admin is not None:
                admin.serve(tasks)
            log.info(
                "pushkv engine %s incarnation %016x rank %d listens on %s:%d over %s",
                self.config.engine,
                self.config.incarnation,
                self.config.rank,
                *self.address,
                self._transport.capabilities.name,
            )
            self._listens.set()
            tasks.start_soon(self._drive, channel, loop, tasks.cancel_scope)
            try:
                await self._pass_grace()
            finally:
                self._is_safe.set()
                task_status.started()
        return self._drained

    async def _drive(self, channel: Channel, loop: Loop, scope: anyio.CancelScope) -> None:
        """Until stopped; then everything else of this runtime ends too."""
        self._drained = await loop.run(self._wakeup, self._inbox, self._stopping)
        await channel.close(CLOSE_S if self._drained else CUT_S)
        scope.cancel()

    async def _pass_grace(self) -> None:
        """R13. Peers are served meanwhile; only this engine may not hand out blocks yet."""
        grace = rules.restart_grace(self.config.policy.lease, self._transport.capabilities)
        until = self.config.clock() + grace
        while (left := until - self.config.clock()) > 0:  # noqa: ASYNC110 - the clocks may differ
            await anyio.sleep(left / 1e9)

    def _ages(self) -> Ages | None:
        """What only an operator asks for is kept for an operator only."""
        if self.config.admin_socket is None and not self.config.admin_port:
            return None
        from .admin.ages import Ages

        return Ages(self.config.clock)

    async def _admin(self, loop: Loop, hello: Hello, ages: Ages, tls: Tls | None) -> AdminServer:
        """The admin endpoint, listening."""
        from .admin.operator import Operator

        try:
            from .admin.server import AdminServer
        except ImportError as error:
            raise MissingDependencyError(
                f'the admin endpoint needs {error.name}: pip install "pushkv[admin]"'
            ) from error

        config = self.config
        operator = Operator(config, hello, loop, ages, self._deliver, self._set_drain)
        server = AdminServer(operator, self._count, tls)
        if config.admin_socket is not None:
            await server.listen_at(config.admin_socket)
        if config.admin_port:
            await server.listen_on(config.listen_host, config.admin_port)
        return server

    def _set_drain(self, on: bool) -> None:
        self.drain(on=on)

    def _start_transport(self) -> Identity:
        """Register the memory; returns what HELLO will say of it."""
        hello, layout, transport = self._hello(), self.config.layout, self._transport
        worker = Identity(hello, b"", b"").worker
        try:
            transport.start(
                worker, layout.regions_to_register(), self.config.clock, self._wakeup.set
            )
        except PushKVError:
            raise
        except Exception as error:
            raise TransportError(
                f"transport {transport.capabilities.name} did not start: {error!r}"
            ) from error
        self._owns_transport = True
        hello = evolve(hello, memory=join_memory(layout, transport.memory()))
        frame(hello)  # a HELLO that cannot be sent is a wrong setting, and known now
        return Identity(hello, layout.digest(), self.config.random_bytes(32))

    def _stopping(self) -> float | None:
        return self._stop_at

    def _hello(self) -> Hello:
        config = self.config
        host, port = self.address
        return Hello(
            protocol=self.protocol,
            nonce=0,
            engine=config.engine,
            incarnation=config.incarnation,
            rank=config.rank,
            model=tuple(sorted(config.model.items())),
            layout=config.layout.description(),
            transport=self._transport.capabilities.name,
            transport_version=self._transport.version,
            lease=config.policy.lease,
            directory=(RankAddress(config.rank, host, port),),
            memory=b"",
            process=this_process(),
        )

    def _deliver(self, event: Event) -> None:
        self._inbox.append(event)
        self._wakeup.set()

    def _count(self, cause: str, detail: str) -> None:
        self.counters[cause] += 1
        level = logging.DEBUG
        if cause in LOUD and anyio.current_time() >= self._quiet_until_s.get(cause, 0.0):
            self._quiet_until_s[cause] = anyio.current_time() + LOUD_EVERY_S
            level = logging.WARNING
        log.log(level, "control channel: %s (%s so far): %s", cause, self.counters[cause], detail)
