"""Two engines on one fabric: real memory, a virtual clock, and everything they were told."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from attrs import evolve

from pushkv.core.capabilities import Capabilities
from pushkv.core.ids import FOREVER, AttemptId, Duration, EngineId, Incarnation, TransferId, Worker
from pushkv.model.faults import Fault, FaultRule
from pushkv.transport import Arrival, Completion, Permit, Region, Segments, Write
from pushkv_memory import CAPABILITIES, Landed, MemoryFabric, MemoryTransport

STRONG = evolve(CAPABILITIES, write_bound=Duration(1000), death_bound=Duration(300))
WEAK = evolve(STRONG, done_means_visible=False)
REACHING = evolve(STRONG, reaches_successor=True)
SIZE_BYTES = 4096
BLOCK_BYTES = 64


def worker(engine: str, incarnation: int = 1, rank: int = 0) -> Worker:
    return Worker(EngineId(engine), Incarnation(incarnation), rank)


def attempt(number: int = 0) -> AttemptId:
    return AttemptId(EngineId("d"), Incarnation(1), 0, 0, TransferId("t"), number)


def always(fault: Fault, least: int = 0, most: int = 0) -> FaultRule:
    return FaultRule(fault, 1_000_000, least=Duration(least), most=Duration(most))


class Clock:
    def __init__(self) -> None:
        self.now = 10_000

    def __call__(self) -> int:
        return self.now


class Engine:
    """One worker with `SIZE_BYTES` of memory, which outlives it."""

    def __init__(
        self,
        fabric: MemoryFabric,
        me: Worker,
        clock: Callable[[], int],
        memory: ctypes.Array[ctypes.c_char] | None = None,
    ) -> None:
        self.me = me
        self.woken = 0
        self.buffer = ctypes.create_string_buffer(SIZE_BYTES) if memory is None else memory
        self.address = ctypes.addressof(self.buffer)
        self.transport = MemoryTransport(fabric)
        self.transport.start(me, [Region(self.address, SIZE_BYTES)], clock, self._wake)
        self.completions: list[Completion] = []
        self.arrivals: list[Arrival] = []

    def _wake(self) -> None:
        self.woken += 1

    def fill(self, content: bytes) -> None:
        ctypes.memmove(self.address, content, len(content))

    def bytes(self, start: int = 0, stop: int = SIZE_BYTES) -> bytes:
        return self.buffer.raw[start:stop]

    def segments(self, blocks: Iterable[int], length_bytes: int = BLOCK_BYTES) -> Segments:
        rows = [(self.address + block * BLOCK_BYTES, length_bytes) for block in blocks]
        return np.array(rows, dtype=np.uint64).reshape(-1, 2)

    def take(self) -> Sequence[Completion | Arrival]:
        news = self.transport.poll()
        self.completions += [each for each in news if isinstance(each, Completion)]
        self.arrivals += [each for each in news if isinstance(each, Arrival)]
        return news

    @property
    def outcomes(self) -> list[str]:
        self.take()
        return [each.outcome.value for each in self.completions]

    @property
    def noticed(self) -> list[int]:
        self.take()
        return [each.part for each in self.arrivals]


class Bench:
    """Producer `p` and consumer `d`, joined and permitted."""

    def __init__(
        self,
        *faults: FaultRule,
        seed: int = 0,
        capabilities: Capabilities = STRONG,
        pieces: int = 4,
        timeout: int = 500,
    ) -> None:
        self.clock = Clock()
        self.fabric = MemoryFabric(
            seed, faults, capabilities, self.clock, pieces=pieces, timeout=Duration(timeout)
        )
        self.p = Engine(self.fabric, worker("p"), self.clock)
        self.d = Engine(self.fabric, worker("d"), self.clock)
        self.p.fill(bytes(1 + index % 255 for index in range(SIZE_BYTES)))
        self.d.transport.look_for_arrivals(True)
        self.permit = Permit()
        self.permit.until_ns = FOREVER
        self.meet(self.p, self.d)

    def meet(self, writer: Engine, target: Engine) -> None:
        writer.transport.add_peer(target.me, target.transport.memory())

    def write(
        self,
        part: int = 0,
        source: Sequence[int] = (0, 1, 2, 3),
        destination: Sequence[int] = (8, 6, 7, 9),
        *,
        of: AttemptId | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> Write:
        return Write(
            peer=self.d.me,
            attempt=of or attempt(),
            part=part,
            arrival_token=77,
            source=self.p.segments(source),
            destination=self.d.segments(destination),
            permit=self.permit,
            ready=ready,
        )

    def post(self, part: int = 0, **more: object) -> None:
        self.p.transport.post(self.write(part, **more))  # type: ignore[arg-type]

    def advance(self, by: int) -> None:
        self.clock.now += by
        self.fabric.advance()

    def drain(self) -> None:
        while (due := self.fabric.next_due()) != FOREVER:
            self.clock.now = max(self.clock.now, due)
            self.fabric.advance()

    def landed(self) -> list[tuple[int, int, int]]:
        """(part, offset in d's memory, length) of every copy so far."""
        return [
            (entry.part, entry.address - self.d.address, entry.length_bytes)
            for entry in self.fabric.history
            if isinstance(entry, Landed)
        ]

    @property
    def landed_bytes(self) -> int:
        return sum(length for _, _, length in self.landed())

    def whole(self) -> bool:
        """Whether exactly the default WRITE is in place."""
        expected = bytearray(SIZE_BYTES)
        for source, destination in zip((0, 1, 2, 3), (8, 6, 7, 9), strict=True):
            block = self.p.bytes(source * BLOCK_BYTES, (source + 1) * BLOCK_BYTES)
            expected[destination * BLOCK_BYTES : (destination + 1) * BLOCK_BYTES] = block
        return self.d.bytes() == bytes(expected)
