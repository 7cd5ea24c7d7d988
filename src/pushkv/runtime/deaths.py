"""Proof that a peer is dead: from the kernel on its own host, or from an orchestrator's word.

`WriterGone` frees what a dead producer may have been writing into, and what a WRITE to a dead
consumer, of which NIXL has never said that it ended, may be reading from (R14). It follows certain
death by the transport's `death_bound`; where that is unknown, nothing here is a proof and nobody
looks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress

import anyio
import anyio.abc
import anyio.to_thread

from pushkv.core.effects import PeerJoined, WriterJoined
from pushkv.core.events import WriterGone
from pushkv.core.ids import Duration, Worker

from .processes import ProcessEndedError, open_process

__all__ = ["AskWhetherGone", "Deaths"]

log: logging.Logger = logging.getLogger("pushkv.runtime")

ASK_EVERY_S = 1.0

AskWhetherGone = Callable[[Worker, str], bool]
"""Whether every process of this rank, reached at this host, is dead for certain.

Called in a thread of its own, about once a second while a lost peer keeps blocks: a producer those
in quarantine, a consumer the source of a WRITE that never ended. A consumer's host is "". True is
taken for a proof: a name that no longer resolves, a refused connection or a successor is none. An
exception means that it cannot be said.
"""


class Deaths:
    """Watches the peers that may write here or be written to. Owned by the runtime's thread.

    Args:
        death_bound: How long after its process's death a producer's bytes may land.
        ask: The orchestrator's word; None where there is none.
        awaited: The peers whose certain death would give blocks back now.
        is_written_to: Whether a WRITE to this peer is not over.
        happen: Takes the proof.
    """

    def __init__(
        self,
        death_bound: Duration,
        ask: AskWhetherGone | None,
        awaited: Callable[[], frozenset[Worker]],
        is_written_to: Callable[[Worker], bool],
        happen: Callable[[WriterGone], None],
    ) -> None:
        self._bound_s = death_bound / 1e9
        self._ask = ask
        self._awaited = awaited
        self._is_written_to = is_written_to
        self._happen = happen
        self._hosts: dict[Worker, str] = {}
        self._tasks: anyio.abc.TaskGroup | None = None

    def serve(self, tasks: anyio.abc.TaskGroup) -> None:
        """Watch in `tasks` until they are cancelled."""
        self._tasks = tasks
        if self._ask is not None:
            tasks.start_soon(self._ask_on, self._ask)

    def joined(self, effect: PeerJoined | WriterJoined) -> None:
        """A link stands; a peer that is watched already is not watched twice."""
        if effect.peer in self._hosts or self._tasks is None:
            return
        self._hosts[effect.peer] = effect.hello.directory[0].host if effect.hello.directory else ""
        self._tasks.start_soon(self._watch, effect.peer, effect.hello.process)

    async def _watch(self, worker: Worker, name: str) -> None:
        with suppress(ProcessEndedError):
            process = await self._opened(name)
            if process is None:
                if self._ask is None:
                    del self._hosts[worker]
                return
            try:
                await anyio.wait_readable(process)
            finally:
                os.close(process)
        await self._gone(worker, "its process has ended")

    async def _opened(self, name: str) -> int | None:
        """A pidfd, waiting for a descriptor where none is left: dropped, the proof would be too."""
        while True:
            try:
                return open_process(name)
            except OSError as error:
                log.warning("a peer's process cannot be watched yet: %s", error)
                await anyio.sleep(ASK_EVERY_S)

    async def _gone(self, worker: Worker, why: str) -> None:
        self._hosts.pop(worker, None)
        await anyio.sleep(self._bound_s)
        log.info(
            "engine %s incarnation %016x rank %d is gone: %s",
            worker.engine,
            worker.incarnation,
            worker.rank,
            why,
        )
        self._happen(WriterGone(worker))
        while self._is_written_to(worker):
            # NIXL may not have noticed yet: what it says of that WRITE later needs the proof, too.
            await anyio.sleep(ASK_EVERY_S)
            self._happen(WriterGone(worker))

    async def _ask_on(self, ask: AskWhetherGone) -> None:
        assert self._tasks is not None, "asked in the tasks that it serves"
        while True:
            await anyio.sleep(ASK_EVERY_S)
            for worker in self._awaited():
                host = self._hosts.get(worker)
                if host is not None and await self._is_gone(ask, worker, host):
                    self._tasks.start_soon(self._gone, worker, "the orchestrator says so")

    async def _is_gone(self, ask: AskWhetherGone, worker: Worker, host: str) -> bool:
        try:
            return await anyio.to_thread.run_sync(ask, worker, host, abandon_on_cancel=True)
        except Exception:
            log.exception("asked whether engine %s is gone, its hook failed", worker.engine)
            return False
