"""One long prompt beside short ones, over the memory transport in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.abc
from attrs import evolve

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    ProducerAddress,
    Report,
    SourceReleased,
)
from pushkv.core.events import Arrived, Cancelled, Computed, Offered
from pushkv.core.ids import Duration, EngineId, TransferId, Worker, seconds
from pushkv.core.policy import Policy
from pushkv.model.faults import Fault, FaultRule
from pushkv.runtime import Runtime, RuntimeConfig
from pushkv.testing.reference_cache import ReferenceCache
from pushkv.testing.swarm.network import VirtualNetwork
from pushkv.testing.swarm.virtual import Agenda, Backend, Clock, run_virtually
from pushkv_memory import CAPABILITIES, Landed, MemoryFabric, MemoryTransport, Posted

LONG = TransferId("long")
BLOCK_TOKENS = 16
LONG_BLOCKS = 64
BLOCK_BYTES = 2 * BLOCK_TOKENS * 64
BUDGET_BYTES = 8 * BLOCK_BYTES
"""Parts of two blocks."""
TAKES = seconds(0.01)
"""Each WRITE, whatever is under way beside it."""
FABRIC = evolve(CAPABILITIES, write_bound=seconds(1))
POLICY = Policy(lease=seconds(9), write_retries=0)


class End:
    """A runtime, and an engine of the test's own."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.stage = stage
        self.cache = ReferenceCache(layers=2, block_count=2 * LONG_BLOCKS)
        self.reports: list[tuple[float, Report]] = []
        self.news = anyio.Event()
        self.name = name
        config = RuntimeConfig(
            EngineId(name),
            self.cache.layout,
            listen_host=name,
            listen_port=1,
            plaintext=True,
            policy=POLICY,
            write_budget_bytes=BUDGET_BYTES,
            clock=stage.agenda.now,
            network=stage.network.at(name),
        )
        self.worker = Worker(config.engine, config.incarnation, 0)
        self.runtime = Runtime(config, MemoryTransport(stage.fabric))
        self.runtime.bridge.on_report(self._hear)

    def _hear(self) -> None:
        now_s = self.stage.agenda.now() / 1e9
        self.reports += [(now_s, each) for each in self.runtime.bridge.take()]
        self.news.set()

    def offer(self, transfer: str, blocks: range, attempt: int) -> None:
        address = ProducerAddress("p", 1)
        tokens, ids = len(blocks) * BLOCK_TOKENS, (tuple(blocks),)
        name = TransferId(transfer)
        self.runtime.bridge.submit(Offered(name, attempt, (address,), ids, 0, tokens, b"digest"))

    def compute(self, transfer: str, blocks: range) -> None:
        name, tokens = TransferId(transfer), len(blocks) * BLOCK_TOKENS
        self.runtime.bridge.submit(Arrived(name, b"digest"))
        self.runtime.bridge.submit(Computed(name, tokens, (tuple(blocks),), True))

    async def told(self, kind: type[Report], transfer: str) -> float:
        """When a report came, in virtual seconds."""
        while True:
            for at, report in self.reports:
                if isinstance(report, kind) and report.transfer == transfer:
                    return at
            self.news = anyio.Event()
            await self.news.wait()


class Stage:
    """A producer and two consumers; each WRITE lands as a whole, after `TAKES`."""

    def __init__(self, clock: Clock) -> None:
        late = FaultRule(Fault.DELAY, 1_000_000, least=TAKES, most=TAKES)
        self.fabric = MemoryFabric(0, (late,), FABRIC, lambda: round(clock() * 1e9), pieces=1)
        self.agenda = Agenda(clock, self.fabric.advance, self.fabric.next_due, lambda step: step())
        self.network = VirtualNetwork(self.agenda, 1, (), Duration(1_000), seconds(1))
        self.producer, self.d, self.e = (End(self, name) for name in "pde")

    def posted(self, transfer: str) -> int:
        """Bytes of a transfer that were posted so far."""
        return sum(
            entry.length_bytes
            for entry in self.fabric.history
            if isinstance(entry, Posted) and entry.attempt.transfer == transfer
        )

    async def ready(self) -> None:
        """A long prompt to `d` is computed, and waits for its links and turns."""
        self.producer.cache.bytes[:] = 7
        self.d.offer(LONG, range(LONG_BLOCKS), 0)
        self.producer.compute(LONG, range(LONG_BLOCKS))
        while not self.posted(LONG):
            await anyio.sleep(0.001)


