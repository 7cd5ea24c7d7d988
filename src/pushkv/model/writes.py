"""All WRITEs in flight among workers that crash and restart, and the arrivals that follow them.

`enabled` lists what may happen, `apply` makes it happen, and the `Landed` events say which bytes
went where. What may happen follows the transport's `Capabilities`. Where done means visible, DONE
follows the last piece; elsewhere it may come before the first. Nothing lands later than
`write_bound` after the check before posting, where one is known. A crash takes no bytes back: what
is in flight may still land, in the process that stands at those addresses by then where the
transport reaches a successor (R13, R14).
"""

from __future__ import annotations

from attrs import evolve, frozen

from pushkv.core.capabilities import Capabilities
from pushkv.core.errors import LocalProtocolError
from pushkv.core.ids import FOREVER, Instant, Worker

from .faults import NO_FAULTS, Chance, Fault, FaultPlan, may_strike
from .flights import Flight, FlightKey, Outcome, drop, end, land, may_end, place, post, standing

__all__ = [
    "Action",
    "ArrivalInFlight",
    "Arrive",
    "Crash",
    "Drop",
    "End",
    "Ended",
    "Event",
    "Land",
    "Landed",
    "LoseArrival",
    "Noticed",
    "Post",
    "RepeatArrival",
    "Start",
    "Writes",
    "apply",
    "cost",
    "enabled",
]


@frozen
class ArrivalInFlight:
    """The news that all of a part's bytes are in place, on its way to `target`."""

    target: Worker
    key: FlightKey


@frozen
class Writes:
    """Workers alive, WRITEs in flight and arrivals on their way, each in order of names."""

    capabilities: Capabilities
    alive: tuple[Worker, ...] = ()
    flights: tuple[Flight, ...] = ()
    arrivals: tuple[ArrivalInFlight, ...] = ()

    def flight(self, key: FlightKey) -> Flight:
        """The flight of that name.

        Raises:
            LocalProtocolError: There is none, or it is over.
        """
        for flight in self.flights:
            if flight.key == key:
                return flight
        raise LocalProtocolError(f"{key} is not in flight")


@frozen
class Start:
    """A worker begins; a predecessor in the same place is dead."""

    worker: Worker


@frozen
class Crash:
    """A worker dies: it is told nothing more, but its bytes are still in flight."""

    worker: Worker
    now: Instant = Instant(0)


@frozen
class Post:
    """WRITE `pieces` into `target`; the permit was checked at `now`."""

    key: FlightKey
    target: Worker
    pieces: tuple[int, ...]
    now: Instant = Instant(0)


@frozen
class Land:
    """One piece lands."""

    key: FlightKey
    index: int
    now: Instant = Instant(0)


@frozen
class Drop:
    """What is left of the WRITE never lands."""

    key: FlightKey


@frozen
class End:
    """The writer is told."""

    key: FlightKey
    outcome: Outcome


@frozen
class Arrive:
    """The arrival at `index` reaches the target."""

    index: int


@frozen
class LoseArrival:
    """The arrival at `index` never reaches the target."""

    index: int


@frozen
class RepeatArrival:
    """The arrival at `index` will reach the target twice."""

    index: int


Action = Start | Crash | Post | Land | Drop | End | Arrive | LoseArrival | RepeatArrival


@frozen
class Landed:
    """Bytes of a part are at place `piece` in the memory of `at`; they were meant for `target`."""

    key: FlightKey
    target: Worker
    at: Worker
    piece: int


@frozen
class Ended:
    """The writer learns what became of its WRITE. Exactly one per WRITE of a writer that lives."""

    key: FlightKey
    outcome: Outcome


@frozen
class Noticed:
    """The target learns that all bytes of a part are in place."""

    key: FlightKey
    target: Worker


Event = Landed | Ended | Noticed


def apply(writes: Writes, action: Action) -> tuple[Writes, tuple[Event, ...]]:
    """One action.

    Raises:
        LocalProtocolError: It is not possible. The state is as it was.
    """
    match action:
        case Start(worker):
            if any(place(each) == place(worker) for each in writes.alive):
                raise LocalProtocolError(f"{place(worker)} has a worker that is alive")
            return evolve(writes, alive=tuple(sorted((*writes.alive, worker)))), ()
        case Crash():
            return _crash(writes, action), ()
        case Post(key, target, pieces, now):
            if key.writer not in writes.alive:
                raise LocalProtocolError(f"{key}: its writer is dead")
            if any(each.key == key for each in writes.flights):
                raise LocalProtocolError(f"{key} is in flight already (R10)")
            flight = post(key, target, pieces, now, writes.capabilities)
            flights = sorted((*writes.flights, flight), key=lambda each: each.key)
            return evolve(writes, flights=tuple(flights)), ()
        case Land(key, index, now):
            return _land(writes, writes.flight(key), index, now)
        case Drop(key):
            flight = writes.flight(key)
            return _changed(writes, flight, drop(flight)), ()
        case End(key, outcome):
            flight = writes.flight(key)
            if flight.key.writer not in writes.alive:
                raise LocalProtocolError(f"{key}: its writer is dead")
            ended = end(flight, outcome, writes.capabilities)
            event = Ended(key, outcome)
            return _changed(writes, flight, ended), (event,)
        case _:
            return _arrival(writes, action)


def _changed(writes: Writes, flight: Flight, after: Flight) -> Writes:
    dead = after.key.writer not in writes.alive
    gone = after.over or (dead and not after.pending)
    flights = tuple(
        after if each is flight else each
        for each in writes.flights
        if not (gone and each is flight)
    )
    return evolve(writes, flights=flights)


