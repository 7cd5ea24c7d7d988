"""Hand-overs by the real machines: one `Endpoint` per engine, in virtual time.

What is modelled is around them: connections that open, messages that take `control_s`, a thread
that posts, bytes that share a network. Each engine is one rank, which stands for all of its ranks:
they do the same at the same time. The transport is declared as NIXL's LIBFABRIC backend is: done
does not mean visible, and nobody can say how long a WRITE may still land.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count

from attrs import define, field

from pushkv.core import rules
from pushkv.core.capabilities import Capabilities
from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    Dial,
    Effect,
    Hangup,
    LookForArrivals,
    NotDelivered,
    PermitEnded,
    PermitGranted,
    PostWrite,
    ProducerAddress,
    SourceReleased,
    Transmit,
)
from pushkv.core.endpoint import Endpoint, Identity
from pushkv.core.events import (
    ArrivalSeen,
    Arrived,
    Cancelled,
    Computed,
    ConnectionClosed,
    ConnectionOpened,
    Event,
    MessageReceived,
    Offered,
    Tick,
    WriteClosed,
    WriterGone,
)
from pushkv.core.ids import FOREVER, EngineId, Epoch, Incarnation, Instant, TransferId, Worker
from pushkv.core.messages import Hello, Message, Refused
from pushkv.core.policy import Policy

from .fabric import Fabric, Poster
from .handover import Told, Transfer
from .settings import LinkModel
from .timeline import Entry, Timeline, nanoseconds

__all__ = ["Machines"]

CAPABILITIES = Capabilities("simulated LIBFABRIC", done_means_visible=False)
OPENING_MESSAGES = 3
"""One-way latencies until a new connection can carry messages: TCP, then TLS 1.3."""


def _fits(_ours: Hello, _theirs: Hello) -> Refused | None:
    return None


@define(eq=False)
class _Node:
    name: str
    endpoint: Endpoint
    life: int
    permits: dict[Epoch, Instant] = field(factory=dict)
    arrivals: list[ArrivalSeen] = field(factory=list)
    connections: set[int] = field(factory=set)
    looking: bool = False
    tick_at: int = FOREVER
    tick: Entry | None = None


@define(eq=False)
class Machines:
    """The endpoints of all engines and the connections between them."""

    timeline: Timeline
    fabric: Fabric
    link: LinkModel
    told: Told
    posters: dict[str, Poster]
    policy: Policy
    sent: int = 0
    events: int = 0
    _control: int = field(init=False)
    _numbers: Iterator[int] = field(factory=lambda: count(1))
    _attempts: Iterator[int] = field(factory=count)
    _nodes: dict[str, _Node] = field(factory=dict)
    _ends: dict[int, tuple[_Node, _Node]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self._control = nanoseconds(self.link.control_s)

    # -- what the world asks for

    def arrived(self, transfer: Transfer) -> None:
        """The prefill engine has the request."""
        event = Arrived(TransferId(transfer.name), transfer.name.encode())
        self._happen(self._node(transfer.source), event)

    def computed(self, transfer: Transfer, blocks: tuple[int, ...]) -> None:
        """Its prompt is computed."""
        event = Computed(TransferId(transfer.name), transfer.end, (blocks,), final=True)
        self._happen(self._node(transfer.source), event)

    def offered(self, transfer: Transfer, blocks: tuple[int, ...]) -> None:
        """The decode engine has blocks for it."""
        event = Offered(
            transfer=TransferId(transfer.name),
            attempt=next(self._attempts),
            producers=(ProducerAddress(transfer.source, 1),),
            blocks=(blocks,),
            start=transfer.start,
            end=transfer.end,
            prompt_digest=transfer.name.encode(),
        )
        self._node(transfer.source)
        self._happen(self._node(transfer.target), event)

    def cancelled(self, transfer: Transfer) -> None:
        """Its client has gone, or goes elsewhere."""
        self._happen(self._node(transfer.target), Cancelled(TransferId(transfer.name)))

    def crashed(self, source: str) -> None:
        """A prefill engine is gone, and another life of it is there."""
        node = self._nodes.pop(source, None)
        if node is None:
            return
        if node.tick is not None:
            Timeline.cancel(node.tick)
        for number in sorted(node.connections):
            self._hang_up(node, number)
        self._make(source, node.life + 1)

    def proven(self, source: str, life: int) -> None:
        """Nothing that a past life of it has written can land any more."""
        event = WriterGone(Worker(EngineId(source), Incarnation(life), 0))
        for node in list(self._nodes.values()):
            if node.endpoint.receiving.quarantined:
                self._happen(node, event)

    def life(self, source: str) -> int:
        """The number of the life of this prefill engine."""
        return self._node(source).life

    def may_offer(self, target: str, blocks: int) -> bool:
        """Whether the budget of a decode engine has room for so many blocks."""
        exposed = self._node(target).endpoint.receiving.exposed_blocks
        return exposed + blocks <= self.policy.exposed_blocks

    def messages(self) -> int:
        """Control messages so far."""
        return self.sent

    def quarantined(self) -> int:
        """Blocks that wait for a proof, in all decode engines."""
        return sum(each.endpoint.receiving.quarantined_blocks() for each in self._nodes.values())

    # -- endpoints

    def _node(self, name: str) -> _Node:
        return self._nodes.get(name) or self._make(name, 1)

    def _make(self, name: str, life: int) -> _Node:
        hello = Hello(
            protocol=1,
            nonce=0,
            engine=EngineId(name),
            incarnation=Incarnation(life),
            rank=0,
            model=(),
            layout=(),
            transport="simulated",
            transport_version="1",
            lease=self.policy.lease,
            directory=(),
            memory=b"",
        )
        identity = Identity(hello, b"layout", b"0123456789abcdef")
        endpoint = Endpoint(identity, self.policy, CAPABILITIES, _fits, Instant(0))
        self._nodes[name] = _Node(name, endpoint, life)
        return self._nodes[name]

    def _alive(self, node: _Node) -> bool:
        return self._nodes.get(node.name) is node

    def _happen(self, node: _Node, event: Event) -> None:
        if not self._alive(node):
            return
        self.events += 1
        for effect in node.endpoint.handle(event, Instant(self.timeline.now)):
            self._do(node, effect)
        self._set_tick(node)

    def _set_tick(self, node: _Node) -> None:
        at = node.endpoint.next_deadline()
        if at < node.tick_at:
            if node.tick is not None:
                Timeline.cancel(node.tick)
            node.tick_at = at
            node.tick = self.timeline.at(at, lambda: self._ticked(node))

    def _ticked(self, node: _Node) -> None:
        node.tick, node.tick_at = None, FOREVER
        if node.endpoint.next_deadline() <= self.timeline.now:
            self._happen(node, Tick())
        else:
            self._set_tick(node)

    def _do(self, node: _Node, effect: Effect) -> None:
        match effect:
            case Transmit():
                self._transmit(node, effect.connection, effect.message)
            case PostWrite():
                self._post(node, effect)
            case Dial():
                later = self._control * OPENING_MESSAGES
                self.timeline.after(later, lambda: self._open(node, effect.address))
            case Hangup():
                self._hang_up(node, effect.connection)
                self.timeline.after(0, lambda: self._closed(node, effect.connection))
            case PermitGranted():
                node.permits[effect.epoch] = effect.until
            case PermitEnded():
                node.permits.pop(effect.epoch, None)
            case LookForArrivals():
                node.looking = effect.active
                self._look(node)
            case Delivered():
                self.timeline.after(0, lambda: self.told.delivered(effect.transfer))
            case NotDelivered():
                self.timeline.after(0, lambda: self.told.not_delivered(effect.transfer))
            case BlocksReleased():
                self.timeline.after(0, lambda: self.told.blocks_free(effect.transfer))
            case SourceReleased():
                self.timeline.after(0, lambda: self.told.source_free(effect.transfer))
            case _:
                pass

    # -- connections

    def _open(self, dialer: _Node, address: ProducerAddress) -> None:
        listener = self._node(address.host)
        number = next(self._numbers)
        self._ends[number] = (dialer, listener)
        dialer.connections.add(number)
        listener.connections.add(number)
        self._happen(listener, ConnectionOpened(number, next(self._numbers), None))
        self._happen(dialer, ConnectionOpened(number, next(self._numbers), address))

    def _transmit(self, node: _Node, number: int, message: Message) -> None:
        self.sent += 1
        ends = self._ends.get(number)
        if number not in node.connections or ends is None:
            return
        target = ends[1] if node is ends[0] else ends[0]

        def receive() -> None:
            if number in target.connections:
                self._happen(target, MessageReceived(number, message))

        self.timeline.after(self._control, receive)

    def _hang_up(self, node: _Node, number: int) -> None:
        node.connections.discard(number)
        one, other = self._ends.pop(number, (node, node))
        target = other if node is one else one
        self.timeline.after(self._control, lambda: self._closed(target, number))

    def _closed(self, node: _Node, number: int) -> None:
        node.connections.discard(number)
        self._happen(node, ConnectionClosed(number, None, "closed"))

    # -- writes

    def _post(self, node: _Node, effect: PostWrite) -> None:
        tokens = effect.part.end - effect.part.start
        takes = nanoseconds(self.link.post_s(tokens))
        target = effect.attempt.consumer

        def landed() -> None:
            seen = ArrivalSeen(effect.attempt, effect.part.number, effect.arrival_token)
            consumer = self._node(target)
            consumer.arrivals.append(seen)
            self._look(consumer)
            self._happen(node, WriteClosed(effect.attempt, effect.part.number, "done"))

        def posted() -> None:
            until = node.permits.get(effect.epoch, Instant(0))
            if not rules.may_post(Instant(self.timeline.now), until, CAPABILITIES.write_bound):
                self._happen(node, WriteClosed(effect.attempt, effect.part.number, "refused"))
            elif self._alive(node):
                self.fabric.start(node.name, target, tokens * self.link.token_bytes, landed)

        self.posters[node.name].post(takes, posted)

    def _look(self, node: _Node) -> None:
        if not node.looking or not node.arrivals:
            return
        seen, node.arrivals = node.arrivals, []
        for each in seen:
            self.timeline.after(0, partial(self._happen, node, each))
