"""Control connections in virtual time, over the model's network: late, cut, or lost at one end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
from attrs import define, field, frozen

from pushkv.core.ids import FOREVER, Duration, Instant
from pushkv.model import network as model
from pushkv.model.faults import Chance, FaultPlan, FaultRule, mix

from .virtual import Agenda

__all__ = ["Host", "VirtualNetwork", "Wire"]

END = b""
"""What is sent last over a stream that is closed in order."""
SPLIT_ONE_IN = 4
"""A frame may come in two pieces, as TCP allows."""

Handler = Callable[[anyio.abc.ByteStream], Any]


class _Stream(anyio.abc.ByteStream):
    """One end of a wire."""

    def __init__(self, wire: Wire, name: str, peer: str) -> None:
        self.wire = wire
        self.name = name
        self.peer = peer
        self.closed: bool = False
        self.broken: bool = False
        self._buffer: deque[bytes] = deque()
        self._ended = False
        self._news = anyio.Event()

    def take(self, data: bytes) -> None:
        """Bytes have come, or the end of them."""
        if data == END:
            self._ended = True
        else:
            self._buffer.append(data)
        self._news.set()

    def break_off(self) -> None:
        """This end learns that the connection is lost."""
        self.broken = True
        self._buffer.clear()
        self._news.set()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Who is at the other end."""
        there = self.wire.ends[self is self.wire.streams[0]]
        return {anyio.abc.SocketAttribute.remote_address: lambda: (there, 1)}

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        """The next bytes, waiting for them."""
        await anyio.lowlevel.checkpoint()
        while not self._buffer:
            self._check()
            if self._ended:
                raise anyio.EndOfStream
            self._news = anyio.Event()
            await self._news.wait()
        self._check()
        data = self._buffer.popleft()
        if len(data) > max_bytes:
            self._buffer.appendleft(data[max_bytes:])
        return data[:max_bytes]

    async def send(self, item: bytes) -> None:
        """Put bytes in flight; never waits for the peer."""
        await anyio.lowlevel.checkpoint()
        self._check()
        self.wire.send(self, bytes(item))

    def _check(self) -> None:
        if self.closed:
            raise anyio.ClosedResourceError
        if self.broken:
            raise anyio.BrokenResourceError

    async def send_eof(self) -> None:
        """Nothing follows."""
        self.wire.send(self, END)

    async def aclose(self) -> None:
        """Close in order: what was sent still arrives, and then the end."""
        if not self.closed:
            self.closed = True
            self._news.set()
            if not self.broken:
                self.wire.send(self, END)
            self.wire.forget_if_over()


@define(eq=False)
class Host:
    """A place of the network: one worker rank's, in all its lives."""

    name: str
    listener: _Listener | None = None


class Wire:
    """One connection; the model says what is in flight, and when it comes."""

    def __init__(self, network: VirtualNetwork, number: int, ends: tuple[str, str]) -> None:
        self._network = network
        self._agenda = network.agenda
        self.number = number
        self.ends = ends
        self.latency_ns: int = network.latency_ns(number)
        self._plan = FaultPlan(mix(network.seed, number), network.rules)
        self._chance = Chance()
        self._due_at = FOREVER
        self._sent = 0
        near, far = f"{number}<", f"{number}>"
        self.streams: tuple[_Stream, _Stream] = (_Stream(self, near, far), _Stream(self, far, near))
        flights = model.connect(model.Network(), near, far, path=ends)
        self._flights = model.connect(flights, far, near, path=(ends[1], ends[0]))
        for cut in sorted(network.cuts & {ends, (ends[1], ends[0])}):
            self._flights, _ = model.apply(self._flights, model.Cut(*cut))

    def send(self, stream: _Stream, data: bytes) -> None:
        """Put `data` in flight from one end, with whatever the plan has in store for it."""
        self._sent += 1
        half = len(data) // 2
        splits = half and mix(self._network.seed, self.number, self._sent) % SPLIT_ONE_IN == 0
        for piece in (data[:half], data[half:]) if splits else (data,):
            due = Instant(self._agenda.now() + self.latency_ns)
            sent = model.Send(stream.name, stream.peer, piece, due)
            before = self._flights.channel(stream.name, stream.peer).ended
            self._flights, self._chance, _ = model.submit(
                self._flights, self._plan, self._chance, sent
            )
            if self._flights.channel(stream.name, stream.peer).ended and not before:
                self._network.lost(self)
        self._plan_delivery()

    def deliver(self) -> None:
        """Everything that is due."""
        self._due_at = FOREVER
        now = self._agenda.now()
        while (step := model.due(self._flights, now)) is not None:
            self._flights, events = model.apply(self._flights, step)
            for event in events:
                assert isinstance(event.payload, bytes)
                near, far = self.streams
                (near if near.name == event.target else far).take(event.payload)
        self._plan_delivery()

    def _plan_delivery(self) -> None:
        due = model.next_due(self._flights)
        if due < self._due_at:
            self._due_at = due
            self._agenda.after(max(due - self._agenda.now(), 0), self.deliver)

    def cut(self, action: model.Cut | model.Heal) -> None:
        """A path is cut or mended."""
        self._flights, _ = model.apply(self._flights, action)
        self._plan_delivery()

    def lose(self, end: int) -> None:
        """One end learns that the connection is lost; nothing it had in flight arrives."""
        stream = self.streams[end]
        if not stream.broken and not stream.closed:
            reset = model.Reset(stream.name, stream.peer)
            self._flights, _ = model.apply(self._flights, reset)
        stream.break_off()
        self.forget_if_over()

    def forget_if_over(self) -> None:
        """A wire that neither end reads any more is gone."""
        if all(stream.closed or stream.broken for stream in self.streams):
            self._network.wires.pop(self.number, None)


