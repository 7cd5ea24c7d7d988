"""The arithmetic and predicates behind the rules, one small function each.

The machines, the poster of a transport and the model checker all call these, through this module,
so that a rule has one place and can be taken out in one place.
"""

from __future__ import annotations

from collections.abc import Iterable

from .capabilities import Capabilities
from .ids import FOREVER, Duration, Instant, Part

__all__ = [
    "covers",
    "fence",
    "fence_passed",
    "may_post",
    "permit_end",
    "proven",
    "restart_grace",
    "settled_at",
    "unknown_closes_at",
]

_MILLION = 1_000_000


def permit_end(stamp: int, lease: Duration, drift_ppm: int) -> Instant:
    """R4: when the permit asked for at `stamp` (the producer's own clock) ends.

    lease·(1−ρ)/(1+ρ) after the stamp: however the two clocks drift within ±ρ, the consumer's
    `fence` comes no earlier.
    """
    return Instant(stamp + lease * (_MILLION - drift_ppm) // (_MILLION + drift_ppm))


def may_post(now: Instant, permit_until: Instant, write_bound: Duration | None) -> bool:
    """R3, R5: whether a WRITE may be posted at `now` under a permit that ends at `permit_until`.

    Where no bound is known the permit alone is checked, and time frees nothing at the consumer.
    """
    return now + (write_bound or 0) <= permit_until


def fence(last_grant: Instant | None, lease: Duration) -> Instant | None:
    """R6: after which instant no WRITE of a registration made over this link can be posted or land.

    None where the link never granted a permit: then nothing was ever posted over it (R3).
    """
    return None if last_grant is None else Instant(last_grant + lease)


def fence_passed(now: Instant, at: Instant | None, write_bound: Duration | None) -> bool:
    """R6: whether the fence `at` proves silence: passed strictly, and under a known bound."""
    return at is not None and write_bound is not None and now > at


def covers(parts: Iterable[Part], start: int, end: int) -> bool:
    """R10: whether the parts are exactly [start, end): no gap, overlap or number twice."""
    ordered = sorted(parts, key=lambda part: (part.start, part.end))
    at = start
    for part in ordered:
        if part.start != at or part.end < part.start:
            return False
        at = part.end
    return at == end and len({part.number for part in ordered}) == len(ordered)


def proven(parts: Iterable[Part], arrived: Iterable[int], capabilities: Capabilities) -> bool:
    """R10: whether every part is in place: by DONE where that means visible, else by arrival."""
    if capabilities.done_means_visible:
        return True
    seen = set(arrived)
    return all(part.number in seen or part.start == part.end for part in parts)


def unknown_closes_at(now: Instant, write_bound: Duration | None) -> Instant:
    """R14: when a WRITE of unknown outcome, posted no later than `now`, can no longer land."""
    return FOREVER if write_bound is None else Instant(now + write_bound)


def settled_at(
    now: Instant, settle: Duration, write_bound: Duration | None, drift_ppm: int
) -> Instant:
    """R14: until when a verdict that came at `now` waits for the arrivals of its parts.

    No less than the producer's `write_bound`, as long as it can be on this clock, and strictly.
    """
    bound = 0 if write_bound is None else write_bound
    bound = bound * (_MILLION + drift_ppm) // (_MILLION - drift_ppm) + 1
    return Instant(now + max(settle, bound))


def restart_grace(lease: Duration, capabilities: Capabilities) -> Duration:
    """R13: how long after its start a consumer hands out no block of registered memory.

    Nothing, where the transport declares that a WRITE aimed at a dead process cannot reach its
    successor. Else the lease, within which R5 has every WRITE land, and strictly: the last may land
    at its very end. Where no bound is known the lease is the best there is, and the limits in the
    documentation say so.
    """
    return Duration(lease + 1 if capabilities.reaches_successor else 0)
