"""One worker rank's runtime: a thread with an event loop, an endpoint and a transport."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import Counter, deque

import anyio
import anyio.to_thread
from attrs import evolve

from pushkv.core.endpoint import Identity
from pushkv.core.errors import TransportError
from pushkv.core.events import Event
from pushkv.core.messages import Hello, RankAddress
from pushkv.core.rules import restart_grace
from pushkv.layout import join_memory
from pushkv.transport import Transport
from pushkv.wire import PROTOCOL

from .bridge import Bridge
from .channel import Channel, is_loopback
from .config import RuntimeConfig
from .loop import Loop
from .wakeup import Wakeup

__all__ = ["Runtime"]

log = logging.getLogger("pushkv.runtime")

START_S = 60.0


class Runtime:
    """Moves one worker rank's transfers in a thread of its own, whatever the engine does.

    Build, `start`, talk through `bridge`, `stop`. All methods may be called from any thread.
    """

    def __init__(self, config: RuntimeConfig, transport: Transport) -> None:
        self.config = config
        self.counters: Counter[str] = Counter()
        """How often each cause was counted (I5, I8); read-only for others."""
        self._transport = transport
        self._wakeup = Wakeup()
        self.bridge = Bridge(self._wakeup.set)
        """The engine's side: `submit`, `take`, `wait`."""
        self._inbox: deque[Event] = deque()
        self._port = 0
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._stop_at: float | None = None
        self._drained = False
        self._thread = threading.Thread(
            target=self._main, name=f"pushkv-{config.engine}-{config.rank}", daemon=True
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which peers reach the control channel, once started."""
        return (self.config.advertise_host or self.config.listen_host, self._port)

    def start(self) -> None:
        """Register memory, listen, and begin. Blocks until that is done (R13: and safe).

        Raises:
            ConfigurationError: The address cannot be listened on.
            TransportError: The transport cannot start.
        """
        self._thread.start()
        if not self._ready.wait(START_S):
            raise TransportError(f"the transport did not start within {START_S:g} s")
        if self._error is not None:
            raise self._error

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Give up every transfer, let WRITEs drain for up to `timeout_s`, and end the thread.

        Returns:
            Whether everything drained. Where not, peers may still WRITE: do not reuse the memory.
        """
        self._stop_at = timeout_s
        self._wakeup.set()
        self._thread.join(timeout_s + START_S)
        return self._drained and not self._thread.is_alive()

    # -- the thread

    def _main(self) -> None:
        try:
            if self.config.cores:
                # The thread that starts us may be pinned to a model's core, and threads inherit.
                os.sched_setaffinity(0, self.config.cores)
            anyio.run(self._run)
        except BaseException as error:
            self._error = error
            if self._ready.is_set():
                log.exception("the runtime of %s ended", self.config.engine)
        finally:
            self._ready.set()
            self.bridge.interrupt()
            self._wakeup.close()

    async def _run(self) -> None:
        config = self.config
        if not is_loopback(config.listen_host):
            log.warning(
                "control channel of %s on %s is plaintext: whoever reaches it can overwrite the "
                "KV cache",
                config.engine,
                config.listen_host,
            )
        channel = Channel(self._deliver, self._count)
        async with anyio.create_task_group() as tasks:
            self._port = await channel.listen(config.listen_host, config.listen_port, tasks)
            hello = self._hello()
            worker = Identity(hello, b"", b"").worker
            self._transport.start(
                worker, config.layout.regions_to_register(), config.clock, self._wakeup.set
            )
            memory = join_memory(config.layout, self._transport.memory())
            identity = Identity(
                evolve(hello, memory=memory), config.layout.digest(), secrets.token_bytes(32)
            )
            grace = restart_grace(config.policy.lease, self._transport.capabilities)
            await anyio.sleep(grace / 1e9)
            loop = Loop(config, identity, self._transport, channel, self.bridge, self.counters)
            self._ready.set()
            log.info(
                "pushkv engine %s incarnation %016x rank %d listens on %s:%d over %s",
                config.engine,
                config.incarnation,
                config.rank,
                *self.address,
                self._transport.capabilities.name,
            )
            try:
                self._drained = await loop.run(self._wakeup, self._inbox, self._stopping)
            finally:
                await channel.close()
                closing = self._transport.close
                idle = await anyio.to_thread.run_sync(closing, 2.0)
                self._drained = self._drained and idle
                loop.close()
            tasks.cancel_scope.cancel()

    def _stopping(self) -> float | None:
        return self._stop_at

    def _hello(self) -> Hello:
        config = self.config
        host, port = self.address
        return Hello(
            protocol=PROTOCOL,
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
        )

    def _deliver(self, event: Event) -> None:
        self._inbox.append(event)
        self._wakeup.set()

    def _count(self, cause: str, detail: str) -> None:
        self.counters[cause] += 1
        log.debug("%s: %s", cause, detail)