def _land(
    writes: Writes, flight: Flight, index: int, now: Instant
) -> tuple[Writes, tuple[Event, ...]]:
    at = standing(flight.target, writes.alive, writes.capabilities)
    after = land(flight, index, now)
    if at is None:
        return _changed(writes, flight, drop(flight, index)), ()
    landed = Landed(flight.key, flight.target, at, flight.pieces[index])
    changed = _changed(writes, flight, after)
    # The notification of a strong transport is sent by the writer once the bytes are in place.
    told = not writes.capabilities.done_means_visible or flight.key.writer in writes.alive
    if after.complete and told and at == flight.target:
        arrival = ArrivalInFlight(flight.target, flight.key)
        changed = evolve(changed, arrivals=_in_order((*writes.arrivals, arrival)))
    return changed, (landed,)


def _in_order(arrivals: tuple[ArrivalInFlight, ...]) -> tuple[ArrivalInFlight, ...]:
    return tuple(sorted(arrivals, key=lambda each: (each.target, each.key)))


def _crash(writes: Writes, crash: Crash) -> Writes:
    worker = crash.worker
    if worker not in writes.alive:
        raise LocalProtocolError(f"{worker} is not alive")
    bound = writes.capabilities.death_bound
    latest = FOREVER if bound is None else Instant(crash.now + bound)
    flights = []
    for flight in writes.flights:
        if flight.key.writer == worker:
            if not flight.pending:
                continue
            flight = evolve(flight, latest=min(flight.latest, latest))  # noqa: PLW2901
        flights.append(flight)
    return evolve(
        writes,
        alive=tuple(each for each in writes.alive if each != worker),
        flights=tuple(flights),
        arrivals=tuple(each for each in writes.arrivals if each.target != worker),
    )


def _arrival(
    writes: Writes, action: Arrive | LoseArrival | RepeatArrival
) -> tuple[Writes, tuple[Event, ...]]:
    if not 0 <= action.index < len(writes.arrivals):
        raise LocalProtocolError(f"{action}: {len(writes.arrivals)} arrivals are on their way")
    arrival = writes.arrivals[action.index]
    if isinstance(action, RepeatArrival):
        return evolve(writes, arrivals=_in_order((*writes.arrivals, arrival))), ()
    rest = (*writes.arrivals[: action.index], *writes.arrivals[action.index + 1 :])
    left = evolve(writes, arrivals=rest)
    if isinstance(action, LoseArrival):
        return left, ()
    return left, (Noticed(arrival.key, arrival.target),)


# -- choices


def enabled(
    writes: Writes,
    plan: FaultPlan = NO_FAULTS,
    chance: Chance = Chance(),  # noqa: B008 - a frozen value
    now: Instant = Instant(0),
    cuts: tuple[tuple[str, str], ...] = (),
) -> tuple[Action, ...]:
    """Everything that may happen at `now` by itself, in a fixed order.

    Over a path in `cuts` (pairs of `place`) nothing lands, and DONE needs the way back too, unless
    the transport is shared memory. Who takes a fault spends its `cost`. Posting, starting and, but
    for the fault CRASH, dying are the caller's to decide.
    """
    actions: list[Action] = []
    for flight in writes.flights:
        actions.extend(_of_flight(writes, flight, plan, chance, now, cuts))
    for index, arrival in enumerate(writes.arrivals):
        if index and arrival == writes.arrivals[index - 1]:
            continue
        actions.append(Arrive(index))
        if may_strike(plan, chance, Fault.ARRIVAL_LOSS):
            actions.append(LoseArrival(index))
        if may_strike(plan, chance, Fault.ARRIVAL_DUPLICATION):
            actions.append(RepeatArrival(index))
    if may_strike(plan, chance, Fault.CRASH):
        actions.extend(Crash(worker, now) for worker in writes.alive)
    return tuple(actions)


def _of_flight(
    writes: Writes,
    flight: Flight,
    plan: FaultPlan,
    chance: Chance,
    now: Instant,
    cuts: tuple[tuple[str, str], ...],
) -> list[Action]:
    crosses = writes.capabilities.shared_memory
    there = crosses or (place(flight.key.writer), place(flight.target)) not in cuts
    back = crosses or (place(flight.target), place(flight.key.writer)) not in cuts
    late = now > flight.latest
    lives = flight.key.writer in writes.alive and flight.target in writes.alive
    actions: list[Action] = []
    if there and not late:
        actions.extend(Land(flight.key, index, now) for index in flight.pending)
    if flight.pending and (late or not lives or flight.outcome is Outcome.UNKNOWN):
        actions.append(Drop(flight.key))
    if flight.key.writer not in writes.alive or flight.outcome is not None:
        return actions
    if there and back and may_end(flight, Outcome.DONE, writes.capabilities):
        actions.append(End(flight.key, Outcome.DONE))
    if may_strike(plan, chance, Fault.WRITE_FAILURE):
        actions.append(End(flight.key, Outcome.FAILED))
    stuck = late or flight.torn or not (lives and there and back)
    if stuck or may_strike(plan, chance, Fault.UNKNOWN_OUTCOME):
        actions.append(End(flight.key, Outcome.UNKNOWN))
    return actions


def cost(action: Action) -> Fault | None:
    """The fault that an action stands for; None where it is none.

    An UNKNOWN that a death, a cut or a passed bound explains costs nothing by itself; the caller
    knows, and does not spend it.
    """
    match action:
        case Crash():
            return Fault.CRASH
        case End(outcome=Outcome.FAILED):
            return Fault.WRITE_FAILURE
        case End(outcome=Outcome.UNKNOWN):
            return Fault.UNKNOWN_OUTCOME
        case LoseArrival():
            return Fault.ARRIVAL_LOSS
        case RepeatArrival():
            return Fault.ARRIVAL_DUPLICATION
        case _:
            return None
