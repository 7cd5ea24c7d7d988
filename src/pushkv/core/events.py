"""What happens to an endpoint: the engine's wishes, messages, the transport's news, time.

The first two groups are what an adapter submits; nothing here carries a clock reading.
"""

from __future__ import annotations

from attrs import frozen

from .effects import ProducerAddress
from .ids import AttemptId, Blocks, Epoch, TransferId, Worker
from .messages import Message, Reason, Register

__all__ = [
    "ArrivalSeen",
    "Arrived",
    "Cancelled",
    "Computed",
    "ConnectionClosed",
    "ConnectionOpened",
    "ConsumerEvent",
    "EngineEvent",
    "Event",
    "MessageReceived",
    "Offered",
    "PrefillAborted",
    "PrefillPreempted",
    "PrefillResumed",
    "ProducerEvent",
    "Proven",
    "Readmitted",
    "TakenBack",
    "Tick",
    "WriteClosed",
    "WriterGone",
]

# -- from a consumer's engine


@frozen
class Offered:
    """Destination blocks are reserved for prompt tokens [start, end): register them.

    Args:
        attempt: From the engine's one counter (R9), the same for all ranks (R12), never used twice.
        producers: One address per producer rank that writes into this consumer rank.
        blocks: Block ids that hold [start, end), one tuple per KV cache group, in token order;
            `start` is the first token of the first block.
        failures: Attempts of this transfer that failed before.
        consumer_ranks: All consumer ranks of the attempt.
        served: For each of `producers`, the consumer ranks that it serves, this one among them;
            empty where each serves all of them.
    """

    transfer: TransferId
    attempt: int
    producers: tuple[ProducerAddress, ...]
    blocks: Blocks
    start: int
    end: int
    prompt_digest: bytes
    consumer_ranks: tuple[int, ...] = (0,)
    failures: int = 0
    served: tuple[tuple[int, ...], ...] = ()


@frozen
class Cancelled:
    """The engine no longer wants this transfer. Unknown ones are counted, no more."""

    transfer: TransferId
    reason: Reason = Reason.CANCELLED


@frozen
class TakenBack:
    """The engine preempts a request that waits for its KV and wants the blocks back."""

    transfer: TransferId


@frozen
class Readmitted:
    """The engine admits a preempted request again: a new attempt may be made."""

    transfer: TransferId


# -- from a producer's engine


@frozen
class Arrived:
    """The engine has a request whose KV a consumer will ask for."""

    transfer: TransferId
    prompt_digest: bytes


@frozen
class Computed:
    """KV of the first `tokens` prompt tokens exists in `blocks`, in whole blocks unless `final`.

    Args:
        blocks: Source block ids from token 0 on, one tuple per KV cache group.
        final: Prefill is over; the blocks stay pinned until `SourceReleased`.
        step: Where not 0, the last of it does not exist yet: the engine's step of this number is
            computing it, and whoever posts waits for what that says (`pushkv.runtime.steps`).
    """

    transfer: TransferId
    tokens: int
    blocks: Blocks
    final: bool
    step: int = 0


@frozen
class PrefillPreempted:
    """The engine takes the source blocks of an unfinished prefill away, after `SourceYielded`."""

    transfer: TransferId


@frozen
class PrefillResumed:
    """A preempted prefill runs again, from token 0."""

    transfer: TransferId


@frozen
class PrefillAborted:
    """The engine gave the request up. Its blocks stay pinned until `SourceReleased`."""

    transfer: TransferId
    reason: Reason = Reason.ABORTED


# -- from the control channel


@frozen
class ConnectionOpened:
    """A connection stands. `dialed` is the address we dialled, or None for one we accepted.

    `nonce` is a fresh random number: this end's half of the link's epoch.
    """

    connection: int
    nonce: int
    dialed: ProducerAddress | None


@frozen
class ConnectionClosed:
    """A connection ended, or a dial failed (`connection` is None)."""

    connection: int | None
    dialed: ProducerAddress | None
    cause: str = ""


@frozen
class MessageReceived:
    """A well-formed message came on a connection."""

    connection: int
    message: Message


# -- from the transport


@frozen
class WriteClosed:
    """A part's WRITE is over, refused, or of unknown outcome. Exactly one per `PostWrite`."""

    attempt: AttemptId
    part: int
    outcome: str
    cause: str = ""
    source_idle: bool = False


@frozen
class ArrivalSeen:
    """All bytes of a part are visible here."""

    attempt: AttemptId
    part: int
    token: int


# -- from whoever knows


@frozen
class WriterGone:
    """Proof that a process is dead, and that nothing from it or to it is under way any more.

    For what it wrote that frees a consumer's blocks; for what was written to it, a source.
    A refused connection, a time-out or a new incarnation is no such proof (R14).
    """

    worker: Worker


@frozen
class Proven:
    """The operator's word that nothing can write into this transfer's quarantined blocks."""

    transfer: TransferId


@frozen
class Tick:
    """Time has passed."""


# -- between the machines of one endpoint


@frozen
class Wanted:
    """A consumer attempt needs this link."""


@frozen
class Unwanted:
    """No attempt needs this link any more."""


@frozen
class Opened:
    """The link's connection stands and HELLO was accepted at both ends."""

    epoch: Epoch
    peer: Worker


@frozen
class Closed:
    """The link's connection is gone, or could not be made."""

    cause: str


@frozen
class Doubted:
    """A REVOKE over this link stayed unanswered."""


@frozen
class Permitted:
    """The link of this epoch has a fresh permit."""

    epoch: Epoch


@frozen
class Withdrawn:
    """The engine, a sibling or a deadline takes the member's registration back."""

    reason: Reason


@frozen
class RegistrationReceived:
    """REGISTER came over the link `epoch` from `consumer`."""

    register: Register
    epoch: Epoch
    consumer: Worker


@frozen
class WriteDone:
    """The part's WRITE is DONE."""

    attempt: AttemptId
    part: int


@frozen
class WriteFailed:
    """The part's WRITE is over and incomplete."""

    attempt: AttemptId
    part: int


@frozen
class WriteRefused:
    """The permit did not last; nothing of the part was posted."""

    attempt: AttemptId
    part: int


@frozen
class WriteUnknown:
    """Nobody can say whether bytes of the part still land; perhaps its source is read no more."""

    attempt: AttemptId
    part: int
    source_idle: bool = False


ConsumerEvent = Offered | Cancelled | TakenBack | Readmitted
ProducerEvent = Arrived | Computed | PrefillPreempted | PrefillResumed | PrefillAborted
EngineEvent = ConsumerEvent | ProducerEvent | WriterGone | Proven
Event = (
    EngineEvent
    | ConnectionOpened
    | ConnectionClosed
    | MessageReceived
    | WriteClosed
    | ArrivalSeen
    | Tick
)