def run(story: Callable[[Stage], Awaitable[None]]) -> Stage:
    stages = []

    async def main(clock: Clock) -> None:
        stage = Stage(clock)
        stages.append(stage)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stage.agenda.run)
            for end in (stage.producer, stage.d, stage.e):
                await tasks.start(end.runtime.run)
            with anyio.fail_after(30):
                await stage.ready()
                await story(stage)
            tasks.cancel_scope.cancel()

    run_virtually(Backend.ASYNCIO, 1, main)
    return stages[0]


def test_a_short_transfer_waits_for_a_bounded_number_of_bytes() -> None:
    async def story(stage: Stage) -> None:
        for consumer, name in ((stage.d, "same"), (stage.e, "other")):
            before = stage.posted(LONG)
            consumer.offer(name, range(LONG_BLOCKS, LONG_BLOCKS + 1), 1)
            stage.producer.compute(name, range(LONG_BLOCKS, LONG_BLOCKS + 1))
            await consumer.told(Delivered, name)
            # What was posted when it was ordered, one turn, and what follows while it is written.
            assert stage.posted(LONG) - before <= 3 * BUDGET_BYTES, name
        assert stage.posted(LONG) < LONG_BLOCKS * BLOCK_BYTES
        await stage.d.told(Delivered, LONG)

    stage = run(story)
    assert (stage.d.cache.bytes[:, : LONG_BLOCKS + 1] == 7).all()
    assert (stage.e.cache.bytes[:, LONG_BLOCKS] == 7).all()


def test_nobody_starves_while_short_ones_keep_coming() -> None:
    async def story(stage: Stage) -> None:
        for number in range(40):
            at = LONG_BLOCKS + number % 8
            stage.d.offer(f"short{number}", range(at, at + 1), number + 1)
            stage.producer.compute(f"short{number}", range(at, at + 1))
            await stage.d.told(Delivered, f"short{number}")
        long_at = await stage.d.told(Delivered, LONG)
        # 32 parts, of which at least three are under way at any time.
        assert long_at <= 0.01 * (32 / 3 + 2)

    run(story)


def test_what_waits_is_given_back_at_once_when_it_is_cancelled() -> None:
    async def story(stage: Stage) -> None:
        second = range(LONG_BLOCKS, 2 * LONG_BLOCKS)
        posted = stage.posted(LONG)
        stage.d.offer("waits", second, 1)
        stage.producer.compute("waits", second)
        await anyio.sleep(0.002)
        assert (stage.posted("waits"), stage.posted(LONG)) == (0, posted), "all of it waits"
        began_s = stage.agenda.now() / 1e9
        stage.d.runtime.bridge.submit(Cancelled(TransferId("waits")))
        for end, kind in ((stage.d, BlocksReleased), (stage.d, NotDelivered)):
            assert await end.told(kind, "waits") - began_s < 0.001
        assert stage.posted("waits") == 0
        # What is posted lands; the rest of the long one is withdrawn, too.
        stage.d.runtime.bridge.submit(Cancelled(LONG))
        await stage.d.told(BlocksReleased, LONG)
        assert stage.posted(LONG) <= posted + 2 * BUDGET_BYTES
        await stage.producer.told(SourceReleased, LONG)

    stage = run(story)
    lands = [each for each in stage.fabric.history if isinstance(each, Landed)]
    assert {each.attempt.transfer for each in lands} == {LONG}
