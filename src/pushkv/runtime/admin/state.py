"""What a running engine tells an operator: plain data, as JSON on the way.

Durations are in seconds. An incarnation is 16 hexadecimal digits, since JSON readers keep no 64
bits.
"""

from __future__ import annotations

from attrs import frozen

from pushkv.core.ids import Worker
from pushkv.runtime.health import Health

__all__ = [
    "DrainState",
    "EngineState",
    "LinkState",
    "Peer",
    "Proof",
    "QuarantineState",
    "Released",
    "TransferState",
]


@frozen
class Peer:
    """One rank of one life of one engine."""

    engine: str
    incarnation: str
    rank: int

    def __str__(self) -> str:
        return f"{self.engine}/{self.incarnation}/{self.rank}"

    @classmethod
    def of(cls, worker: Worker) -> Peer:
        """As the core names it."""
        return cls(worker.engine, f"{worker.incarnation:016x}", worker.rank)


@frozen
class LinkState:
    """One link.

    Attributes:
        role: Which end this is: "consumer" dials and grants, "producer" asks and writes.
        address: What is dialled, as host:port; "" at a producer.
        peer: Whoever answered last; None where nobody has.
        status: As in `docs/machines.md`.
        status_s: For how long.
        lease_left_s: For how long the producer's end may still WRITE: its permit's time, and at a
            consumer's that of the lease of its last grant. None where there is none.
    """

    role: str
    address: str
    peer: Peer | None
    status: str
    status_s: float
    lease_left_s: float | None


@frozen
class TransferState:
    """One attempt of a transfer, between this rank and one peer.

    Attributes:
        transfer: Its name.
        attempt: Its number; None where nobody has registered.
        role: "consumer" or "producer": this engine's.
        peer: None where it is not known yet.
        status: As in `docs/machines.md`.
        status_s: For how long.
        age_s: Since this rank first heard of it.
        blocks: Destination blocks registered, or source blocks computed.
        attempts: Attempts of the transfer so far, this one included.
    """

    transfer: str
    attempt: int | None
    role: str
    peer: Peer | None
    status: str
    status_s: float
    age_s: float
    blocks: int
    attempts: int


@frozen
class Proof:
    """One thing that would give quarantined blocks back.

    Attributes:
        kind: "fence", "verdict", "death" or "word".
        what: Said in full.
        due_s: In how long it comes by itself; None where that is not known.
    """

    kind: str
    what: str
    due_s: float | None = None


@frozen
class QuarantineState:
    """Blocks that a WRITE may still reach: destinations of ours, or sources that it reads.

    Attributes:
        role: "consumer" where it may be written into them, "producer" where they may be read.
        transfer: Whose.
        attempt: Which registration.
        peer: Who may write, or be written to.
        blocks: How many.
        since_s: For how long.
        proofs: What would give them back; any one of them does.
    """

    role: str
    transfer: str
    attempt: int
    peer: Peer | None
    blocks: int
    since_s: float
    proofs: tuple[Proof, ...]


@frozen
class DrainState:
    """Whether anything new is taken.

    Attributes:
        is_on: Nothing is.
        left: Attempts, prefills and WRITEs under way; quarantines count.
        is_empty: It is on, and nothing is left: the engine may be stopped.
    """

    is_on: bool
    left: int
    is_empty: bool


@frozen
class EngineState:
    """One rank at one moment. Lists are oldest first; each is cut where it is too long.

    Attributes:
        engine, incarnation, rank: Who answers.
        address: Of its control channel, as host:port.
        transport: Name and version.
        protocol: The newest protocol that it speaks.
        process: Its number on its host.
        health: Its blocks.
        drain: Whether it takes new work.
        links: Its links.
        transfers: What is under way.
        quarantined: What only a proof gives back; beside those in `transfers`.
        links_in_all, transfers_in_all, quarantined_in_all: How many there are.
    """

    engine: str
    incarnation: str
    rank: int
    address: str
    transport: str
    protocol: int
    process: int
    health: Health
    drain: DrainState
    links: tuple[LinkState, ...]
    links_in_all: int
    transfers: tuple[TransferState, ...]
    transfers_in_all: int
    quarantined: tuple[QuarantineState, ...]
    quarantined_in_all: int


@frozen
class Released:
    """What an operator's word was said of."""

    released: tuple[QuarantineState, ...]
