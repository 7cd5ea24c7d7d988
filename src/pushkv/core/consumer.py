"""The consumer machine: one registration at one decode rank, towards one prefill rank.

Theory of operation
-------------------
The consumer has offered blocks. From the moment REGISTER may have left until a proof says
otherwise, somebody may write into them, and this machine exists to know when that has ended. It
makes two reports, each exactly once (I3):

* ``MemberTold``, the outcome, as soon as it is known. No client waits for a fence.
* ``MemberFreed``, when nothing can write into the blocks any more. No fence is cut short for a
  client.

Five inputs move it: the engine's wish (`Withdrawn`), the producer's messages, arrivals, its link,
and time. The verdicts COMPLETE, FAILED and REVOKED all say "no further WRITE, every handle closed";
where the transport's DONE does not mean visible, each passes through SETTLING until the arrivals of
the parts it names are in. UNPROVEN and a lost link lead to QUARANTINED, which only a proof leaves:
a later verdict of the same incarnation, a fence that passed under a known bound, the writer's
certain death, or the operator's word.

The outcome is told on the way into REVOKING and QUARANTINED, so that a COMPLETE which crosses a
REVOKE frees and never delivers.

Retry and preemption belong to the whole attempt, over all ranks: see ``request``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import frozen

from .copies import copier
from .ids import AttemptId, Epoch, Instant, Worker
from .messages import Complete, Failed, Register, Revoked

__all__ = [
    "Consumer",
    "ConsumerStatus",
    "KeptVerdict",
    "awaits_arrivals",
    "is_terminal",
    "replace",
]


class ConsumerStatus(StrEnum):
    """Where a registration stands at the consumer."""

    REGISTERING = "consumer.registering"
    REGISTERED = "consumer.registered"
    SETTLING = "consumer.settling"
    REVOKING = "consumer.revoking"
    QUARANTINED = "consumer.quarantined"
    DELIVERED = "consumer.delivered"
    FAILED = "consumer.failed"
    RELEASED = "consumer.released"


REGISTERING, REGISTERED, SETTLING, REVOKING, QUARANTINED, DELIVERED, FAILED, RELEASED = (
    ConsumerStatus
)
WAITING = (REGISTERING, REGISTERED)
TERMINAL = (DELIVERED, FAILED, RELEASED)

KeptVerdict = Complete | Failed | Revoked


@frozen
class Consumer:
    """One registration's whole state. Build with `offer`.

    Attributes:
        register: What is, or will be, offered; never changes.
        epoch: The link it was handed to; None while it never was.
        producer: The worker it was handed to; only this incarnation can answer for it (R14).
        fence: Frozen when that link ended (R6); None while it has not, or where it never granted.
        told: The outcome has been told.
        final: The engine gave the request up; its REVOKE says so.
        arrived: Numbers of the parts whose arrivals are in, ascending.
        verdict: The verdict that waits for arrivals.
        timer_at: When to send again.
        deadline_at: When to stop waiting.
    """

    status: ConsumerStatus
    register: Register
    epoch: Epoch | None
    producer: Worker | None
    fence: Instant | None
    told: bool
    final: bool
    arrived: tuple[int, ...]
    verdict: KeptVerdict | None
    timer_at: Instant
    deadline_at: Instant

    @property
    def attempt(self) -> AttemptId:
        """The registration's full name."""
        return self.register.attempt

    @property
    def exposed(self) -> bool:
        """Whether somebody may write: it was handed to a link, and there are bytes to write."""
        return self.epoch is not None and self.register.end > self.register.start

    @property
    def next_deadline(self) -> Instant:
        """When a Tick is due; FOREVER if never."""
        return min(self.timer_at, self.deadline_at)


# What every action copies its state with: `copies.replace`, made for this class alone.
if TYPE_CHECKING:
    from attrs import evolve as replace
else:
    replace = copier(Consumer)


def is_terminal(state: Consumer) -> bool:
    """Whether both reports are made and the machine may be forgotten."""
    return state.status in TERMINAL


def awaits_arrivals(state: Consumer) -> bool:
    """Whether a verdict is in whose arrivals are not."""
    return state.verdict is not None and state.status in (SETTLING, QUARANTINED)
