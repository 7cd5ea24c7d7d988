"""What a world is made of: hosts with memory, processes, wires, WRITEs."""

from __future__ import annotations

from collections import Counter, deque

from attrs import define, field, frozen

from pushkv.core.capabilities import Capabilities
from pushkv.core.effects import (
    Delivered,
    NotDelivered,
    PostWrite,
    ProducerAddress,
    Report,
    SourceReleased,
)
from pushkv.core.endpoint import Endpoint
from pushkv.core.events import (
    Offered,
)
from pushkv.core.ids import Epoch, Instant, TransferId, seconds
from pushkv.core.messages import Hello, Message, Refused
from pushkv.core.policy import Policy

BLOCK_TOKENS = 4
BLOCKS = 64
TICKS_AT_ONCE_MOST = 5

STRONG = Capabilities("strong", done_means_visible=True, write_bound=seconds(1))
STRONG_UNBOUNDED = Capabilities("strong, no bound", done_means_visible=True)
WEAK = Capabilities("weak", done_means_visible=False, write_bound=seconds(1))
WEAK_UNBOUNDED = Capabilities("weak, no bound", done_means_visible=False)

POLICY = Policy(
    lease=seconds(3),
    resend=seconds(1),
    query=seconds(1),
    waiting=seconds(12),
    settle=seconds(2),
    expected=seconds(5),
    hold=seconds(30),
    transfer=seconds(8),
    write_backoff=seconds(0.05),
    attempts=3,
    retry_backoff=seconds(0.2),
    connect=seconds(2),
    connect_backoff=seconds(0.2),
)


class ViolationError(AssertionError):
    """An invariant of the protocol was broken."""


class ShortageError(AssertionError):
    """An engine has not the blocks that it is told to use."""


class Closing:
    """What is sent last on a wire."""


@frozen
class Owner:
    """Whose a block is: an attempt's (`number` counts), a prompt's source, or somebody else's."""

    kind: str
    name: str = ""
    number: int = 0


@define(eq=False)
class Memory:
    """Blocks of one host, across the lives of the processes on it."""

    blocks: int = BLOCKS
    owners: list[Owner | None] = field()
    contents: list[dict[tuple[int, int], object]] = field()
    serial: int = 0

    @owners.default
    def _nobodys(self) -> list[Owner | None]:
        return [None] * self.blocks

    @contents.default
    def _empty(self) -> list[dict[tuple[int, int], object]]:
        return [{} for _ in range(self.blocks)]

    def take(self, number: int, owner: Owner) -> tuple[int, ...]:
        """Blocks of nobody in particular; the oldest of those given back come last."""
        free = [n for n, held in enumerate(self.owners) if held is None or held.kind == "other"]
        if len(free) < number:
            raise ShortageError(f"{number} blocks are wanted, and {len(free)} are free")
        for block in free[:number]:
            self.owners[block] = owner
            self.contents[block] = {}
        return tuple(free[:number])

    def give_back(self, owner: Owner) -> int:
        """All blocks of `owner` belong to somebody else from now on."""
        found = [n for n, held in enumerate(self.owners) if held == owner]
        for block in found:
            self.serial += 1
            self.owners[block] = Owner("other", number=self.serial)
            self.contents[block] = {}
        return len(found)


@define(eq=False)
class Offer:
    """What a consumer's engine knows of one attempt."""

    event: Offered
    owner: Owner
    outcome: Delivered | NotDelivered | None = None
    released: bool = False
    accepted: bool = True


@define(eq=False)
class Node:
    """One worker process on one host, its engine included."""

    name: str
    rank: int
    engine: str
    ppm: int
    offset: int
    capabilities: Capabilities
    policy: Policy
    model: str
    incarnation: int
    endpoint: Endpoint
    alive: bool = True
    looking: bool = False
    memory: Memory = field(factory=Memory)
    permits: dict[Epoch, Instant] = field(factory=dict)
    offers: dict[tuple[TransferId, int], Offer] = field(factory=dict)
    sources: dict[TransferId, tuple[int, ...]] = field(factory=dict)
    released_sources: list[SourceReleased] = field(factory=list)
    counted: Counter[str] = field(factory=Counter)
    reports: list[Report] = field(factory=list)
    sent: list[Message] = field(factory=list)
    attempts: int = 0
    dials: int = 0

    @property
    def address(self) -> ProducerAddress:
        """Where consumers dial it."""
        return ProducerAddress(self.name, 1, self.rank)


@define(eq=False)
class Wire:
    """One connection: an ordered queue per direction, keyed by who receives."""

    number: int
    nodes: tuple[Node, Node]
    queues: dict[str, deque[Message | Closing]]
    open: dict[str, bool]

    def other(self, node: Node) -> Node:
        """The node at the other end."""
        return self.nodes[1] if node is self.nodes[0] else self.nodes[0]


@define(eq=False)
class Write:
    """One WRITE in the hands of the transport."""

    node: Node
    incarnation: int
    effect: PostWrite
    posted_at: int | None = None
    landed: bool = False
    closed: bool = False
    source_read: bool = False


@define(eq=False)
class Dialing:
    """A connection that is being made."""

    node: Node
    incarnation: int
    address: ProducerAddress
    until: int


def fits(ours: Hello, theirs: Hello) -> Refused | None:
    """As at run time, but of the model alone."""
    if ours.model != theirs.model:
        return Refused("model", str(ours.model), str(theirs.model))
    return None
