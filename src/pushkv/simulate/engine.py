"""One engine: a loop of steps, each with what decodes and a chunk of what is prefilled.

At the beginning of a step the loop takes who is ready, then looks at who waits, in order, as long
as a slot and blocks are there. Steps in which nothing changes are run as one event: who comes in
between cuts it at the next step's end, so that nothing is different but the time it takes here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from attrs import define, field

from .pool import Pool
from .settings import EngineModel
from .timeline import Entry, Timeline, nanoseconds

__all__ = ["Engine", "Job"]


@define(eq=False)
class Job:
    """What one request wants of one engine.

    Attributes:
        blocks: To be taken when it is admitted; whoever made the job gives them back.
        context: Tokens that each of its decode steps reads.
        compute: Prompt tokens still to be computed here.
        decode: Tokens still to be generated here.
        remote: Its KV comes from elsewhere: once admitted it waits, without a slot, for `ready`.
        admitted: Told its blocks and for how long the loop is held up already, in nanoseconds;
            returns how much longer it is held up for this job.
        computed: Its prompt is computed.
        first: Told when its first token leaves, in nanoseconds.
        ended: Its last token has left.
        may_admit: Asked before blocks are taken.
    """

    name: str
    blocks: int
    context: int
    compute: int
    decode: int
    remote: bool
    admitted: Callable[[tuple[int, ...], int], int]
    ended: Callable[[], None]
    computed: Callable[[], None] | None = None
    first: Callable[[int], None] | None = None
    may_admit: Callable[[], bool] | None = None


@define
class _Step:
    """Steps under way: `count` of them, each `each` long, after the loop was held up to `since`."""

    since: int
    each: int
    count: int
    chunks: list[tuple[Job, int]]
    entry: Entry


@define(eq=False)
class Engine:
    """One engine's queue, loop and blocks."""

    name: str
    model: EngineModel
    timeline: Timeline
    pool: Pool = field(init=False)
    waiting: deque[Job] = field(factory=deque)
    arrived: deque[Job] = field(factory=deque)
    prefilling: list[Job] = field(factory=list)
    running: list[Job] = field(factory=list)
    fresh: list[Job] = field(factory=list)
    busy_ns: int = 0
    _step: _Step | None = None
    _inside: bool = False

    def __attrs_post_init__(self) -> None:
        self.pool = Pool(self.model.blocks)

    @property
    def free_slots(self) -> int:
        """How many more could be prefilled or decoded at once."""
        return self.model.slots - len(self.running) - len(self.prefilling)

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue."""
        self.waiting.append(job)
        self.wake()

    def ready(self, job: Job) -> None:
        """The KV of a remote job is in place."""
        self.arrived.append(job)
        self.wake()

    def withdraw(self, job: Job) -> bool:
        """Take a job out of the queue; False if it is admitted already."""
        if job not in self.waiting:
            return False
        self.waiting.remove(job)
        return True

    def crash(self) -> None:
        """Everything here is gone: jobs, blocks, the step under way."""
        if self._step is not None:
            Timeline.cancel(self._step.entry)
        self._step = None
        for jobs in (self.waiting, self.arrived, self.prefilling, self.running, self.fresh):
            jobs.clear()
        self.pool = Pool(self.model.blocks)

    def wake(self) -> None:
        """Something came that the loop may act on: at once if it is idle, else after this step."""
        if self._inside:
            return
        step = self._step
        if step is None:
            self._begin()
        elif step.count > 1 and self.free_slots > 0:
            gone = max(0, self.timeline.now - step.since)
            count = max(1, -(-gone // step.each))
            if count < step.count:
                Timeline.cancel(step.entry)
                step.count = count
                step.entry = self.timeline.at(step.since + count * step.each, self._end)

    # -- a step

    def _begin(self) -> None:
        self._inside = True
        held = self._admit()
        self._inside = False
        chunks = self._chunks()
        if not chunks and not self.running and not held:
            return
        each = self._duration(chunks)
        count = 1 if chunks else min((job.decode for job in self.running), default=1)
        since = self.timeline.now + held
        entry = self.timeline.at(since + count * each, self._end)
        self._step = _Step(since, each, count, chunks, entry)
        self.busy_ns -= self.timeline.now
        fresh, self.fresh = self.fresh, []
        for job in fresh:
            if job.first is not None:
                job.first(since + each)

    def _admit(self) -> int:
        held = 0
        while self.arrived and self.free_slots > 0:
            job = self.arrived.popleft()
            self.running.append(job)
            self.fresh.append(job)
        while self.waiting and self.free_slots > 0:
            job = self.waiting[0]
            if job.may_admit is not None and not job.may_admit():
                break
            blocks = self.pool.take(job.name, job.blocks)
            if blocks is None:
                break
            self.waiting.popleft()
            if not job.remote:
                self.prefilling.append(job)
            held += job.admitted(blocks, held)
        return held

    def _chunks(self) -> list[tuple[Job, int]]:
        budget = self.model.chunk_tokens
        chunks = []
        for job in self.prefilling:
            tokens = min(budget, job.compute)
            if tokens:
                chunks.append((job, tokens))
                budget -= tokens
        return chunks

    def _duration(self, chunks: list[tuple[Job, int]]) -> int:
        model = self.model
        takes = 0.0
        if self.running:
            context = sum(job.context for job in self.running)
            takes += model.decode_step_s + context * model.decode_context_s
        if chunks:
            takes += model.prefill_step_s
            takes += model.prefill_token_s * sum(tokens for _, tokens in chunks)
        return max(1, nanoseconds(takes))

    def _end(self) -> None:
        step = self._step
        assert step is not None, "only a step that runs ends"
        self._step = None
        self._inside = True
        self.busy_ns += self.timeline.now
        over = []
        for job in self.running:
            job.decode -= step.count
            if job.decode == 0:
                over.append(job)
        self.running = [job for job in self.running if job.decode]
        for job, tokens in step.chunks:
            job.compute -= tokens
            if job.compute == 0:
                self._computed(job)
        for job in over:
            job.ended()
        self._inside = False
        if self._step is None:
            self._begin()

    def _computed(self, job: Job) -> None:
        """The step that computes the last of a prompt makes its first token, too."""
        self.prefilling.remove(job)
        if job.computed is not None:
            job.computed()
        if job.first is not None:
            job.first(self.timeline.now)
        if job.decode > 1:
            job.decode -= 1
            self.running.append(job)
        elif job.decode == 1:
            job.ended()
