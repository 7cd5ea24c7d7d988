"""A small world around several endpoints, in virtual time: wires, clocks, memory, engines.

Nothing in it is random. Messages wait in ordered queues until they are delivered, directions can be
cut, processes crash and come back, and each WRITE ends how and when the test says. The memory knows
who owns each block and who wrote it, and a block that is given back belongs to somebody else at
once. Whatever the protocol forbids raises `ViolationError` in the step in which it happens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import count

from attrs import define, field, frozen

from pushkv.core import rules
from pushkv.core.capabilities import Capabilities
from pushkv.core.effects import (
    BlocksReleased,
    Counted,
    Delivered,
    Dial,
    Effect,
    Hangup,
    LookForArrivals,
    NotDelivered,
    PeerJoined,
    PermitEnded,
    PermitGranted,
    PostWrite,
    ProducerAddress,
    Report,
    RetryDue,
    SourceReleased,
    Transmit,
)
from pushkv.core.endpoint import Endpoint, Identity
from pushkv.core.events import (
    ArrivalSeen,
    Arrived,
    Computed,
    ConnectionClosed,
    ConnectionOpened,
    Event,
    MessageReceived,
    Offered,
    Tick,
    WriteClosed,
)
from pushkv.core.ids import FOREVER, EngineId, Epoch, Incarnation, Instant, TransferId, seconds
from pushkv.core.machines import StepRecord
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

    owners: list[Owner | None] = field(factory=lambda: [None] * BLOCKS)
    contents: list[dict[tuple[int, int], object]] = field(
        factory=lambda: [{} for _ in range(BLOCKS)]
    )
    serial: int = 0

    def take(self, number: int, owner: Owner) -> tuple[int, ...]:
        """Blocks of nobody in particular; the oldest of those given back come last."""
        free = [n for n, held in enumerate(self.owners) if held is None or held.kind == "other"]
        assert len(free) >= number, "the test needs more blocks than there are"
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
class _Dialing:
    node: Node
    incarnation: int
    address: ProducerAddress
    until: int


def fits(ours: Hello, theirs: Hello) -> Refused | None:
    """As at run time, but of the model alone."""
    if ours.model != theirs.model:
        return Refused("model", str(ours.model), str(theirs.model))
    return None


class World:
    """Several nodes; `auto` does the transport's work as soon as it is ordered."""

    def __init__(
        self, capabilities: Capabilities = STRONG, policy: Policy = POLICY, *, auto: bool = True
    ) -> None:
        self.capabilities = capabilities
        self.policy = policy
        self.auto = auto
        self.auto_retry = False
        self.now = 1_000 * seconds(1)
        self.nodes: dict[str, Node] = {}
        self.wires: dict[int, Wire] = {}
        self.writes: list[Write] = []
        self.records: list[StepRecord] = []
        self.watch = False
        self._cut: set[tuple[str, str]] = set()
        self._dialing: list[_Dialing] = []
        self._pending: deque[tuple[Node, int, Event]] = deque()
        self._arrivals: deque[tuple[Node, ArrivalSeen]] = deque()
        self._numbers = count(1)

    # -- who is there

    def node(
        self,
        name: str,
        *,
        rank: int = 0,
        engine: str = "",
        ppm: int = 0,
        offset: int = 0,
        model: str = "m",
        policy: Policy | None = None,
    ) -> Node:
        """A process that has been up for long enough to serve."""
        node = Node(
            name=name,
            rank=rank,
            engine=engine or name,
            ppm=ppm,
            offset=offset,
            capabilities=self.capabilities,
            policy=policy or self.policy,
            model=model,
            incarnation=0,
            endpoint=None,  # type: ignore[arg-type]
        )
        self.nodes[name] = node
        self._start(node)
        self.now += self.policy.lease + 1
        return node

    def _start(self, node: Node) -> None:
        node.incarnation = 1_000 + next(self._numbers)
        hello = Hello(
            protocol=1,
            nonce=0,
            engine=EngineId(node.engine),
            incarnation=Incarnation(node.incarnation),
            rank=node.rank,
            model=(("name", node.model),),
            layout=(),
            transport="test",
            transport_version="1",
            lease=node.policy.lease,
            directory=(),
            memory=b"",
        )
        node.endpoint = Endpoint(
            Identity(hello, b"layout", b"0123456789abcdef"),
            node.policy,
            node.capabilities,
            fits,
            self.local(node),
            self._observe,
        )
        node.alive = True

    def _observe(self, record: StepRecord) -> None:
        if self.watch:
            self.records.append(record)

    def crash(self, node: Node, *, silently: bool = False) -> None:
        """The process is gone; what it had posted may still land."""
        node.alive = False
        node.looking = False
        node.permits.clear()
        node.offers.clear()
        node.sources.clear()
        self._arrivals = deque(pair for pair in self._arrivals if pair[0] is not node)
        self.writes = [
            write for write in self.writes if write.node is not node or write.posted_at is not None
        ]
        for wire in self.wires.values():
            if node in wire.nodes and wire.open[node.name]:
                wire.open[node.name] = False
                wire.queues[node.name].clear()
                if not silently:
                    wire.queues[wire.other(node).name].append(Closing())

    def restart(self, node: Node) -> None:
        """The next life on the same host and addresses: its pool is empty, its memory is not."""
        node.memory.owners = [None] * BLOCKS
        self._start(node)

    # -- time

    def local(self, node: Node, at: int | None = None) -> Instant:
        """What the node's clock reads."""
        real = self.now if at is None else at
        return Instant(node.offset + real + real * node.ppm // 1_000_000)

    def real(self, node: Node, at: Instant) -> int:
        """When the node's clock will read `at`."""
        if at == FOREVER:
            return FOREVER
        real = (at - node.offset) * 1_000_000 // (1_000_000 + node.ppm) - 2
        while self.local(node, real) < at:
            real += 1
        return real

    def advance(self, duration: int, *, settle: bool = True) -> None:
        """Let time pass; every deadline on the way is met, and all news are taken in between."""
        end = self.now + duration
        ticks: Counter[tuple[str, int]] = Counter()
        while True:
            if settle:
                self.settle()
            at, node = min(
                (
                    (self.real(node, node.endpoint.next_deadline()), node)
                    for node in self.nodes.values()
                    if node.alive
                ),
                key=lambda pair: (pair[0], pair[1].name),
                default=(FOREVER, None),
            )
            dial = min((each.until for each in self._dialing), default=FOREVER)
            if min(at, dial) > end:
                break
            self.now = max(self.now, min(at, dial))
            if dial <= at or node is None:
                self._dials()
                continue
            ticks[node.name, self.now] += 1
            if ticks[node.name, self.now] > TICKS_AT_ONCE_MOST:
                raise ViolationError(f"I7: {node.name} spins at {self.now}")
            self.happen(node, Tick())
        self.now = end
        if settle:
            self.settle()

    # -- what happens

    def happen(self, node: Node, event: Event) -> list[Effect]:
        """One event at one node, and everything it wants done."""
        effects = node.endpoint.handle(event, self.local(node))
        for effect in effects:
            self._do(node, effect)
        self._check(node)
        return effects

    def _do(self, node: Node, effect: Effect) -> None:
        match effect:
            case Transmit():
                node.sent.append(effect.message)
                wire = self.wires[effect.connection]
                if wire.open[node.name]:
                    wire.queues[wire.other(node).name].append(effect.message)
            case PostWrite():
                self.writes.append(Write(node, node.incarnation, effect))
            case PermitGranted():
                node.permits[effect.epoch] = effect.until
            case PermitEnded():
                node.permits.pop(effect.epoch, None)
            case Dial():
                until = self.now + seconds(5)
                self._dialing.append(_Dialing(node, node.incarnation, effect.address, until))
            case Hangup():
                self._hang_up(node, effect.connection)
            case LookForArrivals():
                node.looking = effect.active
                if effect.active:
                    self._look(node)
            case Counted():
                node.counted[effect.cause] += 1
            case PeerJoined():
                pass
            case _:
                assert isinstance(effect, Report), f"{effect!r} left the endpoint"
                self._report(node, effect)

    def _hang_up(self, node: Node, number: int) -> None:
        wire = self.wires.get(number)
        if wire is None or not wire.open[node.name]:
            return
        wire.open[node.name] = False
        wire.queues[node.name].clear()
        wire.queues[wire.other(node).name].append(Closing())
        self._pending.append((node, node.incarnation, ConnectionClosed(number, None, "hung up")))

    # -- the network

    def cut(self, source: Node, target: Node) -> None:
        """Nothing more comes through from `source` to `target`; it waits."""
        self._cut.add((source.name, target.name))

    def part(self, one: Node, other: Node) -> None:
        """Nothing comes through either way."""
        self.cut(one, other)
        self.cut(other, one)

    def heal(self) -> None:
        """Everything comes through again."""
        self._cut.clear()

    def reset(self, wire: Wire) -> None:
        """Both ends learn that their connection is gone; what was on its way is lost."""
        for node in wire.nodes:
            wire.queues[node.name].clear()
            if wire.open[node.name]:
                wire.queues[node.name].append(Closing())

    def lose(self, wire: Wire, node: Node) -> None:
        """Its end of the connection is gone, and the other end hears nothing of it."""
        wire.open[node.name] = False
        wire.queues[node.name].clear()
        self.happen(node, ConnectionClosed(wire.number, None, "lost"))

    def send(self, wire: Wire, to: Node, *messages: Message) -> None:
        """Put messages on the wire, behind what is there: repeated, late, or made up."""
        wire.queues[to.name].extend(messages)

    def deliverable(self, wire: Wire, to: Node) -> bool:
        """Whether something can be delivered there now."""
        if not wire.queues[to.name]:
            return False
        return (wire.other(to).name, to.name) not in self._cut

    def deliver(self, wire: Wire, to: Node, *, twice: bool = False) -> None:
        """The next thing on the wire arrives."""
        item = wire.queues[to.name].popleft()
        if not wire.open[to.name] or not to.alive:
            return
        if isinstance(item, Closing):
            wire.open[to.name] = False
            self.happen(to, ConnectionClosed(wire.number, None, "closed by peer"))
            return
        for _ in range(2 if twice else 1):
            if wire.open[to.name]:
                self.happen(to, MessageReceived(wire.number, item))

    def _dials(self) -> bool:
        found = False
        for dial in list(self._dialing):
            listener = self.nodes[dial.address.host]
            severed = {(dial.node.name, listener.name), (listener.name, dial.node.name)} & self._cut
            if severed and self.now < dial.until:
                continue
            self._dialing.remove(dial)
            found = True
            if not dial.node.alive or dial.node.incarnation != dial.incarnation:
                continue
            if severed or not listener.alive:
                self.happen(dial.node, ConnectionClosed(None, dial.address, "refused"))
                continue
            self.connect(dial.node, listener, dial.address)
        return found

    def connect(self, dialer: Node, listener: Node, address: ProducerAddress) -> Wire:
        """A connection stands; neither end has said anything."""
        names = (dialer.name, listener.name)
        wire = Wire(
            next(self._numbers),
            (dialer, listener),
            {name: deque() for name in names},
            dict.fromkeys(names, True),
        )
        self.wires[wire.number] = wire
        self.happen(listener, ConnectionOpened(wire.number, next(self._numbers), None))
        self.happen(dialer, ConnectionOpened(wire.number, next(self._numbers), address))
        return wire

    def wire(self, one: Node, other: Node) -> Wire:
        """The newest connection between two nodes."""
        return max(
            (wire for wire in self.wires.values() if {*wire.nodes} == {one, other}),
            key=lambda wire: wire.number,
        )

    def settle(self) -> None:
        """Until nothing is left that could happen at this instant."""
        for _ in range(100_000):
            if not self._once():
                return
        raise ViolationError("I7: messages go round for ever")

    def _once(self) -> bool:
        while self._pending:
            node, incarnation, event = self._pending.popleft()
            if node.alive and node.incarnation == incarnation:
                self.happen(node, event)
                return True
        if self._dials():
            return True
        for wire in list(self.wires.values()):
            for node in wire.nodes:
                if self.deliverable(wire, node):
                    self.deliver(wire, node)
                    return True
            if not any(wire.open.values()):
                del self.wires[wire.number]
        if self.auto:
            for write in self.ordered():
                self.finish(write)
                return True
        return any(self._look(node) for node in self.nodes.values() if node.looking)

    def _look(self, node: Node) -> bool:
        seen = [pair for pair in self._arrivals if pair[0] is node]
        for pair in seen:
            self._arrivals.remove(pair)
            self._pending.append((node, node.incarnation, pair[1]))
        return bool(seen)

    # -- the transport

    def ordered(self) -> list[Write]:
        """WRITEs that were ordered and not posted."""
        return [write for write in self.writes if write.posted_at is None and not write.closed]

    def flying(self) -> list[Write]:
        """WRITEs that are posted and not closed."""
        return [write for write in self.writes if write.posted_at is not None and not write.closed]

    def post(self, write: Write) -> bool:
        """R5: the permit is checked here and now. Returns whether it was posted."""
        node = write.node
        until = node.permits.get(write.effect.epoch, Instant(0))
        if not rules.may_post(self.local(node), until, self.capabilities.write_bound):
            self.close(write, "refused")
            return False
        write.posted_at = self.now
        return True

    def land(self, write: Write, tokens: int | None = None) -> None:
        """The bytes of `tokens` of its tokens, or of all, reach the consumer's host (I1)."""
        assert write.posted_at is not None, "only what was posted can land"
        bound = self.capabilities.write_bound
        took = self.local(write.node) - self.local(write.node, write.posted_at)
        assert bound is None or took <= bound, "the transport breaks its promise"
        effect = write.effect
        attempt = effect.attempt
        target = next(
            node
            for node in self.nodes.values()
            if (node.engine, node.rank) == (attempt.consumer, attempt.consumer_rank)
        )
        last = effect.part.end if tokens is None else effect.part.start + tokens
        for token in range(effect.part.start, last):
            value = self._read(write, token)
            block = effect.destination[0][
                (token - effect.destination_start // BLOCK_TOKENS * BLOCK_TOKENS) // BLOCK_TOKENS
            ]
            owner = target.memory.owners[block]
            mine = Owner("attempt", attempt.transfer, attempt.attempt)
            same_life = attempt.consumer_incarnation == target.incarnation and target.alive
            if owner != mine if same_life else owner is not None and target.alive:
                raise ViolationError(f"I1: {attempt} wrote block {block} of {owner}")
            target.memory.contents[block][attempt.producer_rank, token] = value
        write.landed = write.landed or last == effect.part.end

    def _read(self, write: Write, token: int) -> object:
        node, effect = write.node, write.effect
        alive = node.alive and node.incarnation == write.incarnation
        if alive and not write.source_read:
            block = effect.source[0][token // BLOCK_TOKENS]
            owner = node.memory.owners[block]
            if owner != Owner("source", effect.attempt.transfer):
                raise ViolationError(f"I1: {effect.attempt} read block {block} of {owner}")
        return (effect.attempt.transfer, effect.attempt.attempt)

    def land_all(self, node: Node, transfer: str, attempt: int) -> None:
        """Put every byte of an attempt in place, as if its WRITEs had been made."""
        event = node.offers[TransferId(transfer), attempt].event
        for token in range(event.start, event.end):
            block = event.blocks[0][token // BLOCK_TOKENS - event.start // BLOCK_TOKENS]
            for address in event.producers:
                written = (event.transfer, event.attempt)
                node.memory.contents[block][address.rank, token] = written

    def arrive(self, write: Write, token: int | None = None) -> None:
        """The consumer's transport can see the arrival; it is told when it looks."""
        attempt = write.effect.attempt
        for node in self.nodes.values():
            named = (node.engine, node.incarnation, node.rank)
            if node.alive and named == (
                attempt.consumer,
                attempt.consumer_incarnation,
                attempt.consumer_rank,
            ):
                number = write.effect.arrival_token if token is None else token
                seen = ArrivalSeen(attempt, write.effect.part.number, number)
                self._arrivals.append((node, seen))

    def close(self, write: Write, outcome: str, *, source_idle: bool = False) -> None:
        """The transport reports how the WRITE ended."""
        write.closed = True
        write.source_read = source_idle or outcome == "done"
        node = write.node
        if node.alive and node.incarnation == write.incarnation:
            number = write.effect.part.number
            attempt = write.effect.attempt
            self.happen(node, WriteClosed(attempt, number, outcome, source_idle=source_idle))

    def finish(self, write: Write) -> None:
        """Post, land, arrive and close as done; or as refused, if it may not be posted."""
        if self.post(write):
            self.land(write)
            self.arrive(write)
            self.close(write, "done")

    # -- the engines

    def offer(
        self,
        node: Node,
        transfer: str,
        producers: Iterable[Node],
        tokens: int = 8,
        *,
        start: int = 0,
        consumer_ranks: tuple[int, ...] | None = None,
        failures: int = 0,
        digest: bytes | None = None,
    ) -> int | None:
        """The engine reserves blocks and offers them; None while it may hand out none (R13)."""
        if self.local(node) < node.endpoint.receiving.ready_at:
            return None
        number = node.attempts
        node.attempts += 1
        owner = Owner("attempt", transfer, number)
        first = start // BLOCK_TOKENS
        blocks = node.memory.take(
            -(-tokens // BLOCK_TOKENS) - first if tokens > start else 0, owner
        )
        event = Offered(
            transfer=TransferId(transfer),
            attempt=number,
            producers=tuple(producer.address for producer in producers),
            blocks=(blocks,),
            start=start,
            end=tokens,
            prompt_digest=transfer.encode() if digest is None else digest,
            consumer_ranks=(node.rank,) if consumer_ranks is None else consumer_ranks,
            failures=failures,
        )
        node.offers[event.transfer, number] = Offer(event, owner)
        self.happen(node, event)
        return number

    def request(self, node: Node, transfer: str, tokens: int = 8) -> None:
        """The producer's engine has a request, and blocks for its prompt."""
        name = TransferId(transfer)
        number = -(-tokens // BLOCK_TOKENS)
        node.sources[name] = node.memory.take(number, Owner("source", transfer))
        self.happen(node, Arrived(name, transfer.encode()))

    def compute(self, node: Node, transfer: str, tokens: int = 8, *, final: bool = True) -> None:
        """The producer's engine has computed this many tokens."""
        name = TransferId(transfer)
        self.happen(node, Computed(name, tokens, (node.sources[name],), final))

    def prefill(self, node: Node, transfer: str, tokens: int = 8) -> None:
        """A request, and its whole prompt computed."""
        self.request(node, transfer, tokens)
        self.compute(node, transfer, tokens)

    def outcome(self, node: Node, transfer: str, attempt: int) -> Delivered | NotDelivered | None:
        """What the engine was told."""
        return node.offers[TransferId(transfer), attempt].outcome

    def delivered(self, node: Node, transfer: str, attempt: int = 0) -> bool:
        """Whether the engine was told that it can decode."""
        return isinstance(self.outcome(node, transfer, attempt), Delivered)

    def reason(self, node: Node, transfer: str, attempt: int = 0) -> str:
        """Why it was not delivered, or "" as long as it may be."""
        outcome = self.outcome(node, transfer, attempt)
        return outcome.reason if isinstance(outcome, NotDelivered) else ""

    def released(self, node: Node, transfer: str, attempt: int = 0) -> bool:
        """Whether the engine was told that the blocks are its own again."""
        return node.offers[TransferId(transfer), attempt].released

    def hand_out(self, node: Node) -> bool:
        """The engine gives free blocks to somebody; False while it may not (R13)."""
        if self.local(node) < node.endpoint.receiving.ready_at:
            return False
        node.memory.take(BLOCKS // 2, Owner("somebody"))
        return True

    def _report(self, node: Node, report: Report) -> None:
        node.reports.append(report)
        if isinstance(report, SourceReleased):
            node.released_sources.append(report)
            if node.sources.pop(report.transfer, None) is None:
                raise ViolationError(f"I3: the source of {report.transfer} was released twice")
            node.memory.give_back(Owner("source", report.transfer))
            return
        offer = node.offers[report.transfer, report.attempt]
        match report:
            case Delivered() | NotDelivered():
                if offer.outcome is not None:
                    raise ViolationError(f"I3: {report} after {offer.outcome}")
                offer.outcome = report
                if isinstance(report, Delivered):
                    self._complete(node, offer)
            case BlocksReleased():
                if offer.released or offer.outcome is None:
                    raise ViolationError(f"I3: {report}, outcome {offer.outcome}")
                offer.released = True
                node.memory.give_back(offer.owner)
            case RetryDue():
                self._retry(node, offer)

    def _retry(self, node: Node, offer: Offer) -> None:
        told = offer.outcome
        due = isinstance(told, NotDelivered) and (told.retry or told.reason == "preempted")
        if not due:
            raise ViolationError(f"I3: a retry is due after {told}")
        if self.auto_retry:
            event = offer.event
            producers = [self.nodes[address.host] for address in event.producers]
            self.offer(
                node,
                event.transfer,
                producers,
                event.end,
                start=event.start,
                consumer_ranks=event.consumer_ranks,
                failures=event.failures + 1,
            )

    def _complete(self, node: Node, offer: Offer) -> None:
        """I2: every byte of this attempt is in place, from every producer rank."""
        event = offer.event
        for address in event.producers:
            for token in range(event.start, event.end):
                first = event.start // BLOCK_TOKENS
                block = event.blocks[0][token // BLOCK_TOKENS - first]
                value = node.memory.contents[block].get((address.rank, token))
                if value != (event.transfer, event.attempt):
                    raise ViolationError(
                        f"I2: {event.transfer}/{event.attempt} was delivered without token "
                        f"{token} of producer rank {address.rank}: {value}"
                    )

    # -- after every event

    def _check(self, node: Node) -> None:
        """I4: what the endpoint counts as exposed is what the engine has not got back."""
        out = sum(
            len(offer.event.blocks[0]) for offer in node.offers.values() if not offer.released
        )
        if out != node.endpoint.receiving.exposed_blocks:
            raise ViolationError(
                f"I4: {node.name} counts {node.endpoint.receiving.exposed_blocks} exposed blocks "
                f"of {out}"
            )
        for key, offer in node.offers.items():
            held = sum(owner == offer.owner for owner in node.memory.owners)
            if held != (0 if offer.released else len(offer.event.blocks[0])):
                raise ViolationError(f"I4: {key} holds {held} blocks")


def pair(
    capabilities: Capabilities = STRONG, policy: Policy = POLICY, *, auto: bool = True
) -> tuple[World, Node, Node]:
    """A world of one consumer and one producer."""
    world = World(capabilities, policy, auto=auto)
    return world, world.node("d"), world.node("p")
