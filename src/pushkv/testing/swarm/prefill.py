"""A prefill engine of a swarm: computes in chunks, is preempted, aborts, keeps its source."""

from __future__ import annotations

from collections import Counter, deque
from enum import StrEnum
from functools import partial

from attrs import define, field

from pushkv.core.effects import Report, SourceReleased, SourceYielded
from pushkv.core.events import (
    Arrived,
    Computed,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
    Proven,
)
from pushkv.core.ids import TransferId

from .engine import MILLISECOND, Engine, Rank, Request, Surroundings
from .pool import BLOCK_TOKENS, Holder, ViolationError

__all__ = ["Prefill"]

PREEMPTED_SLOWLY = 200 * MILLISECOND
LOOK_EVERY = 100 * MILLISECOND
LOOKS_MOST = 10
"""How often a prefill without its source's word is looked at before it is given up."""


class At(StrEnum):
    """Where a prefill is."""

    WAITING = "waits for blocks"
    RUNNING = "computes"
    PREEMPTED = "is preempted"
    OVER = "is over"


@define(eq=False)
class Job:
    """One prompt's prefill, and its source blocks at each rank.

    Attributes:
        yielded: The ranks that gave the blocks of the latest preemption back.
        freed: The ranks that released the source.
    """

    request: Request
    holder: Holder
    began: int
    at: At = At.WAITING
    done_blocks: int = 0
    was_preempted: bool = False
    yielded: set[int] = field(factory=set)
    freed: set[int] = field(factory=set)

    @property
    def blocks(self) -> int:
        """Of the whole prompt."""
        return -(-self.request.tokens // BLOCK_TOKENS)


class Prefill(Engine):
    """Each of its ranks writes the whole prompt into every consumer rank."""

    def __init__(self, around: Surroundings, name: str, ranks: int, seed: str) -> None:
        super().__init__(around, name, ranks, seed)
        self.jobs: dict[str, Job] = {}
        self._queue: deque[Job] = deque()
        self._owed: Counter[tuple[TransferId, int]] = Counter()

    def begin(self) -> None:
        """A new life knows nothing of the one before."""
        if not self.is_up:
            self.jobs = {}
            self._queue.clear()
            self._owed.clear()
        super().begin()

    def admit(self, request: Request) -> None:
        """A request is known from here on; its prefill begins when there are blocks."""
        holder = Holder("source", request.transfer)
        job = self.jobs[request.transfer] = Job(request, holder, self.around.agenda.now())
        for rank in self.ranks:
            rank.submit(Arrived(request.transfer, self.digest_of(request)))
        if "abort" in request.trouble:
            self.later(request.trouble["abort"], partial(self._abort, job))
        self._queue.append(job)
        self._fill()

    def _fill(self) -> None:
        while self._queue and self.is_ready:
            job = self._queue[0]
            if job.at is not At.WAITING:
                self._queue.popleft()
                continue
            if any(len(rank.pool.free) < job.blocks for rank in self.ranks):
                return
            self._queue.popleft()
            for rank in self.ranks:
                rank.pool.take(job.blocks, job.holder)
                if job.was_preempted:
                    rank.submit(PrefillResumed(job.request.transfer))
            job.at, job.done_blocks = At.RUNNING, 0
            self._soon(job)

    def _soon(self, job: Job) -> None:
        trouble = job.request.trouble
        slow = trouble.get("slow prefill", 0)
        if "preempt prefill" in trouble and not job.was_preempted:
            slow += PREEMPTED_SLOWLY  # else it is over, or nobody has registered, by then
        wait = 1 + self.random.randrange(8 * MILLISECOND + slow)
        self.later(wait, partial(self._compute, job, job.done_blocks))

    def _compute(self, job: Job, done: int) -> None:
        """One chunk."""
        if job.at is not At.RUNNING or job.done_blocks != done:
            return
        request = job.request
        until = min(done + request.chunk_blocks, job.blocks)
        final = until == job.blocks
        tokens = request.tokens if final else until * BLOCK_TOKENS
        job.done_blocks = until
        if final:
            job.at = At.OVER
        for rank in self.ranks:
            rank.pool.fill(job.holder, request.serial, 0, done, until)
            blocks = rank.pool.held[job.holder]
            rank.submit(Computed(request.transfer, tokens, (blocks,), final))
        if final:
            self._settle(job)
            return
        if "preempt prefill" in request.trouble and not done and not job.was_preempted:
            self.later(request.trouble["preempt prefill"], partial(self._preempt, job))
        self._soon(job)

    def _abort(self, job: Job) -> None:
        """The engine gives the request up, whenever that is."""
        if self.jobs.get(job.request.transfer) is not job or self.is_stopping:
            return
        for rank in self.ranks:
            rank.submit(PrefillAborted(job.request.transfer))
        job.at = At.OVER
        self._settle(job)
        self._fill()

    def _preempt(self, job: Job) -> None:
        """The blocks are wanted; each rank says when no WRITE reads them there any more."""
        if job.at is not At.RUNNING or self.is_stopping:
            return
        job.at = At.PREEMPTED
        job.yielded.clear()
        for rank in self.ranks:
            self._owed[job.request.transfer, rank.number] += 1
            rank.submit(PrefillPreempted(job.request.transfer))
        self.later(LOOK_EVERY, partial(self._look, job, 1, frozenset()))

    def _look(self, job: Job, looks: int, idle_before: frozenset[int]) -> None:
        """A rank must say it as soon as it is so; the engine does not wait for it for ever."""
        if job.at is not At.PREEMPTED or self.is_stopping:
            return
        idle = frozenset(
            rank.number for rank in self.ranks if not self._may_read(rank, job.request.transfer)
        )
        unsaid = (idle & idle_before) - job.yielded - job.freed
        if unsaid:
            raise ViolationError(
                "I3", f"{self.name}: {job.holder} is idle and never yielded at {sorted(unsaid)}"
            )
        if looks < LOOKS_MOST:
            self.later(LOOK_EVERY, partial(self._look, job, looks + 1, idle))
        else:
            self._abort(job)

    def _may_read(self, rank: Rank, transfer: TransferId) -> bool:
        assert rank.worker is not None
        return self.around.open_reads(rank.worker, transfer) > 0

    def hear(self, rank: Rank, report: Report) -> None:
        """The source of one transfer, or what a preemption wants of it, is free at one rank."""
        if not isinstance(report, SourceReleased | SourceYielded):
            raise ViolationError("I3", f"{rank.host}: {report} to an engine that prefills")
        assert rank.worker is not None
        if self.around.open_writes(rank.worker, report.transfer):
            raise ViolationError("I1", f"{rank.host}: {report} while a WRITE reads it")
        job = self.jobs.get(report.transfer)
        if isinstance(report, SourceReleased):
            if job is None or rank.number in job.freed:
                raise ViolationError("I3", f"{rank.host}: {report} a second time")
            job.freed.add(rank.number)
        else:
            if not self._owed[report.transfer, rank.number]:
                raise ViolationError("I3", f"{rank.host}: {report} without a preemption")
            self._owed[report.transfer, rank.number] -= 1
            self.around.counters["sources yielded"] += 1
            if job is None:
                return  # it was released before the preemption, and given up since
            job.yielded.add(rank.number)
        self._settle(job)
        self._fill()

    def _settle(self, job: Job) -> None:
        """A rank's blocks go back when nothing reads them and no prefill writes them."""
        if job.at not in (At.PREEMPTED, At.OVER):
            return
        said = job.yielded | job.freed if job.at is At.PREEMPTED else job.freed
        for rank in self.ranks:
            if rank.number in said and job.holder in rank.pool.held:
                rank.pool.give(job.holder)
                self.around.counters["sources given back"] += 1
        if len(said) < len(self.ranks):
            return
        if job.at is At.OVER:
            self.jobs.pop(job.request.transfer, None)
        elif job.freed:
            self._abort(job)  # the core has ended it: nobody wants the rest
        else:
            job.at, job.was_preempted = At.WAITING, True
            self._queue.append(job)

    def prove(self, patience: int, keep_one_in: int) -> None:
        """The operator has looked: nothing reads sources of long ago any more."""
        now = self.around.agenda.now()
        for job in list(self.jobs.values()):
            kept = keep_one_in and job.request.serial % keep_one_in == 0
            old = now - max(job.began, self.around.last_post(job.request.transfer)) > patience
            if job.at is At.OVER and old and not kept:
                for rank in self.ranks:
                    rank.submit(Proven(job.request.transfer))

    def lose_all(self) -> None:
        """Everything it knew is gone."""
        self.jobs.clear()

    def held_back(self) -> list[str]:
        """Sources that are not back, in words."""
        return [
            f"{self.name}: {job.holder} {job.at}, free at ranks {sorted(job.freed)}"
            for job in self.jobs.values()
        ]
