"""What a step wants done: a closed list, in the order in which it is to be done.

Effects for the world (`Send`, `PostWrite`, `Dial`, `Hangup`, `PermitGranted`, `PermitEnded`) go to
the runtime; reports go to the engine; the rest couples the machines of one endpoint and never
leaves it.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import field, frozen

from .ids import AttemptId, Blocks, Epoch, Instant, Part, TransferId, Worker
from .messages import AttemptMessage, Grant, Hello, Message, Ping, Reason

__all__ = [
    "BlocksReleased",
    "CloseSocket",
    "Counted",
    "Delivered",
    "Dial",
    "DialPeer",
    "Effect",
    "Hangup",
    "LinkDown",
    "LinkUp",
    "LookForArrivals",
    "MachineEffect",
    "Member",
    "MemberFreed",
    "MemberOutcome",
    "MemberTold",
    "NotDelivered",
    "PeerJoined",
    "PermitEnded",
    "PermitGranted",
    "PostWrite",
    "ProducerAddress",
    "Report",
    "RetryDue",
    "Send",
    "SendLink",
    "SourceFreed",
    "SourceReleased",
    "SourceYielded",
    "SuspectLink",
    "Transmit",
    "WithdrawMember",
    "WithdrawWrites",
    "WriterJoined",
]


@frozen(order=True)
class ProducerAddress:
    """Where a consumer dials a producer's rank: one control address per engine and rank.

    `engine` is the name expected there, or "" for whoever answers; it is no part of the address:
    two attempts that expect different names there share a link.
    """

    host: str
    port: int
    rank: int = 0
    engine: str = field(default="", eq=False)


@frozen(order=True)
class Member:
    """One consumer rank and one producer rank of an attempt (R12)."""

    consumer_rank: int
    producer_rank: int


class MemberOutcome(StrEnum):
    """What became of one member of an attempt."""

    DELIVERED = "delivered"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"


# -- between machine and endpoint


@frozen
class Send:
    """Send an attempt's message over its current link."""

    message: AttemptMessage


@frozen
class SendLink:
    """Send PING or GRANT over this link."""

    message: Ping | Grant


@frozen
class MemberTold:
    """A member's outcome, told once."""

    attempt: AttemptId
    outcome: MemberOutcome
    reason: Reason | None


@frozen
class MemberFreed:
    """Nothing can write into a member's blocks any more; told once."""

    attempt: AttemptId


@frozen
class WithdrawMember:
    """Revoke one member of an attempt (R12)."""

    member: Member
    reason: Reason


@frozen
class SuspectLink:
    """A REVOKE stayed unanswered: end the link this attempt uses."""

    attempt: AttemptId


@frozen
class LinkUp:
    """A link is up under a new epoch."""

    epoch: Epoch
    peer: Worker


@frozen
class LinkDown:
    """The link of this epoch has ended; `fence` (R6) is None where it never granted a permit."""

    epoch: Epoch
    peer: Worker
    fence: Instant | None


@frozen
class DialPeer:
    """Open this link's connection."""


@frozen
class CloseSocket:
    """Close this link's connection."""


@frozen
class SourceFreed:
    """One consumer rank no longer needs the source blocks of a transfer (R12)."""

    transfer: TransferId
    consumer_rank: int


@frozen
class Counted:
    """Something was dropped, refused or survived; `cause` is the counter's label (I5, I8)."""

    cause: str
    detail: str = ""


# -- to the runtime


@frozen
class Transmit:
    """Send a message on a connection."""

    connection: int
    message: Message


@frozen
class Dial:
    """Open a connection to a producer; `link` names it in what follows."""

    address: ProducerAddress


@frozen
class Hangup:
    """Close a connection. Its end is reported like any other."""

    connection: int


@frozen
class PostWrite:
    """WRITE one part. It is open from here on (R8); exactly one completion must follow.

    `source` holds the tokens below `source_end`, but for those that no sliding window reaches any
    more; `destination` holds them from `destination_start` on.

    Posted only under the permit of `epoch`, checked immediately before the post (R5).
    """

    attempt: AttemptId
    epoch: Epoch
    part: Part
    source: Blocks
    source_end: int
    destination: Blocks
    destination_start: int
    arrival_token: int


@frozen
class WithdrawWrites:
    """Nothing more of this attempt need be written: what was ordered and waits is not posted.

    Each such part closes as refused, at once. What is with the transport goes on to its end.
    """

    attempt: AttemptId


@frozen
class PermitGranted:
    """WRITEs may be posted over `epoch` until `until` (R4)."""

    epoch: Epoch
    until: Instant


@frozen
class PermitEnded:
    """Nothing may be posted over `epoch` to `peer` any more (R11)."""

    epoch: Epoch
    peer: Worker


@frozen
class PeerJoined:
    """A consumer's HELLO was accepted: the transport may learn its memory.

    One `PermitEnded` follows, when the link ends.
    """

    peer: Worker
    hello: Hello


@frozen
class WriterJoined:
    """A producer's HELLO was accepted: it may write here from now on, until its process is dead."""

    peer: Worker
    hello: Hello


@frozen
class LookForArrivals:
    """Look for arrivals while some attempt needs them."""

    active: bool


# -- to the engine


@frozen
class Delivered:
    """Outcome: every byte of the attempt is in place at every rank. Told once per attempt."""

    transfer: TransferId
    attempt: int


@frozen
class NotDelivered:
    """Outcome: the attempt will not deliver. Told once; the blocks follow with `BlocksReleased`.

    `retry` says that `RetryDue` follows and a new attempt with fresh blocks is worth making.
    """

    transfer: TransferId
    attempt: int
    reason: Reason
    retry: bool


@frozen
class BlocksReleased:
    """Nothing can write into the attempt's destination blocks any more. Told once per attempt."""

    transfer: TransferId
    attempt: int


@frozen
class RetryDue:
    """The backoff is over: register a new attempt with fresh blocks, or recompute."""

    transfer: TransferId
    attempt: int


@frozen
class SourceReleased:
    """No WRITE reads the transfer's source blocks any more and none will. Told once."""

    transfer: TransferId
    reason: Reason | None


@frozen
class SourceYielded:
    """No WRITE reads the blocks of a prefill that was preempted any more: they may be used anew.

    Told once per `PrefillPreempted`, in their order. Where a WRITE of unknown outcome may read on,
    nothing is told before `SourceReleased`, which then is about these blocks too.
    """

    transfer: TransferId


Report = Delivered | NotDelivered | BlocksReleased | RetryDue | SourceReleased | SourceYielded
MachineEffect = (
    Send
    | SendLink
    | MemberTold
    | MemberFreed
    | WithdrawMember
    | SuspectLink
    | LinkUp
    | LinkDown
    | DialPeer
    | CloseSocket
    | SourceFreed
)
Effect = (
    MachineEffect
    | Counted
    | Transmit
    | Dial
    | Hangup
    | PostWrite
    | WithdrawWrites
    | PermitGranted
    | PermitEnded
    | PeerJoined
    | WriterJoined
    | LookForArrivals
    | Report
)
