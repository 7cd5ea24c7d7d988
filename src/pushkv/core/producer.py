"""The producer machine: one transfer at one prefill rank, towards one consumer rank.

Theory of operation
-------------------
Three things come together here in any order: the engine's prefill, the consumer's registration, and
the outcome of WRITEs. `Prefill` says how far the engine is; `registration` says who is served;
`open` says what the transport still has in hand. The status is what follows from the three.

* A registration waits for prefill (EXPECTED, QUEUED), or prefill for a registration (HOLDING);
  while both are there every finished range of tokens is ordered at once as a part of its own
  (streaming).
* A part is open from the effect that orders it (R8). Whoever posts it checks the permit immediately
  before (R3, R5); refused, the part is void and its tokens wait for the next permit.
* Whatever takes the registration away (REVOKE, abort, link lost, too many failures) while parts are
  open leads through DRAINING: nothing more is ordered, and the verdict leaves only when the last
  handle has closed (R8). A handle of unknown outcome closes after the transport's bound; where
  there is none the verdict is UNPROVEN and the source stays pinned.
* An attempt that has ended is remembered in `ended` with the parts that were DONE, and every later
  REGISTER, QUERY or REVOKE of it is answered from there (R7, R11), in every status.

The source blocks are free once, with ``SourceFreed``: when nothing reads them and nobody can be
served from them any more.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import frozen

from .copies import copier
from .ids import FOREVER, Blocks, Epoch, Instant, Part, TransferId, Worker
from .messages import Reason, Register, Verdict

__all__ = [
    "Doubt",
    "Prefill",
    "Producer",
    "ProducerStatus",
    "Registration",
    "is_over",
    "produce",
    "replace",
]


class ProducerStatus(StrEnum):
    """Where a transfer stands at the producer."""

    EXPECTED = "producer.expected"
    QUEUED = "producer.queued"
    PREFILLING = "producer.prefilling"
    PREEMPTED = "producer.preempted"
    HOLDING = "producer.holding"
    WRITING = "producer.writing"
    RETRYING = "producer.retrying"
    DRAINING = "producer.draining"
    NOTIFYING = "producer.notifying"
    DONE = "producer.done"
    FAILED = "producer.failed"
    EXPIRED = "producer.expired"


(
    EXPECTED,
    QUEUED,
    PREFILLING,
    PREEMPTED,
    HOLDING,
    WRITING,
    RETRYING,
    DRAINING,
    NOTIFYING,
    DONE,
    FAILED,
    EXPIRED,
) = ProducerStatus
TERMINAL = (DONE, FAILED, EXPIRED)
OVER = (NOTIFYING, *TERMINAL)
LIVE = (EXPECTED, QUEUED, PREFILLING, PREEMPTED, HOLDING, WRITING, RETRYING, DRAINING)


class Prefill(StrEnum):
    """How far the engine is with the request."""

    UNHEARD = "unheard"
    QUEUED = "queued"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"


@frozen
class Doubt:
    """A part whose bytes may still land until `over_at`; FOREVER where nobody can say.

    `source_idle` says that its WRITE has stopped reading the source, whatever becomes of the rest.
    """

    part: Part
    over_at: Instant
    source_idle: bool


@frozen
class Registration:
    """Who is being served: the REGISTER that was accepted, and the link it came over (R11)."""

    register: Register
    epoch: Epoch
    consumer: Worker


@frozen
class Producer:
    """One transfer's whole state towards one consumer rank. Build with `produce`.

    Attributes:
        prompt_digest: The request's; b"" until it arrives.
        prefill: How far the engine is.
        computed: KV of this many tokens exists in `source`.
        registration: Who is served now.
        open: Parts ordered and not closed, ascending by number.
        unknown: Parts of unknown outcome.
        done: Parts DONE for the current attempt.
        missing: Token ranges that were ordered and must be ordered again.
        ordered: Tokens below this were ordered for the current attempt.
        next_part: Never reused within an attempt (R10).
        failures: WRITEs that FAILED for the current attempt.
        ordered_unpermitted: Parts below this number were ordered before the last permit came.
        starved: A WRITE was refused; nothing is ordered until the next permit.
        cause: Why it is draining; None for a REVOKE.
        answer: Whether the verdict is to be sent once drained.
        ended: Attempts that are over, with their verdicts, until RECEIVED (R7).
        freed: `SourceFreed` was reported.
        hold_until: One hold time per transfer, never restarted.
        timer_at: When something else is due: an expected request, a retry, an unknown part.
        transfer_until: When the WRITEs of the attempt must be over.
    """

    status: ProducerStatus
    transfer: TransferId
    consumer_rank: int
    prompt_digest: bytes
    prefill: Prefill
    computed: int
    source: Blocks
    registration: Registration | None
    open: tuple[Part, ...]
    unknown: tuple[Doubt, ...]
    done: tuple[Part, ...]
    missing: tuple[tuple[int, int], ...]
    ordered: int
    next_part: int
    failures: int
    ordered_unpermitted: int
    starved: bool
    cause: Reason | None
    answer: bool
    ended: tuple[Verdict, ...]
    freed: bool
    hold_until: Instant
    timer_at: Instant
    transfer_until: Instant

    @property
    def next_deadline(self) -> Instant:
        """When a Tick is due; FOREVER if never."""
        at = min(self.timer_at, self.transfer_until)
        return min(at, self.hold_until) if self.status is HOLDING else at

    @property
    def idle(self) -> bool:
        """Whether there is nothing to remember: no request of ours, no attempt of theirs (R7)."""
        return self.status is FAILED and self.prefill is Prefill.UNHEARD and not self.ended


# What every action copies its state with: `copies.replace`, made for this class alone.
if TYPE_CHECKING:
    from attrs import evolve as replace
else:
    replace = copier(Producer)


def is_over(state: Producer) -> bool:
    """Whether the transfer needs nothing any more but to be remembered."""
    return state.status in OVER


def produce(transfer: TransferId, consumer_rank: int) -> Producer:
    """A transfer nobody has said anything about yet.

    It starts as FAILED with nothing to remember, from where a request or a registration brings it
    to life and a REVOKE or QUERY of an attempt never heard of leaves a tombstone.
    """
    return Producer(
        FAILED,
        transfer,
        consumer_rank,
        b"",
        Prefill.UNHEARD,
        0,
        (),
        None,
        (),
        (),
        (),
        (),
        0,
        0,
        0,
        0,
        False,
        None,
        False,
        (),
        True,
        FOREVER,
        FOREVER,
        FOREVER,
    )
