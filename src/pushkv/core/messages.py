"""The control messages between two worker ranks, and the data each carries.

All of them are idempotent. Each that concerns an attempt names it in full (R9). Durations travel,
clock readings never do; the one exception, the stamp of PING, is opaque to whoever echoes it (R4).
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from .ids import AttemptId, Blocks, Duration, EngineId, Incarnation, Part

__all__ = [
    "AttemptMessage",
    "Complete",
    "Failed",
    "Grant",
    "Hello",
    "LinkMessage",
    "Message",
    "Ping",
    "Progress",
    "Query",
    "RankAddress",
    "Reason",
    "Received",
    "Refused",
    "Register",
    "Registered",
    "Revoke",
    "Revoked",
    "Unproven",
    "Verdict",
]


class Reason(StrEnum):
    """Why an attempt did not deliver: one code per cause, in messages, logs and counters (I8)."""

    ABORTED = "aborted"
    """The producer's engine gave the request up."""
    ADDRESS = "wrong_engine"
    """The engine at the producer's address is not the one the request names."""
    BUDGET = "budget_spent"
    """The consumer has as many exposed and quarantined blocks as it may have."""
    CANCELLED = "cancelled"
    """The consumer's engine no longer wants the request."""
    CLOSED = "endpoint_closed"
    """The endpoint is shutting down."""
    COVERAGE = "coverage"
    """COMPLETE named parts that are not exactly what was asked for (R10)."""
    DUPLICATE = "duplicate_transfer"
    """The transfer is live already under another attempt."""
    EXPIRED = "expired"
    """The producer's hold time was over before a registration came."""
    GONE = "gone"
    """The producer no longer has the KV cache of this transfer."""
    LAYOUT = "layout_mismatch"
    """The registration was made for another KV cache layout."""
    FULL = "too_many_transfers"
    """The endpoint holds as many transfers as it may."""
    LINK_LOST = "link_lost"
    """The link between the two ranks ended."""
    NEVER_ARRIVED = "request_never_arrived"
    """The producer was never sent the request that was registered."""
    PREEMPTED = "preempted"
    """The consumer's engine took the blocks back."""
    PROMPT = "prompt_mismatch"
    """The producer's request under this transfer id has another prompt."""
    REFUSED = "link_refused"
    """The peers do not fit together; HELLO named the difference."""
    SHORT = "too_few_tokens"
    """The producer computed fewer tokens than were asked for."""
    SIBLING = "sibling_failed"
    """Another rank of the same attempt failed (R12)."""
    STALLED = "transfer_deadline"
    """The WRITEs did not finish within the transfer deadline."""
    STARTING = "restart_grace"
    """The consumer started too recently to hand out registered blocks (R13)."""
    UNKNOWN = "unknown_attempt"
    """The producer does not know this attempt."""
    UNREACHABLE = "unreachable"
    """No link to the producer came up in time; nothing was ever offered."""
    UNPROVEN = "unproven"
    """The producer cannot prove that its WRITEs are over."""
    WAITED = "waiting_deadline"
    """Nothing was heard about the attempt within the waiting deadline."""
    WRITE = "write_failed"
    """A WRITE failed more often than it is retried."""
    WRITER_GONE = "writer_gone"
    """The writing process is proven to be gone."""


@frozen
class Register:
    """D→P: blocks for prompt tokens [start, end) are offered; resent until answered."""

    attempt: AttemptId
    blocks: Blocks
    start: int
    end: int
    prompt_digest: bytes
    layout_digest: bytes
    producer_ranks: tuple[int, ...]
    consumer_ranks: tuple[int, ...]
    arrival_token: int
    deadline: Duration


@frozen
class Registered:
    """P→D: P holds the attempt."""

    attempt: AttemptId


@frozen
class Progress:
    """P→D: this many tokens of the attempt are written so far."""

    attempt: AttemptId
    tokens: int


@frozen
class Complete:
    """P→D, verdict: these parts, all done at P, are all of it."""

    attempt: AttemptId
    parts: tuple[Part, ...]


@frozen
class Failed:
    """P→D, verdict: no further WRITE; these parts ended DONE and every handle is closed."""

    attempt: AttemptId
    parts: tuple[Part, ...]
    reason: Reason


@frozen
class Revoked:
    """P→D, verdict in answer to REVOKE: no further WRITE; every handle is closed."""

    attempt: AttemptId
    parts: tuple[Part, ...]


@frozen
class Unproven:
    """P→D, verdict: no further WRITE, but P cannot prove that the posted ones are over."""

    attempt: AttemptId
    parts: tuple[Part, ...]


@frozen
class Revoke:
    """D→P: give the attempt back; answered in every state.

    `final` says that the request itself was given up: D makes no other attempt of the transfer.
    """

    attempt: AttemptId
    final: bool = False


@frozen
class Query:
    """D→P: what became of the attempt?"""

    attempt: AttemptId


@frozen
class Received:
    """D→P: D has the verdict of the attempt and will not name it again (R7)."""

    attempt: AttemptId


@frozen
class Ping:
    """P→D: asks for the permit to WRITE into D. `stamp` is P's own and opaque to D (R4)."""

    stamp: int


@frozen
class Grant:
    """D→P: grants the permit to WRITE into D for `lease`, counted from P's own stamp (R4)."""

    stamp: int
    lease: Duration
    consumer_incarnation: Incarnation
    producer_incarnation: Incarnation


@frozen
class RankAddress:
    """Where one rank of an engine listens for control connections."""

    rank: int
    host: str
    port: int


@frozen
class Hello:
    """Both ways, first on every connection: who speaks, and what must agree before anything else.

    The producer's end speaks first. `memory` is what a producer's transport needs to WRITE here; it
    grants access to the whole registered cache, so only a consumer says it, and only in answer to a
    HELLO it has accepted, over an authenticated connection. A producer's is empty. `process` says
    which process speaks, so that a peer on the same host can tell for certain that it is dead; ""
    where it cannot be said.
    """

    protocol: int
    nonce: int
    engine: EngineId
    incarnation: Incarnation
    rank: int
    model: tuple[tuple[str, str], ...]
    layout: tuple[tuple[str, str], ...]
    transport: str
    transport_version: str
    lease: Duration
    directory: tuple[RankAddress, ...]
    memory: bytes
    process: str = ""


@frozen
class Refused:
    """Both ways, instead of HELLO or after it: the two do not fit; both values named."""

    field: str
    ours: str
    theirs: str


Verdict = Complete | Failed | Revoked | Unproven
AttemptMessage = (
    Register
    | Registered
    | Progress
    | Complete
    | Failed
    | Revoked
    | Unproven
    | Revoke
    | Query
    | Received
)
LinkMessage = Ping | Grant | Hello | Refused
Message = AttemptMessage | LinkMessage
