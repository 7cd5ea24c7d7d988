"""WRITEs between the machine that orders them and the memory they land in.

An ordered WRITE waits for the thread that posts it, which checks the permit immediately before
(R3, R5); a posted one flies as the model of the transport says.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from attrs import evolve, frozen

from pushkv.core.effects import PostWrite
from pushkv.core.ids import AttemptId, Worker
from pushkv.model import writes as model
from pushkv.model.faults import NO_FAULTS, Chance, Fault, FaultPlan, FaultRule
from pushkv.model.flights import Flight, FlightKey, Outcome, drop
from pushkv.model.writes import Writes

from .snapshot import NOW, older

__all__ = [
    "Hands",
    "Ordered",
    "aged",
    "choices",
    "crashed",
    "in_order",
    "named",
    "order",
    "post",
    "settle",
    "started",
    "withdraw",
    "without",
]

COSTS = {
    Fault.WRITE_FAILURE: "write_failure",
    Fault.UNKNOWN_OUTCOME: "unknown_outcome",
    Fault.ARRIVAL_LOSS: "arrival_loss",
    Fault.ARRIVAL_DUPLICATION: "arrival_repeat",
}
EVERYTHING = FaultPlan(rules=tuple(FaultRule(fault, per_million=1) for fault in COSTS))


@frozen
class Ordered:
    """A WRITE that its machine has ordered and nobody has posted.

    One that its machine has withdrawn may be dropped at any moment, or be with the transport.
    """

    writer: Worker
    write: PostWrite
    withdrawn: bool = False


@frozen
class Hands:
    """What the transports have in hand."""

    writes: Writes
    ordered: tuple[Ordered, ...] = ()

    def of(self, transfer: str, writer: Worker) -> tuple[Ordered | Flight, ...]:
        """WRITEs of a transfer that may still read its source at `writer`."""
        waiting = [
            each
            for each in self.ordered
            if each.writer == writer and each.write.attempt.transfer == transfer
        ]
        flying = [
            each
            for each in self.writes.flights
            if each.key.writer == writer
            and each.key.attempt.transfer == transfer
            and each.outcome is not Outcome.DONE
        ]
        return (*waiting, *flying)

    def aimed(self, transfer: str) -> bool:
        """Whether bytes of a transfer may still be written."""
        names = [each.write.attempt for each in self.ordered]
        names += [each.key.attempt for each in self.writes.flights if each.pending]
        return any(each.transfer == transfer for each in names)


def named(found: Iterable[Ordered | Flight]) -> set[tuple[AttemptId, int]]:
    """The attempt and the part of each."""
    return {
        (each.write.attempt, each.write.part.number)
        if isinstance(each, Ordered)
        else (each.key.attempt, each.key.part)
        for each in found
    }


def in_order(hands: Hands) -> Hands:
    """The same in the order of names: any WRITE that is ordered may be the next to be posted."""
    key = attrgetter("writer", "write.attempt", "write.part.number")
    return evolve(hands, ordered=tuple(sorted(hands.ordered, key=key)))


def order(hands: Hands, write: Ordered) -> Hands:
    """One WRITE more is to be posted."""
    return in_order(evolve(hands, ordered=(*hands.ordered, write)))


def withdraw(hands: Hands, writer: Worker, attempt: AttemptId) -> Hands:
    """Nobody need post what this attempt has ordered."""
    ordered = tuple(
        evolve(each, withdrawn=True)
        if each.writer == writer and each.write.attempt == attempt
        else each
        for each in hands.ordered
    )
    return evolve(hands, ordered=ordered)


def post(hands: Hands, index: int, pieces: tuple[int, ...]) -> Hands:
    """The WRITE at `index` is posted; its permit was checked now."""
    ordered = hands.ordered[index]
    attempt = ordered.write.attempt
    target = Worker(attempt.consumer, attempt.consumer_incarnation, attempt.consumer_rank)
    key = FlightKey(ordered.writer, attempt, ordered.write.part.number)
    writes, _ = model.apply(hands.writes, model.Post(key, target, pieces, NOW))
    return settle(evolve(hands, writes=writes, ordered=without(hands, index)))


def without(hands: Hands, index: int) -> tuple[Ordered, ...]:
    """What is ordered but for one."""
    return (*hands.ordered[:index], *hands.ordered[index + 1 :])


def choices(writes: Writes) -> tuple[tuple[model.Action, str], ...]:
    """What may happen to flights and arrivals now, and what it costs."""
    free = model.enabled(writes, NO_FAULTS, Chance(), NOW)
    found: list[tuple[model.Action, str]] = [(each, "") for each in free]
    for each in model.enabled(writes, EVERYTHING, Chance(), NOW):
        fault = model.cost(each)
        if each not in free and fault is not None:
            found.append((each, COSTS[fault]))
    return tuple(found)


def settle(hands: Hands) -> Hands:
    """Forget arrivals where nobody waits for them: DONE says it all."""
    writes = hands.writes
    if not writes.arrivals or not writes.capabilities.done_means_visible:
        return hands
    return evolve(hands, writes=evolve(writes, arrivals=()))


def aged(hands: Hands, by: int) -> Hands:
    """One step of time on the producers' clock: what is past its bound never lands."""
    flights: list[Flight] = []
    for flight in hands.writes.flights:
        latest = older(flight.latest, by, -1)
        after = evolve(flight, latest=latest, posted=NOW)
        if latest < NOW and after.pending:
            after = drop(after)
        told = after.outcome is not None or after.key.writer not in hands.writes.alive
        if after.pending or not told:
            flights.append(after)
    if tuple(flights) == hands.writes.flights:
        return hands
    return evolve(hands, writes=evolve(hands.writes, flights=tuple(flights)))


def crashed(hands: Hands, worker: Worker) -> Hands:
    """A process dies with what it had not posted; what is in flight flies on."""
    writes, _ = model.apply(hands.writes, model.Crash(worker, NOW))
    ordered = tuple(each for each in hands.ordered if each.writer != worker)
    return Hands(writes, ordered)


def started(hands: Hands, worker: Worker) -> Hands:
    """A process begins."""
    writes, _ = model.apply(hands.writes, model.Start(worker))
    return evolve(hands, writes=writes)
