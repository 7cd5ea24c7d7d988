"""One WRITE in flight: what of it has landed, what may still land, and what its writer was told.

The pieces of a WRITE land one at a time and in any order, each at a place that the caller numbers
(a block, a part of one, a run of segments). `land`, `drop` and `end` are its whole life; what they
allow follows the transport's `Capabilities`.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import evolve, frozen

from pushkv.core.capabilities import Capabilities
from pushkv.core.errors import LocalProtocolError
from pushkv.core.ids import FOREVER, AttemptId, Instant, Worker

__all__ = [
    "Flight",
    "FlightKey",
    "Outcome",
    "drop",
    "end",
    "land",
    "latest_landing",
    "may_end",
    "place",
    "post",
    "standing",
]


class Outcome(StrEnum):
    """What became of a WRITE, in the words of the transport contract."""

    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@frozen(order=True)
class FlightKey:
    """The name of one WRITE: a part number is used once per attempt (R10)."""

    writer: Worker
    attempt: AttemptId
    part: int


@frozen
class Flight:
    """One WRITE.

    Attributes:
        key: Its name.
        pieces: Where each piece goes, as the caller numbers places.
        pending: Indices of the pieces that may still land, ascending.
        torn: Whether a piece was dropped and will never land.
        outcome: What the writer was told; None while the WRITE is open.
        latest: Nothing lands after this instant.
        posted: When its permit was checked.
    """

    key: FlightKey
    target: Worker
    pieces: tuple[int, ...]
    pending: tuple[int, ...]
    torn: bool = False
    outcome: Outcome | None = None
    latest: Instant = FOREVER
    posted: Instant = Instant(0)

    @property
    def complete(self) -> bool:
        """Whether every piece has landed."""
        return not self.pending and not self.torn

    @property
    def over(self) -> bool:
        """Whether nothing more will land and the writer has been told."""
        return not self.pending and self.outcome is not None


def post(
    key: FlightKey,
    target: Worker,
    pieces: tuple[int, ...],
    now: Instant,
    capabilities: Capabilities,
) -> Flight:
    """A WRITE whose permit was checked at `now`, with all of its pieces in flight."""
    return Flight(
        key=key,
        target=target,
        pieces=pieces,
        pending=tuple(range(len(pieces))),
        latest=latest_landing(now, capabilities),
        posted=now,
    )


def latest_landing(now: Instant, capabilities: Capabilities) -> Instant:
    """The last instant at which a WRITE checked at `now` can land."""
    bound = capabilities.write_bound
    return FOREVER if bound is None else Instant(now + bound)


def land(flight: Flight, index: int, now: Instant) -> Flight:
    """The flight after one piece landed at `now`.

    Raises:
        LocalProtocolError: That piece has landed, was dropped, or the bound has passed.
    """
    if index not in flight.pending:
        raise LocalProtocolError(f"{flight.key}: piece {index} is not in flight")
    if now > flight.latest:
        raise LocalProtocolError(f"{flight.key}: piece {index} lands after the write bound")
    return evolve(flight, pending=tuple(each for each in flight.pending if each != index))


def drop(flight: Flight, index: int | None = None) -> Flight:
    """The flight after one piece, or all that are left, can no longer land."""
    kept = () if index is None else tuple(each for each in flight.pending if each != index)
    return evolve(flight, pending=kept, torn=flight.torn or kept != flight.pending)


def may_end(flight: Flight, outcome: Outcome, capabilities: Capabilities) -> bool:
    """Whether the writer may be told `outcome` now: once, and DONE only if it is true."""
    if flight.outcome is not None or outcome is Outcome.REFUSED:
        return False
    if outcome is Outcome.DONE:
        return flight.complete or (not capabilities.done_means_visible and not flight.torn)
    return True


def end(flight: Flight, outcome: Outcome, capabilities: Capabilities) -> Flight:
    """The flight after its writer was told `outcome`; after FAILED nothing more lands.

    Raises:
        LocalProtocolError: `may_end` says no.
    """
    if not may_end(flight, outcome, capabilities):
        raise LocalProtocolError(f"{flight.key}: may not end {outcome}")
    ended = evolve(flight, outcome=outcome)
    return drop(ended) if outcome is Outcome.FAILED else ended


def place(worker: Worker) -> str:
    """Where a worker runs, for cuts: its incarnations come and go in one place."""
    return f"{worker.engine}/{worker.rank}"


def standing(
    target: Worker, alive: tuple[Worker, ...], capabilities: Capabilities
) -> Worker | None:
    """Whose memory bytes aimed at `target` reach: its own, a successor's (R13), or nobody's."""
    if target in alive:
        return target
    if capabilities.reaches_successor:
        return next((each for each in alive if place(each) == place(target)), None)
    return None