class _Listener(anyio.abc.Listener[anyio.abc.ByteStream]):
    def __init__(self, host: Host) -> None:
        self._host = host
        self._waiting: deque[_Stream] = deque()
        self._news = anyio.Event()
        self._closed = False

    def offer(self, stream: _Stream) -> None:
        self._waiting.append(stream)
        self._news.set()

    async def serve(self, handler: Handler, task_group: anyio.abc.TaskGroup | None = None) -> None:
        assert task_group is not None, "who serves brings the tasks"
        while True:
            while self._waiting:
                task_group.start_soon(handler, self._waiting.popleft())
            if self._closed:
                raise anyio.ClosedResourceError
            self._news = anyio.Event()
            await self._news.wait()

    async def aclose(self) -> None:
        self._closed = True
        self._news.set()
        if self._host.listener is self:
            self._host.listener = None


@define(eq=False)
class VirtualNetwork:
    """All control connections of a swarm.

    Attributes:
        rules: Faults of messages: DELAY, and LOSS, which breaks the connection.
        latency_most: Of a message without a fault.
        broken_most: How long after a loss its ends learn of it, at most.
    """

    agenda: Agenda
    seed: int
    rules: tuple[FaultRule, ...]
    latency_most: Duration
    broken_most: Duration
    wires: dict[int, Wire] = field(factory=dict)
    cuts: set[tuple[str, str]] = field(factory=set)
    losses: int = 0
    _hosts: dict[str, Host] = field(factory=dict)
    _count: int = 0

    def at(self, host: str) -> _Place:
        """The network as seen from a host: what its runtime is given."""
        self._hosts.setdefault(host, Host(host))
        return _Place(self, host)

    def latency_ns(self, number: int) -> int:
        """What a wire takes; the n-th connection has the same in each run."""
        return 1 + mix(self.seed, ~number) % self.latency_most

    def cut(self, source: str, target: str) -> None:
        """Nothing gets from one host to the other; connections stay."""
        self.cuts.add((source, target))
        self._tell(model.Cut(source, target))

    def heal(self, source: str, target: str) -> None:
        """Bytes pass again, those that were held up included."""
        self.cuts.discard((source, target))
        self._tell(model.Heal(source, target))

    def _tell(self, action: model.Cut | model.Heal) -> None:
        path = action.source, action.target
        for wire in list(self.wires.values()):
            if path in (wire.ends, wire.ends[::-1]):
                wire.cut(action)

    def lost(self, wire: Wire) -> None:
        """A message was lost, and with it the connection: each end hears of it in its own time."""
        self.losses += 1
        for end in (0, 1):
            within = mix(self.seed, wire.number, end, self.losses) % self.broken_most
            self.agenda.after(within, _Loss(wire, end))

    def kill(self, host: str, heard_within: int) -> None:
        """A process dies: its ends are gone at once, its peers hear of it by and by."""
        self._hosts[host].listener = None
        for wire in list(self.wires.values()):
            for end in (0, 1):
                if wire.ends[end] == host:
                    wire.lose(end)
                    within = mix(self.seed, wire.number, end) % (heard_within + 1)
                    self.agenda.after(within, _Loss(wire, 1 - end))

    async def connect(self, source: str, target: str) -> anyio.abc.ByteStream:
        """A connection from one host to another; over a cut path it takes until that is mended."""
        number = self._count
        self._count += 1
        wait_s = self.latency_ns(number) / 1e9
        await anyio.sleep(wait_s)
        while {(source, target), (target, source)} & self.cuts:  # noqa: ASYNC110 - as SYN is resent
            await anyio.sleep(0.2)
        found = self._hosts.get(target)
        if found is None or found.listener is None:
            raise ConnectionRefusedError(f"nobody listens at {target}")
        wire = Wire(self, number, (source, target))
        self.wires[number] = wire
        found.listener.offer(wire.streams[1])
        return wire.streams[0]

    def listen(self, host: str) -> _Listener:
        """What accepts the connections made to a host."""
        if self._hosts[host].listener is not None:
            raise OSError(f"{host} listens already")
        listener = _Listener(self._hosts[host])
        self._hosts[host].listener = listener
        return listener


@frozen
class _Loss:
    wire: Wire
    end: int

    def __call__(self) -> None:
        self.wire.lose(self.end)


@frozen
class _Place:
    """One host's view; the `Network` of its runtime."""

    network: VirtualNetwork
    host: str

    async def listen(
        self, host: str, port: int
    ) -> tuple[anyio.abc.Listener[anyio.abc.ByteStream], int]:
        """Listen; ports mean nothing here."""
        return self.network.listen(host), port

    async def connect(self, host: str, port: int) -> anyio.abc.ByteStream:
        """Connect to another host."""
        return await self.network.connect(self.host, host)
