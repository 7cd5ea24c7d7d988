"""Faults of networks and of resources, as rows of the matrix of reference engines.

Several clients are at different moments when the fault comes, and one comes meanwhile. The answer
is owed while the fault lasts: nobody may have to wait for a network to heal.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import anyio.abc
from attrs import define, field
from tests.lanes import OVER_LIBFABRIC

from pushkv.core.ids import seconds
from pushkv.runtime import Limits
from pushkv.runtime.network import TcpNetwork
from pushkv.testing.channel_faults import Toward

from . import clocks, namespaces
from .clocks import SteppingClock, WallClock
from .namespaces import FAR_D, FAR_P
from .reference import Fault, Run, Stage, restored

__all__ = ["NETWORK_FAULTS", "impossible"]

CUT_S = 1.5
"""Longer than a lease."""
LONG = "\N{SNAKE}" * 480
"""Of a name that makes messages of 2 KB: what the first of 80 requests give rise to, all at once,
is more than TCP takes from its sender before anybody reads, however slow this machine is."""


_WALLS: list[WallClock] = []


@define
class Clients:
    """Requests of one pair: `waiting` has no prefill yet, `both` has both legs, `late` none."""

    run: Run
    asked: dict[str, tuple[str, tuple[int, ...]]] = field(factory=dict)

    def _turn_to(self, moment: str) -> Run:
        run = self.run
        if moment not in self.asked:
            self.asked[moment] = run.stage.transfer()
        run.name, run.prompt = self.asked[moment]
        return run

    def come(self) -> None:
        """Those who are there before the fault."""
        self._turn_to("waiting").consume()
        run = self._turn_to("both")
        run.consume()
        run.produce()

    def go_on(self) -> None:
        """The fault is there: another one comes, and prefill has time for who waited."""
        run = self._turn_to("late")
        run.consume()
        run.produce()
        self._turn_to("waiting").produce()

    def leave(self) -> None:
        """Everybody has an answer."""
        for moment in self.asked:
            self._turn_to(moment).result()


@contextmanager
def _blocks_given_out(run: Run) -> Iterator[None]:
    """Every block that is free at the decode engine is in use meanwhile: nothing may land there."""
    node, producer = run.stage.node(run.decoder), run.stage.node(run.producer)
    node.call("give_out_blocks")
    yield
    deadline = time.monotonic() + 5
    while producer.call("open_writes") and time.monotonic() < deadline:
        time.sleep(0.02)
    changed = node.call("take_blocks_back")
    run.must(not changed, f"{changed} bytes landed in blocks that were given out again")


# -- the control channel


def channel(
    fault: Callable[[Stage], None], answered_first: bool = True
) -> Callable[[Stage, float], Run]:
    """Something happens to a channel that leads through a proxy, which is then healed."""

    def row(stage: Stage, delay_s: float) -> Run:
        detour = stage.detour("P")
        run = Run(stage, via=detour.address)
        clients = Clients(run)
        clients.come()
        time.sleep(delay_s)
        fault(stage)
        clients.go_on()
        if answered_first:
            clients.leave()
            with _blocks_given_out(run):
                detour.heal()
        else:
            time.sleep(CUT_S)
            detour.heal()
            clients.leave()
        return run

    return row


def _cut(stage: Stage) -> None:
    detour = stage.detour("P")
    detour.faults.refuses = True
    detour.cut()


def _cut_at(toward: Toward, stage: Stage) -> None:
    detour = stage.detour("P")
    detour.faults.deaf = True
    detour.cut(toward)


def _silent(*towards: Toward) -> Callable[[Stage], None]:
    return lambda stage: stage.detour("P").stop(*towards)


def slow_channel(stage: Stage, delay_s: float) -> Run:
    """Every message takes a tenth of a second or more; everything is delivered all the same."""
    detour = stage.detour("P")
    run = Run(stage, via=detour.address)
    run.consume()
    run.produce()
    run.result()  # over a link that is up: HELLO takes longer than connecting may
    run.answers.clear()
    run.delivered = 0
    clients = Clients(run)
    detour.faults.bytes_per_s.update(dict.fromkeys(Toward, 4_000.0))
    clients.come()
    time.sleep(delay_s)
    clients.go_on()
    clients.leave()
    detour.heal()
    run.must(run.delivered == len(run.answers), "not everything was delivered")
    return run


class NarrowNetwork(TcpNetwork):
    """TCP whose sockets keep little of what their peer does not read."""

    async def listen(
        self, host: str, port: int
    ) -> tuple[anyio.abc.Listener[anyio.abc.ByteStream], int]:
        """Listen; connections inherit."""
        listener, port = await super().listen(host, port)
        _narrow(listener)
        return listener, port

    async def connect(self, host: str, port: int) -> anyio.abc.ByteStream:
        """Connect."""
        stream = await super().connect(host, port)
        _narrow(stream)
        return stream


def _narrow(end: anyio.TypedAttributeProvider) -> None:
    raw = end.extra(anyio.abc.SocketAttribute.raw_socket)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)


def full(silent: Toward) -> Fault:
    """One end reads nothing while the other has much to say, until that hangs up on it."""
    producer, decoder = "P narrow", "D narrow"
    speaker = decoder if silent is Toward.PRODUCER else producer
    options = {
        "network": NarrowNetwork(),
        "limits": Limits(queued_bytes_most=8_192),
        "changes": {"lease": seconds(5)},
    }

    def row(stage: Stage, delay_s: float) -> Run:
        for name in (producer, decoder):
            stage.special[name] = lambda _: dict(options)
        stage.node(producer)
        # Only the proxy's accepted sockets know of it before they tell their window: in the other
        # direction TCP would drop what it promised to take, acknowledgements included.
        detour = stage.detour(producer, 4_096 if silent is Toward.PRODUCER else 0)
        run = Run(stage, producer, decoder, via=detour.address)
        run.must(restored(run), "the two did not come together before")
        before = stage.node(speaker).call("counters").get("channel_full", 0)
        asked = []
        for _ in range(80):
            transfer, prompt = stage.transfer()
            asked.append((transfer + LONG, prompt[:12]))
        detour.faults.deaf = True
        detour.stop(silent)
        for run.name, run.prompt in asked:
            run.consume()
        time.sleep(delay_s)
        for run.name, run.prompt in asked:
            run.result()
        detour.heal()
        detour.cut()
        after = stage.node(speaker).call("counters").get("channel_full", 0)
        run.must(after > before, "the channel never was full")
        return run

    return row


# -- two hosts


def between_hosts(
    fault: Callable[[Stage], None], *, lasts: bool = True, bits_per_s: int = 8_000_000
) -> Fault:
    """Something happens to the network between two hosts while a WRITE is under way."""

    def row(stage: Stage, delay_s: float) -> Run:
        namespaces.far_apart(stage)
        run = Run(stage, FAR_P, FAR_D)
        namespaces.slow(stage, bits_per_s)
        clients = Clients(run)
        clients.come()
        producer, (early, _) = stage.node(FAR_P), clients.asked["both"]
        deadline = time.monotonic() + 2
        while not producer.call("progress", early)[0] and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(delay_s / 2)
        if stage.lane != "default":
            arrived = stage.node(FAR_D).call("is_delivered", early)
            run.must(not arrived, "no bytes were under way")
        if stage.lane == "tcp":
            run.must(producer.call("open_writes"), "no WRITE was under way")
        fault(stage)
        clients.go_on()
        clients.leave()
        if lasts:
            with _blocks_given_out(run):
                time.sleep(CUT_S / 2)
                namespaces.heal(stage)
        else:
            namespaces.heal(stage)
            run.must(run.delivered == len(run.answers), "not everything was delivered")
        return run

    return row


# -- descriptors


def out_of_descriptors(victim: str) -> Fault:
    """An engine has none left, or a few: what it has goes on, and what is new comes later."""

    def row(stage: Stage, delay_s: float) -> Run:
        run = Run(stage)
        run.consume()
        run.produce()
        run.result()
        if "E" in stage.nodes:
            stage.lose("E")  # who comes is to be new to both
        newcomer, other = ("E", "P") if victim == "P" else ("D", "Q")
        stage.node(newcomer)
        stage.node(other)
        if victim == "D" and "Q" in stage.nodes:
            stage.lose("Q")
            stage.node("Q")
        node = stage.node(victim)
        node.call("use_up_descriptors", int(delay_s * 200))
        for decoder, producer in (("D", "P"), (newcomer, other), ("D", "P")):
            run.name, run.prompt = stage.transfer()
            run.consume(decoder, producer)
            run.produce(producer)
            run.result(decoder)
        node.call("give_descriptors_back")
        again = Run(stage, other, newcomer) if victim == "D" else Run(stage, "P", "E")
        run.must(restored(again), f"{newcomer} and {other} did not come together afterwards")
        return run

    return row


def _another(run: Run) -> None:
    """One more transfer, of a short prompt, to its end."""
    run.name, prompt = run.stage.transfer()
    run.prompt = prompt[:20]
    run.consume()
    run.produce()
    run.result()


def reconnects(count: int) -> Fault:
    """The channel is cut again and again, and a transfer after each: descriptors stay flat."""

    def row(stage: Stage, delay_s: float) -> Run:
        names = ("P often", "D often")
        for name in names:
            stage.special[name] = lambda _: {"options": {"connections_most": 16}}
        detour = stage.detour(names[0])
        run = Run(stage, *names, via=detour.address)
        held: list[list[int]] = []
        for at in range(count):
            _another(run)
            detour.cut()
            if at >= count // 2:
                held.append([stage.node(name).call("descriptors") for name in names])
        for name, of_node in zip(names, zip(*held, strict=True), strict=True):
            quarter = len(of_node) // 2
            early, late = max(of_node[:quarter]), max(of_node[quarter:])
            run.must(late <= early + 4, f"{name}: {early} descriptors, then {late}")
        run.must(run.delivered > count // 2, f"only {run.delivered} were delivered")
        return run

    return row


def lives(count: int, victim: str) -> Fault:
    """An engine dies and comes back again and again, each life a peer that NIXL has not known.

    Over LIBFABRIC an agent has room for 255 in its own life. Here it has room for two, and other
    agents must take its place: to write, where the decode engine dies, and to be written to.
    """

    def row(stage: Stage, delay_s: float) -> Run:
        names = ("P of small agents", "D of small agents")
        for name in names:
            stage.special[name] = lambda _: {"options": {"connections_most": 2}}
        run = Run(stage, *names)
        dying, healthy = names if victim == "P" else names[::-1]
        writing, written_to = stage.node(healthy).call("agents")
        for _ in range(count):
            _another(run)
            stage.lose(dying)
            stage.node(dying)
        # A life that takes long to start may cost an attempt, with patience this short.
        run.must(run.delivered >= count - 1, f"only {run.delivered} were delivered")
        now_writing, now_written_to = stage.node(healthy).call("agents")
        if victim == "D":
            run.must(now_writing > writing + 1, "the agent that writes was not replaced")
        elif stage.lane == OVER_LIBFABRIC:
            run.must(now_written_to > written_to, "nobody else is written to")
        return run

    return row


# -- clocks


def wall_clock(stage: Stage, delay_s: float) -> Run:
    """The wall clock of both ends jumps by an hour, ahead and then back: nobody looks at it."""
    names = ("P by the wall clock", "D by the wall clock")
    if names[0] not in stage.special:
        clock = WallClock()
        stage.kept.callback(clock.close)
        for name in names:
            stage.special[name] = lambda _: {"environment": clock.environment}
        _WALLS.append(clock)
    clock = _WALLS[-1]
    run = Run(stage, *names)
    for step in (3_600, -3_600, 0):
        clients = Clients(run)
        clients.come()
        time.sleep(delay_s)
        clock.set(step)
        clients.go_on()
        clients.leave()
    run.must(run.delivered == len(run.answers), "not everything was delivered")
    return run


def clock_ahead(victim: str) -> Fault:
    """One end's monotonic clock jumps by more than anything lasts, as no clock should."""

    def row(stage: Stage, delay_s: float) -> Run:
        name = f"{victim} with a clock of its own"
        stage.special[name] = lambda _: {"clock": SteppingClock()}
        run = Run(stage, name, "D") if victim == "P" else Run(stage, "P", name)
        clients = Clients(run)
        clients.come()
        time.sleep(delay_s)
        stage.node(name).call("step_clock", seconds(60))
        clients.go_on()
        clients.leave()
        return run

    return row


