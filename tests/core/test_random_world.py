"""Anything may happen in any order; nothing forbidden may follow, and everything ends.

The runs are random and named by their seed. A run that breaks an invariant raises in the step that
breaks it; `Chaos(seed, capabilities)` and the same number of steps repeat it.
"""

from __future__ import annotations

from random import Random

import pytest

from pushkv.core.capabilities import Capabilities
from pushkv.core.events import (
    Cancelled,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
    Proven,
    Readmitted,
    TakenBack,
    Tick,
    WriterGone,
)
from pushkv.core.ids import EngineId, Incarnation, Instant, TransferId, Worker, seconds
from pushkv.core.request import RequestStatus
from pushkv.testing.world import (
    STRONG,
    STRONG_UNBOUNDED,
    WEAK,
    WEAK_UNBOUNDED,
    Node,
    World,
    Write,
)

SEEDS = 10
STEPS = 120
OFFERS_MOST = 12


class Chaos:
    """One random run."""

    def __init__(self, seed: int, capabilities: Capabilities) -> None:
        self.random = Random(seed)
        self.world = world = World(capabilities, auto=False)
        world.auto_retry = self.random.random() < 0.5
        drift = self.random.choice((0, 1_000))
        self.consumers = [
            world.node("d", ppm=drift, offset=self.random.randrange(10**12)),
            world.node("e", ppm=-drift),
        ]
        self.producers = [
            world.node("p0", engine="p", ppm=-drift),
            world.node("p1", engine="p", rank=1, ppm=-drift, offset=self.random.randrange(10**12)),
            world.node("q"),
        ]
        self.dead: list[Worker] = []
        self.names: list[str] = []
        self.lost: set[Write] = set()
        self.actions = [
            (self.begin, 6),
            (self.offer, 2),
            (self.request, 4),
            (self.compute, 6),
            (self.engine_of_producer, 1),
            (self.engine_of_consumer, 3),
            (self.deliver, 30),
            (self.settle, 10),
            (self.time, 6),
            (self.network, 4),
            (self.write, 20),
            (self.last_moment, 6),
            (self.process, 1),
        ]

    def run(self, steps: int) -> None:
        """Random steps, and then peace."""
        actions, weights = zip(*self.actions, strict=True)
        for _ in range(steps):
            self.random.choices(actions, weights)[0]()

    # -- the engines

    def alive(self, nodes: list[Node]) -> list[Node]:
        return [node for node in nodes if node.alive]

    def producers_of(self, name: str) -> list[Node]:
        return [self.producers[2]] if name.startswith("q") else self.producers[:2]

    def begin(self) -> None:
        """An offer of a prompt that is computed already, up to its first WRITE."""
        self.offer()
        self.request()
        self.compute()
        self.world.settle()

    def offer(self) -> None:
        consumers = self.alive(self.consumers)
        if not consumers or sum(len(node.offers) for node in self.consumers) >= OFFERS_MOST:
            return
        name = f"{self.random.choice('pq')}{len(self.names)}"
        if self.names and self.random.random() < 0.3:
            name = self.random.choice(self.names)
        self.names.append(name)
        start = self.random.choice((0, 0, 0, 4, 8))
        self.world.offer(
            self.random.choice(consumers), name, self.producers_of(name), 8, start=start
        )

    def request(self) -> None:
        if not self.names:
            return
        name = self.random.choice(self.names)
        for node in self.alive(self.producers_of(name)):
            if TransferId(name) not in node.sources and self.random.random() < 0.8:
                self.world.request(node, name)

    def compute(self) -> None:
        for node in self.alive(self.producers):
            for transfer in list(node.sources):
                if self.random.random() < 0.5:
                    tokens = self.random.choice((4, 8, 8))
                    self.world.compute(node, transfer, tokens, final=tokens == 8)

    def engine_of_producer(self) -> None:
        kind = self.random.choice((PrefillAborted, PrefillPreempted, PrefillResumed))
        for node in self.alive(self.producers):
            for transfer in list(node.sources):
                # The engine's hook takes a source away only once nothing reads it.
                reads = any(
                    write.effect.attempt.transfer == transfer
                    for write in self.world.writes
                    if write.node is node and not write.closed
                )
                if self.random.random() < 0.3 and not (reads and kind is PrefillPreempted):
                    self.world.happen(node, kind(transfer))

    def engine_of_consumer(self) -> None:
        kind = self.random.choice((Cancelled, Cancelled, TakenBack, Readmitted))
        for node in self.alive(self.consumers):
            for transfer, _ in list(node.offers):
                if self.random.random() < 0.3:
                    self.world.happen(node, kind(transfer))

    # -- network and time

    def deliver(self) -> None:
        ways = [
            (wire, node)
            for wire in self.world.wires.values()
            for node in wire.nodes
            if self.world.deliverable(wire, node)
        ]
        if ways:
            wire, node = self.random.choice(ways)
            self.world.deliver(wire, node, twice=self.random.random() < 0.1)
        else:
            self.world.settle()

    def settle(self) -> None:
        self.world.settle()

    def time(self) -> None:
        span = self.random.choice((0.001, 0.05, 0.3, 1.0, 3.5))
        self.world.advance(seconds(span * self.random.random()), settle=self.random.random() < 0.5)
        for node in self.alive([*self.consumers, *self.producers]):
            if self.random.random() < 0.2:
                self.world.happen(node, Tick())

    def network(self) -> None:
        world = self.world
        nodes = list(world.nodes.values())
        what = self.random.randrange(8)
        if what == 0:
            world.cut(self.random.choice(nodes), self.random.choice(nodes))
        elif what == 1:
            world.part(self.random.choice(nodes), self.random.choice(nodes))
        elif what <= 4:
            world.heal()
        elif world.wires:
            wire = self.random.choice(list(world.wires.values()))
            node = self.random.choice(wire.nodes)
            if what == 5:
                world.reset(wire)
            elif node.alive and wire.open[node.name]:
                world.lose(wire, node)

    def process(self) -> None:
        node = self.random.choice(list(self.world.nodes.values()))
        if node.alive:
            self.dead.append(
                Worker(EngineId(node.engine), Incarnation(node.incarnation), node.rank)
            )
            self.world.crash(node, silently=self.random.random() < 0.5)
            if self.random.random() < 0.5:
                self.world.restart(node)
                self.world.hand_out(node)
        else:
            self.world.restart(node)

    # -- the transport, within what it promises

    def may_land(self, write: Write) -> bool:
        if write.posted_at is None or write.landed or write in self.lost:
            return False
        node, bound = write.node, self.world.capabilities.write_bound
        if bound is None:
            return not self._beyond_the_grace(write)
        return self.world.local(node) - self.world.local(node, write.posted_at) <= bound

    def _beyond_the_grace(self, write: Write) -> bool:
        """Without a bound a new life can only hope that nothing lands after its grace (R13)."""
        attempt = write.effect.attempt
        target = next(node for node in self.consumers if node.engine == attempt.consumer)
        if target.alive and target.incarnation == attempt.consumer_incarnation:
            return False
        ready = target.endpoint.receiving.ready_at
        return target.alive and self.world.local(target) >= ready

    def write(self) -> None:
        world = self.world
        writes = [write for write in world.writes if write not in self.lost]
        if not writes:
            return
        write = self.random.choice(writes)
        if write.posted_at is None:
            if not write.closed and self.random.random() < 0.9:
                world.post(write)
            elif not write.closed:
                world.close(write, "failed")
            return
        what = self.random.randrange(9)
        if what <= 1 and self.may_land(write):
            world.land(write, self.random.choice((None, None, 1)))
        elif what == 3 and write.landed:
            world.arrive(write, self.random.choice((None, None, None, 7)))
        elif what <= 5 and not write.closed and (write.landed or not self.strong):
            world.close(write, "done")
        elif what == 6 and not write.closed and not write.landed:
            self.lost.add(write)
            world.close(write, "failed")
        elif what == 7 and not write.closed and self.random.random() < 0.5:
            world.close(write, "unknown")

    def last_moment(self) -> None:
        """A WRITE is posted, or lands, as late as it may."""
        world = self.world
        bound = world.capabilities.write_bound
        ordered = [write for write in world.ordered() if write.node.alive]
        flying = [write for write in world.writes if self.may_land(write) and write.node.alive]
        if ordered and self.random.random() < 0.5:
            write = self.random.choice(ordered)
            until = write.node.permits.get(write.effect.epoch)
            if until is not None:
                self._wait(write.node, until - (bound or 0))
                if not write.closed:
                    world.post(write)
        elif flying:
            write = self.random.choice(flying)
            assert write.posted_at is not None
            late = self.random.choice((seconds(0.4), seconds(5)))
            self._wait(write.node, world.local(write.node, write.posted_at) + (bound or late))
            if self.may_land(write):
                world.land(write)

    def _wait(self, node: Node, until: int) -> None:
        real = self.world.real(node, Instant(until))
        if self.world.local(node, real) > until:
            real -= 1
        if real > self.world.now:
            self.world.advance(real - self.world.now, settle=self.random.random() < 0.5)

    @property
    def strong(self) -> bool:
        return self.world.capabilities.done_means_visible

    # -- the end

    def peace(self) -> None:
        """Everything works from now on, and time passes."""
        world = self.world
        world.heal()
        world.auto = True
        for write in list(world.writes):
            if self.may_land(write):
                world.land(write)
            if write.landed:
                world.arrive(write)
            else:
                self.lost.add(write)
            if write.posted_at is not None and not write.closed:
                world.close(write, "done" if write.landed else "failed")
        for node in self.alive(self.consumers):
            for transfer, _ in list(node.offers):
                if self.random.random() < 0.5:
                    world.happen(node, Readmitted(transfer))
                self._cancel_preempted(node, transfer)
        world.advance(seconds(2))
        for node in self.alive(self.producers):
            for transfer in list(node.sources):
                world.happen(node, PrefillResumed(transfer))
                world.compute(node, transfer)
        world.advance(seconds(45))
        for node in self.alive(self.producers):
            for transfer in list(node.sources):
                world.compute(node, transfer)
        world.advance(seconds(45))

    def _cancel_preempted(self, node: Node, transfer: TransferId) -> None:
        for state in list(node.endpoint.receiving.requests.states.values()):
            if state.transfer == transfer and state.status is RequestStatus.PREEMPTED:
                self.world.happen(node, Cancelled(transfer))

    def prove(self) -> None:
        """What no time can prove: the dead are dead, and the operator has looked."""
        for node in self.alive([*self.consumers, *self.producers]):
            for worker in self.dead:
                self.world.happen(node, WriterGone(worker))
            for name in self.names:
                self.world.happen(node, Proven(TransferId(name)))
        self.world.advance(seconds(45))

    def check_all_ended(self) -> None:
        for node in self.alive(self.consumers):
            open_ended = {key for key, offer in node.offers.items() if offer.outcome is None}
            assert not open_ended, f"{node.name}: no outcome for {open_ended}"
            held = {key for key, offer in node.offers.items() if not offer.released}
            assert not held, f"{node.name}: {held} never came back"
            assert not node.endpoint.receiving.consumers.states
            assert not node.endpoint.receiving.requests.states
        for node in self.alive(self.producers):
            assert not node.sources, f"{node.name}: {list(node.sources)} still pinned"

    def check_alive(self) -> None:
        """Every live pair delivers."""
        for consumer in self.alive(self.consumers):
            for engine in ("p", "q"):
                name = f"{engine}-{consumer.name}-last"
                producers = self.producers_of(name)
                if len(self.alive(producers)) < len(producers):
                    continue
                number = self.world.offer(consumer, name, producers)
                assert number is not None
                for node in producers:
                    self.world.prefill(node, name)
                self.world.advance(seconds(5))
                assert self.world.delivered(consumer, name, number)


@pytest.mark.parametrize(
    "capabilities",
    [STRONG, WEAK, STRONG_UNBOUNDED, WEAK_UNBOUNDED],
    ids=lambda capabilities: capabilities.name,
)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_world(seed: int, capabilities: Capabilities) -> None:
    chaos = Chaos(seed, capabilities)
    chaos.run(STEPS)
    chaos.peace()
    if capabilities.write_bound is None:
        chaos.prove()
    chaos.check_all_ended()
    chaos.check_alive()
