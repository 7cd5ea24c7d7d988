"""How long each phase of a transfer took, and what is under way now, told by the machines' steps.

Nothing here reads a clock of its own but for when a machine begins: a step says when it was.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

from attrs import define, field, frozen

from pushkv.core import consumer, producer, request
from pushkv.core.consumer import ConsumerStatus
from pushkv.core.effects import PostWrite, RetryDue
from pushkv.core.events import Arrived, Computed
from pushkv.core.ids import Worker
from pushkv.core.link import Link
from pushkv.core.machines import StepRecord
from pushkv.core.producer import Producer, ProducerStatus

__all__ = ["BOUNDS_S", "PHASES", "Histogram", "Now", "Phases"]

BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
"""Upper bounds of a histogram's buckets, in seconds; one more takes the rest."""

REGISTER, DELIVER, PREFILL, WAIT, WRITE, NOTIFY = (
    "register",
    "deliver",
    "prefill",
    "registration_wait",
    "write",
    "notify",
)
PHASES = {
    REGISTER: "consumer",
    DELIVER: "consumer",
    PREFILL: "producer",
    WAIT: "producer",
    WRITE: "producer",
    NOTIFY: "producer",
}
"""Phase → whose machine it is a part of."""

OVER: frozenset[str] = frozenset({*consumer.TERMINAL, *producer.TERMINAL, *request.TERMINAL})
"""Where nothing is under way any more, though a machine may be remembered."""
RETRIES = ("attempt", "write")


@define
class Histogram:
    """Durations by bucket. One thread writes; a reader may miss the latest.

    Attributes:
        counts: Per bucket of `BOUNDS_S`, and one for what is longer.
        sum_ns: All durations together, in nanoseconds.
    """

    counts: list[int] = field(factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_ns: int = 0

    def add(self, duration_ns: int) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_S, duration_ns / 1e9)] += 1
        self.sum_ns += duration_ns


@define
class _Life:
    """One machine's: when what happened to it, in nanoseconds; None for what did not."""

    born: int
    status: str
    since: int
    peer: Worker | None = None
    arrived: int | None = None
    computed: int | None = None
    ordered: int | None = None


@frozen
class Now:
    """What one machine is doing.

    Attributes:
        machine: consumer, producer, request or link.
        status: As in the table, without the machine's name.
        age_s: Since when, in seconds.
        peer: A link's, where it has had one.
    """

    machine: str
    status: str
    age_s: float
    peer: Worker | None


class Phases:
    """Follows the machines of one endpoint: give `step` and `life` to `RuntimeConfig`.

    Both are called in the runtime's thread and never block; all else is for any thread.

    Args:
        clock: Monotonic nanoseconds, the runtime's.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.histograms: dict[str, Histogram] = {phase: Histogram() for phase in PHASES}
        self.retries: Counter[str] = Counter(dict.fromkeys(RETRIES, 0))
        self._clock = clock
        self._lives: dict[tuple[str, object], _Life] = {}

    def life(self, machine: str, key: object, state: object) -> None:
        """A machine begins, or is forgotten where `state` is None."""
        if state is None:
            self._lives.pop((machine, key), None)
            return
        now = self._clock()
        self._lives[machine, key] = _Life(now, str(getattr(state, "status", "")), now)

    def step(self, record: StepRecord) -> None:
        """One step of one machine."""
        one = self._lives.get((record.machine, record.key))
        if one is None:
            return
        status = str(getattr(record.after, "status", ""))
        if isinstance(record.after, Producer):
            self._produced(one, record, status)
        elif record.machine == "consumer" and status != one.status:
            self._consumed(one, record.now, status)
        elif isinstance(record.after, Link):
            one.peer = record.after.peer
        else:
            self.retries["attempt"] += sum(isinstance(each, RetryDue) for each in record.effects)
        if status != one.status:
            one.status, one.since = status, record.now

    def now(self) -> Iterator[Now]:
        """Every machine that is not over."""
        at = self._clock()
        for (machine, _), one in self._lives.copy().items():
            if one.status not in OVER:
                age_s = max(0, at - one.since) / 1e9
                yield Now(machine, one.status.partition(".")[2], age_s, one.peer)

    def _consumed(self, one: _Life, now: int, status: str) -> None:
        if status == ConsumerStatus.REGISTERED:
            self.histograms[REGISTER].add(now - one.born)
        elif status == ConsumerStatus.DELIVERED:
            self.histograms[DELIVER].add(now - one.born)

    def _produced(self, one: _Life, record: StepRecord, status: str) -> None:
        now, event, before = record.now, record.event, record.before
        assert isinstance(before, Producer), "a machine stays what it is"
        if record.row.kind == "go":
            if isinstance(event, Arrived):
                one.arrived, one.computed, one.ordered = now, None, None
            elif isinstance(event, Computed) and event.final:
                self._computed(one, before, now)
        if one.ordered is None and any(isinstance(each, PostWrite) for each in record.effects):
            one.ordered = now
        if status == one.status:
            return
        if one.status == ProducerStatus.HOLDING and status in SERVED and one.computed is not None:
            self.histograms[WAIT].add(now - one.computed)
        if status == ProducerStatus.NOTIFYING and one.ordered is not None:
            self.histograms[WRITE].add(now - one.ordered)
        if one.status == ProducerStatus.NOTIFYING and status == ProducerStatus.DONE:
            self.histograms[NOTIFY].add(now - one.since)
        if one.status == ProducerStatus.RETRYING and status == ProducerStatus.WRITING:
            self.retries["write"] += 1
        if status == ProducerStatus.HOLDING:
            one.ordered = None

    def _computed(self, one: _Life, before: Producer, now: int) -> None:
        one.computed = now
        if one.arrived is not None:
            self.histograms[PREFILL].add(now - one.arrived)
        if before.registration is not None:
            self.histograms[WAIT].add(0)


SERVED = (ProducerStatus.WRITING, ProducerStatus.NOTIFYING)
