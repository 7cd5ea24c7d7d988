"""What a scenario of real runs is given: engines over real NIXL, and proxies between them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
from attrs import evolve, frozen
from tests.lanes import LANES

from pushkv.core.ids import seconds
from pushkv.core.policy import Policy
from pushkv.testing.channel_faults import ChannelFaults, Seen
from pushkv.testing.transport_faults import TransportFaults
from pushkv.transport import load_transport

from .engine import HandEngine

__all__ = ["Pair", "Rig", "Scenario", "of_attempt", "of_transfer"]

PATIENT = Policy(
    lease=seconds(6),
    resend=seconds(0.05),
    query=seconds(0.1),
    waiting=seconds(30),
    settle=seconds(30),
    expected=seconds(30),
    hold=seconds(30),
    hold_cancelled=seconds(30),
    transfer=seconds(30),
    write_backoff=seconds(0.01),
    retry_backoff=seconds(0.02),
    connect=seconds(2),
    connect_backoff=seconds(0.02),
)
"""Quick to ask again, slow to give up."""

Scenario = Callable[["Rig"], Awaitable[None]]


@frozen
class Pair:
    """A consumer, a producer, and the proxy that the consumer dials."""

    consumer: HandEngine
    faults: ChannelFaults
    producer: HandEngine

    @property
    def writes(self) -> TransportFaults:
        """The producer's transport."""
        return self.producer.transport

    @property
    def arrivals(self) -> TransportFaults:
        """The consumer's transport."""
        return self.consumer.transport

    def offer(self, transfer: str, **more: Any) -> int:
        """Register at the producer, through the proxy."""
        return self.consumer.offer(transfer, self.faults.address, **more)


def of_transfer(transfer: str) -> Callable[[Seen], bool]:
    """Whether a frame is about this transfer."""
    return lambda seen: seen.attempt is not None and seen.attempt.transfer == transfer


def of_attempt(number: int) -> Callable[[Seen], bool]:
    """Whether a frame is about the attempt of this number."""
    return lambda seen: seen.attempt is not None and seen.attempt.attempt == number


class Rig:
    """One scenario's engines; a context that stops them, and then says what was wrong.

    Args:
        folder: For their traces.
        lane: One of `tests.lanes`.
        starting: NIXL agents are made one after the other.
    """

    def __init__(self, folder: Path, lane: str, starting: anyio.Lock) -> None:
        self.folder = folder
        self.lane = lane
        self._starting = starting
        self._stack = AsyncExitStack()
        self._engines: list[HandEngine] = []

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._hear)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for engine in self._engines:
                    tasks.start_soon(engine.stop)
        await self._stack.__aexit__(None, None, None)
        if error is None:
            problems = [each for engine in self._engines for each in engine.problems]
            assert not problems, "\n".join(problems)

    async def _hear(self) -> None:
        while True:
            for engine in self._engines:
                engine.hear()
            await anyio.sleep(0.002)

    async def engine(
        self,
        name: str,
        *,
        bound_s: float | None = None,
        shows_done: bool = True,
        rank: int = 0,
        port: int = 0,
        write_budget_bytes: int = 1 << 20,
        **changes: Any,
    ) -> HandEngine:
        """Start one. `bound_s` and `shows_done` are what its transport promises."""
        options = {**LANES[self.lane], "write_bound_s": bound_s}
        transport = TransportFaults(load_transport("nixl", options), shows_done=shows_done)
        at = len(self._engines)
        trace = self.folder / f"{self.lane}-{name}{at}.ndjson"
        policy = evolve(PATIENT, **changes)
        engine = HandEngine(name, transport, policy, trace, port, rank, write_budget_bytes)
        async with self._starting:
            await engine.start()
        self._engines.append(engine)
        return engine

    async def pair(self, *, buffer_bytes: int = 0, **both: Any) -> Pair:
        """A consumer and a producer, with a proxy before it."""
        producer = await self.engine("P", **both)
        consumer = await self.engine("D", **both)
        faults = ChannelFaults(producer.address, buffer_bytes)
        return Pair(consumer, await self._stack.enter_async_context(faults), producer)
