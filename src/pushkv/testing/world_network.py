"""The processes of a world, their clocks, and the wires between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from itertools import count

from pushkv.core.capabilities import Capabilities
from pushkv.core.effects import (
    Counted,
    Dial,
    Effect,
    Hangup,
    LookForArrivals,
    PeerJoined,
    PermitEnded,
    PermitGranted,
    PostWrite,
    ProducerAddress,
    Report,
    Transmit,
    WithdrawWrites,
    WriterJoined,
)
from pushkv.core.endpoint import Endpoint, Identity
from pushkv.core.events import (
    ArrivalSeen,
    ConnectionClosed,
    ConnectionOpened,
    Event,
    MessageReceived,
    Tick,
)
from pushkv.core.ids import FOREVER, EngineId, Incarnation, Instant, seconds
from pushkv.core.machines import StepRecord
from pushkv.core.messages import Hello, Message
from pushkv.core.policy import Policy

from .world_parts import (
    BLOCKS,
    POLICY,
    STRONG,
    TICKS_AT_ONCE_MOST,
    Closing,
    Dialing,
    Memory,
    Node,
    ViolationError,
    Wire,
    Write,
    fits,
)


class Network(ABC):
    """Several nodes and their clocks; `auto` does the transport's work as soon as it is ordered."""

    def __init__(
        self, capabilities: Capabilities = STRONG, policy: Policy = POLICY, *, auto: bool = True
    ) -> None:
        self.capabilities = capabilities
        self.policy = policy
        self.auto = auto
        self.auto_retry = False
        self.now: int = 1_000 * seconds(1)
        self.nodes: dict[str, Node] = {}
        self.wires: dict[int, Wire] = {}
        self.writes: list[Write] = []
        self.records: list[StepRecord] = []
        self.watch = False
        self._cut: set[tuple[str, str]] = set()
        self._dialing: list[Dialing] = []
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
        blocks: int = BLOCKS,
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
            memory=Memory(blocks),
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
        node.memory.owners = [None] * node.memory.blocks
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
                node.dials += 1
                until = self.now + seconds(5)
                self._dialing.append(Dialing(node, node.incarnation, effect.address, until))
            case Hangup():
                self._hang_up(node, effect.connection)
            case LookForArrivals():
                node.looking = effect.active
                if effect.active:
                    self._look(node)
            case Counted():
                node.counted[effect.cause] += 1
            case PeerJoined() | WriterJoined() | WithdrawWrites():
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

    # -- what is built on it

    @abstractmethod
    def ordered(self) -> list[Write]:
        """WRITEs that were ordered and not posted."""

    @abstractmethod
    def finish(self, write: Write) -> None:
        """Do all of a WRITE at once."""

    @abstractmethod
    def _report(self, node: Node, report: Report) -> None:
        """The node's engine is told something."""

    @abstractmethod
    def _check(self, node: Node) -> None:
        """After every event: what must always hold."""
