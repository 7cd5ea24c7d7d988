"""A runtime in its caller's event loop, with no thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from attrs import evolve

from pushkv.core.effects import BlocksReleased, Delivered, NotDelivered, ProducerAddress, Report
from pushkv.core.errors import LocalProtocolError
from pushkv.core.events import Arrived, Computed, Offered
from pushkv.core.ids import EngineId, TransferId
from pushkv.core.machines import StepRecord
from pushkv.core.messages import Reason
from pushkv.runtime import Runtime, RuntimeConfig
from pushkv.testing.reference_engine import ReferenceCache
from pushkv_memory import CAPABILITIES, MemoryFabric, MemoryTransport

from .node import QUICK

T = TransferId("t")
both_backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])


class End:
    """A runtime and its engine's few blocks."""

    def __init__(self, fabric: MemoryFabric, name: str) -> None:
        self.cache = ReferenceCache(layers=2, block_count=4)
        self.steps: list[StepRecord] = []
        config = RuntimeConfig(
            EngineId(name), self.cache.layout, policy=QUICK, observer=self.steps.append
        )
        self.runtime = Runtime(config, MemoryTransport(fabric))
        self.reports: list[Report] = []
        self.news = anyio.Event()
        self.runtime.bridge.on_report(self._ring)

    def _ring(self) -> None:
        self.news.set()

    async def hear(self, *kinds: type[Report]) -> None:
        with anyio.fail_after(10):
            while not all(any(isinstance(each, kind) for each in self.reports) for kind in kinds):
                await self.news.wait()
                self.news = anyio.Event()
                self.reports += self.runtime.bridge.take()

    def offer(self, producer: End) -> None:
        host, port = producer.runtime.address
        address = ProducerAddress(host, port)
        self.runtime.bridge.submit(Offered(T, 0, (address,), ((1, 2),), 0, 32, b"digest"))


def run(backend: str, main: Callable[[], Awaitable[None]]) -> None:
    anyio.run(main, backend=backend)


@both_backends
def test_two_runtimes_share_one_loop_and_no_thread(backend: str) -> None:
    async def main() -> None:
        before = {*threading.enumerate()}
        fabric = MemoryFabric()
        producer, consumer = End(fabric, "P"), End(fabric, "D")
        producer.cache.bytes[:, 0:2] = 7
        async with anyio.create_task_group() as tasks:
            await tasks.start(producer.runtime.run)
            await tasks.start(consumer.runtime.run)
            assert not any(
                each.name.startswith("pushkv-") for each in {*threading.enumerate()} - before
            )
            consumer.offer(producer)
            producer.runtime.bridge.submit(Arrived(T, b"digest"))
            producer.runtime.bridge.submit(Computed(T, 32, ((0, 1),), True))
            await consumer.hear(Delivered, BlocksReleased)
            assert (consumer.cache.bytes[:, 1:3] == 7).all()
            producer.runtime.stop_soon()
            consumer.runtime.stop_soon()
        assert producer.runtime.stop()
        assert consumer.runtime.stop()
        assert {each.machine for each in consumer.steps} == {"consumer", "request", "link"}

    run(backend, main)


@both_backends
def test_a_runtime_that_is_cancelled_leaves_its_engine_no_wait(backend: str) -> None:
    async def main() -> None:
        fabric = MemoryFabric()
        producer, consumer = End(fabric, "P"), End(fabric, "D")
        async with anyio.create_task_group() as tasks:
            await tasks.start(producer.runtime.run)
            await tasks.start(consumer.runtime.run)
            consumer.offer(producer)
            with anyio.fail_after(10):
                while not producer.steps:
                    await anyio.sleep(0.002)
            tasks.cancel_scope.cancel()
        await consumer.hear(NotDelivered)
        assert consumer.reports == [NotDelivered(T, 0, Reason.CLOSED, False)], "and no release"
        assert not consumer.runtime.stop(), "a peer may still write"
        with pytest.raises(LocalProtocolError, match="started once"):
            await consumer.runtime.run()

    run(backend, main)


@both_backends
def test_it_is_started_when_the_restart_grace_is_over(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[Any] = []

    async def main() -> None:
        fabric = MemoryFabric(capabilities=evolve(CAPABILITIES, reaches_successor=True))
        end = End(fabric, "D")
        sleep = anyio.sleep

        async def seen(wait_s: float) -> None:
            slept.append(end.runtime._listens.is_set())
            await sleep(wait_s)

        monkeypatch.setattr(anyio, "sleep", seen)
        async with anyio.create_task_group() as tasks:
            began = end.runtime.config.clock()
            await tasks.start(end.runtime.run)
            assert end.runtime.config.clock() - began > QUICK.lease
            end.runtime.stop_soon()

    run(backend, main)
    assert slept[0], "peers are served meanwhile"
