"""What a fault plan has in store for one WRITE: a schedule of steps, decided when it is posted.

A fate is what happens unless something else comes first: a crash, a cut path, the write bound.
"""

from __future__ import annotations

from attrs import frozen

from pushkv.core.capabilities import Capabilities
from pushkv.core.ids import Duration, Instant

from .faults import Chance, Fault, FaultPlan, Strike, strike
from .flights import Outcome, latest_landing

__all__ = ["CrashStep", "CutStep", "EndStep", "Fate", "LandStep", "Step", "decide"]


@frozen
class LandStep:
    """The piece at `index` lands."""

    index: int


@frozen
class EndStep:
    """The writer is told."""

    outcome: Outcome


@frozen
class CrashStep:
    """The writing process dies."""


@frozen
class CutStep:
    """The path to the target is cut, with `both` also the way back, for `lasts` if not 0."""

    both: bool
    lasts: Duration


Step = LandStep | EndStep | CrashStep | CutStep


@frozen
class Fate:
    """What becomes of one WRITE.

    Attributes:
        refused: The poster finds that the permit does not last; nothing else happens.
        steps: What happens and when, in order.
        source_busy: What lands after the writer was told UNKNOWN still reads the source.
        arrivals: How long after the last piece each arrival reaches the target; none if lost.
    """

    refused: bool
    steps: tuple[tuple[Instant, Step], ...]
    source_busy: bool
    arrivals: tuple[Duration, ...]


_STRIKES = (
    Fault.REFUSED,
    Fault.DELAY,
    Fault.REORDERING,
    Fault.WRITE_FAILURE,
    Fault.UNKNOWN_OUTCOME,
    Fault.SOURCE_BUSY,
    Fault.CRASH,
    Fault.PARTITION,
    Fault.PARTITION_ONE_WAY,
    Fault.ARRIVAL_LOSS,
    Fault.ARRIVAL_DUPLICATION,
)


def decide(
    plan: FaultPlan, chance: Chance, pieces: int, capabilities: Capabilities, now: Instant
) -> tuple[Chance, Fate]:
    """The fate of a WRITE of `pieces` pieces whose permit is checked at `now`.

    Every fault of WRITEs and arrivals has one opportunity per WRITE, struck or not, so that a
    script counts WRITEs. Where several strike, a failure goes before an unknown outcome, and that
    before a crash. Every landing is within the write bound.
    """
    struck: dict[Fault, Strike | None] = {}
    for fault in _STRIKES:
        chance, struck[fault] = strike(plan, chance, fault)
    if struck[Fault.REFUSED] is not None:
        return chance, Fate(refused=True, steps=(), source_busy=False, arrivals=())
    landings = _landings(struck[Fault.DELAY], struck[Fault.REORDERING], pieces, capabilities, now)
    steps = _steps(struck, landings, capabilities, now)
    for fault in (Fault.PARTITION, Fault.PARTITION_ONE_WAY):
        cut = struck[fault]
        if cut is not None:
            at = cut.pick(len(steps), 1)
            step = CutStep(both=fault is Fault.PARTITION, lasts=cut.lasts())
            steps.insert(at, (steps[at][0], step))
    return chance, Fate(
        refused=False,
        steps=tuple(steps),
        source_busy=struck[Fault.SOURCE_BUSY] is not None,
        arrivals=_arrivals(struck),
    )


def _landings(
    delay: Strike | None,
    reordering: Strike | None,
    pieces: int,
    capabilities: Capabilities,
    now: Instant,
) -> list[tuple[Instant, int]]:
    """When each piece lands if nothing goes wrong, earliest first."""
    latest = latest_landing(now, capabilities)
    instants = [now] * pieces
    if delay is not None:
        instants = sorted(min(Instant(now + delay.lasts(each)), latest) for each in range(pieces))
    order = list(range(pieces))
    if reordering is not None:
        for last in range(pieces - 1, 0, -1):
            other = reordering.pick(last + 1, last)
            order[last], order[other] = order[other], order[last]
    return list(zip(instants, order, strict=True))


def _steps(
    struck: dict[Fault, Strike | None],
    landings: list[tuple[Instant, int]],
    capabilities: Capabilities,
    now: Instant,
) -> list[tuple[Instant, Step]]:
    lands: list[tuple[Instant, Step]] = [(at, LandStep(index)) for at, index in landings]
    failure, unknown, crash = (
        struck[fault] for fault in (Fault.WRITE_FAILURE, Fault.UNKNOWN_OUTCOME, Fault.CRASH)
    )
    if failure is not None:
        kept = lands[: failure.pick(max(len(lands), 1))]
        return [*kept, (kept[-1][0] if kept else now, EndStep(Outcome.FAILED))]
    if unknown is not None:
        return _broken_off(unknown, lands, EndStep(Outcome.UNKNOWN), capabilities, now)
    if crash is not None:
        return _broken_off(crash, lands, CrashStep(), capabilities, now)
    done = EndStep(Outcome.DONE)
    if capabilities.done_means_visible:
        return [*lands, (lands[-1][0] if lands else now, done)]
    return [(now, done), *lands]


def _broken_off(
    fault: Strike,
    lands: list[tuple[Instant, Step]],
    step: Step,
    capabilities: Capabilities,
    now: Instant,
) -> list[tuple[Instant, Step]]:
    """Some pieces land, then `step`; the others late, or never where the fault takes no time."""
    kept = fault.pick(max(len(lands), 1))
    at = lands[kept - 1][0] if kept else now
    latest = latest_landing(now, capabilities)
    late: list[tuple[Instant, Step]] = [
        (min(Instant(at + fault.lasts(each)), latest), piece)
        for each, (_, piece) in enumerate(lands[kept:])
        if fault.most
    ]
    late.sort(key=lambda each: each[0])
    return [*lands[:kept], (at, step), *late]


def _arrivals(struck: dict[Fault, Strike | None]) -> tuple[Duration, ...]:
    if struck[Fault.ARRIVAL_LOSS] is not None:
        return ()
    delay, again = struck[Fault.DELAY], struck[Fault.ARRIVAL_DUPLICATION]
    first = Duration(0) if delay is None else delay.lasts(1 << 32)
    if again is None:
        return (first,)
    return (first, Duration(first + again.lasts()))