def _towards(*names: str) -> Callable[[Stage], None]:
    return lambda stage: namespaces.cut(stage, *names)


_HOSTS: dict[str, Fault] = {
    "network cut towards P, mid-WRITE": between_hosts(_towards(FAR_P)),
    "network cut towards D, mid-WRITE": between_hosts(_towards(FAR_D)),
    "network cut both ways, mid-WRITE": between_hosts(_towards(FAR_P, FAR_D)),
    "network device down, mid-WRITE": between_hosts(partial(namespaces.down, name=FAR_P)),
    "slow network": between_hosts(lambda stage: None, lasts=False),
}
_WALL = "wall clock steps, ahead and back"

NETWORK_FAULTS: dict[str, Fault] = {
    "channel cut at both ends": channel(_cut),
    "channel cut at D, and P does not hear of it": channel(partial(_cut_at, Toward.CONSUMER)),
    "channel cut at P, and D does not hear of it": channel(partial(_cut_at, Toward.PRODUCER)),
    "channel silent towards P": channel(_silent(Toward.PRODUCER)),
    "channel silent towards D": channel(_silent(Toward.CONSUMER)),
    "channel silent both ways": channel(_silent(*Toward)),
    "channel silent for a while": channel(_silent(*Toward), answered_first=False),
    "slow channel": slow_channel,
    "full channel towards P": full(Toward.PRODUCER),
    "full channel towards D": full(Toward.CONSUMER),
    **_HOSTS,
    "P out of descriptors": out_of_descriptors("P"),
    "D out of descriptors": out_of_descriptors("D"),
    "100 reconnects": reconnects(100),
    "6 lives of P, and agents with room for 2": lives(6, "P"),
    "6 lives of D, and agents with room for 2": lives(6, "D"),
    _WALL: wall_clock,
    "P's clock jumps ahead": clock_ahead("P"),
    "D's clock jumps ahead": clock_ahead("D"),
}


def impossible(fault: str) -> str:
    """Why this machine cannot show that fault; "" where it can."""
    if fault in _HOSTS:
        return namespaces.impossible()
    return clocks.impossible() if fault == _WALL else ""
