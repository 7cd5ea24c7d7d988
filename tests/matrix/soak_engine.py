"""One end of the soak, in a process of its own: every byte is checked, every block is used again.

A block holds one number, which says of which transfer it is and which of its blocks. Blocks that
are free hold another, and must still hold it when they are taken (I1). What is delivered is
compared with what was prefilled (I2), each report comes once (I3), and in the end every block is
free (I4).
"""

from __future__ import annotations

import os
import random
import resource
import threading
import time
from collections import Counter, deque
from multiprocessing.connection import Connection

import numpy as np
from attrs import define, evolve, field
from numpy.typing import NDArray
from tests.runtime.node import QUICK

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    ProducerAddress,
    Report,
    SourceReleased,
)
from pushkv.core.events import Arrived, Cancelled, Computed, EngineEvent, Offered, PrefillAborted
from pushkv.core.ids import EngineId, TransferId, seconds
from pushkv.runtime import Runtime, RuntimeConfig
from pushkv.testing.reference_engine import ReferenceCache
from pushkv.transport import load_transport

__all__ = ["BLOCK_BYTES", "SIZES", "Leg", "consume", "produce"]

BLOCK_TOKENS = 1_024
BLOCK_BYTES = BLOCK_TOKENS * 64
BLOCKS = 1_536
SIZES = ((0.900, 1, 4), (0.990, 5, 32), (0.999, 33, 256), (1.0, 1_024, 1_024))
"""Shares of transfers, and of how many blocks they are: one block to 64 MiB."""
POISON = 0xDBDBDBDBDBDBDBDB
AT_ONCE = 16
DIGEST = b"soak"
SAMPLE_S = 5.0
DRAIN_S = 30.0
POLICY = evolve(
    QUICK,
    lease=seconds(3),
    hold=seconds(5),
    hold_cancelled=seconds(0.5),
    expected=seconds(2),
    waiting=seconds(5),
    transfer=seconds(20),
    attempts=1,
)


@define
class Leg:
    """What a router tells a producer: prefill this, and perhaps give it up."""

    name: str
    number: int
    blocks: int
    aborts: bool


@define(eq=False, slots=False)
class _End:
    """What both ends are made of."""

    name: str
    control: Connection
    problems: list[str] = field(factory=list)
    counts: Counter[str] = field(factory=Counter)

    def __attrs_post_init__(self) -> None:
        self.cache = ReferenceCache(1, BLOCKS, BLOCK_TOKENS)
        self.words: NDArray[np.uint64] = self.cache.bytes.reshape(BLOCKS, -1).view(np.uint64)
        self.words[:] = POISON
        config = RuntimeConfig(EngineId(self.name), self.cache.layout, policy=POLICY)
        self.runtime = Runtime(config, load_transport("nixl", {"death_bound_s": 0.5}))
        self.runtime.start()
        self.sampled_at = 0.0

    def submit(self, event: EngineEvent) -> None:
        self.runtime.bridge.submit(event)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Free blocks, the ones that were freed last; they must be as they were left."""
        if len(self.cache.free) < count:
            return None
        blocks = tuple(self.cache.free.pop() for _ in range(count))
        if not np.all(self.words[list(blocks)] == POISON):
            self.problems.append(f"{self.name}: a byte landed in a block that was free")
        return blocks

    def give_back(self, blocks: tuple[int, ...]) -> None:
        self.words[list(blocks)] = POISON
        self.cache.free.extend(blocks)

    def sample(self) -> None:
        """Every few seconds: what this process holds."""
        now = time.monotonic()
        if now < self.sampled_at + SAMPLE_S:
            return
        self.sampled_at = now
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        self.control.send(
            (
                "sample",
                {
                    "at_s": now,
                    "end": self.name,
                    "pid": os.getpid(),
                    "rss_mib": pages * resource.getpagesize() / 2**20,
                    "threads": threading.active_count(),
                    "native_threads": len(os.listdir("/proc/self/task")),
                    "descriptors": len(os.listdir("/proc/self/fd")),
                    "free_blocks": len(self.cache.free),
                    **self.counts,
                },
            )
        )

    def finish(self) -> None:
        """What must hold in the end; then say so, and end."""
        missing = BLOCKS - len(self.cache.free)
        if missing or len(set(self.cache.free)) != len(self.cache.free):
            self.problems.append(f"{self.name}: {missing} of {BLOCKS} blocks are lost")
        if not np.all(self.words[list(self.cache.free)] == POISON):
            self.problems.append(f"{self.name}: a byte landed in a block that was free")
        if not self.runtime.stop(5.0):
            self.problems.append(f"{self.name}: it did not drain")
        self.sampled_at = 0.0
        self.sample()
        self.control.send(("end", (dict(self.counts), self.problems)))


def _number_of(number: int, count: int) -> NDArray[np.uint64]:
    """What each block of a transfer holds, of shape (count, 1)."""
    return (np.uint64(number << 16) + np.arange(count, dtype=np.uint64))[:, None]


# -- the producer


@define
class _Source:
    leg: Leg
    blocks: tuple[int, ...]


def produce(name: str, control: Connection) -> None:
    """Serve whatever legs come, until told to end."""
    end = _End(name, control)
    control.send(("address", end.runtime.address))
    legs: list[Connection] = []
    waiting: deque[Leg] = deque()
    sources: dict[str, _Source] = {}
    ending: float | None = None
    while ending is None or (sources and time.monotonic() < ending):
        while control.poll():
            what, value = control.recv()
            if what == "legs":
                legs.append(value)
            else:
                ending = time.monotonic() + DRAIN_S
        for pipe in list(legs):
            try:
                while pipe.poll():
                    waiting.append(pipe.recv())
            except (EOFError, OSError):
                legs.remove(pipe)
        while waiting and (blocks := end.take(waiting[0].blocks)) is not None:
            _prefill(end, waiting.popleft(), blocks, sources)
        for report in end.runtime.bridge.take():
            assert isinstance(report, SourceReleased), report
            source = sources.pop(report.transfer, None)
            if source is None:
                end.problems.append(f"{name}: {report} once more")
                continue
            end.counts[f"source_{report.reason or 'served'}"] += 1
            end.give_back(source.blocks)
        end.sample()
        end.runtime.bridge.wait(0.002)
    end.finish()


def _prefill(end: _End, leg: Leg, blocks: tuple[int, ...], sources: dict[str, _Source]) -> None:
    transfer = TransferId(leg.name)
    sources[leg.name] = _Source(leg, blocks)
    end.words[list(blocks)] = _number_of(leg.number, leg.blocks)
    end.submit(Arrived(transfer, DIGEST))
    if leg.aborts:
        end.submit(PrefillAborted(transfer))
    else:
        end.submit(Computed(transfer, leg.blocks * BLOCK_TOKENS, (blocks,), final=True))


# -- the consumer


@define
class _Attempt:
    leg: Leg
    blocks: tuple[int, ...]
    cancel_at: float
    told: bool = False


@define
class _Consumer:
    """Offers, cancels, checks; a share `fault_rate` of its transfers is to go wrong."""

    end: _End
    chooser: random.Random
    fault_rate: float
    address: ProducerAddress | None = None
    legs: Connection | None = None
    attempts: dict[int, _Attempt] = field(factory=dict)
    number: int = 0

    def begin(self) -> bool:
        """Offer blocks for one more transfer; False where there is no room for it."""
        chooser = self.chooser
        share = chooser.random()
        least, most = next((each[1], each[2]) for each in SIZES if share <= each[0])
        count = chooser.randint(least, most)
        blocks = self.end.take(count)
        if blocks is None or self.address is None:
            if blocks is not None:
                self.end.cache.free.extend(blocks)
            return False
        number = self.number = self.number + 1
        leg = Leg(f"{self.end.name}-{os.getpid()}-{number}", number, count, aborts=False)
        cancel_at = float("inf")
        fault = chooser.random() / self.fault_rate
        if fault < 0.4:
            cancel_at = time.monotonic() + chooser.uniform(0, 0.02)
            self.end.counts["to_be_cancelled"] += 1
        elif fault < 0.8:
            leg.aborts = True
            self.end.counts["to_be_aborted"] += 1
        self.attempts[number] = _Attempt(leg, blocks, cancel_at)
        self.end.submit(
            Offered(
                TransferId(leg.name),
                number,
                (self.address,),
                (blocks,),
                0,
                count * BLOCK_TOKENS,
                DIGEST,
            )
        )
        if 0.8 <= fault < 1.0:
            self.end.counts["never_dispatched"] += 1
        elif self.legs is not None:
            try:
                self.legs.send(leg)
            except OSError:
                # What is under way finds out for itself; nothing more is asked of the dead.
                self.end.counts["dispatched_to_the_dead"] += 1
                self.address = self.legs = None
        return True

    def hear(self, report: Report) -> None:
        """One report; each kind once for each attempt, the outcome first."""
        if not isinstance(report, Delivered | NotDelivered | BlocksReleased):
            return
        attempt = self.attempts.get(report.attempt)
        if attempt is None or (attempt.told != isinstance(report, BlocksReleased)):
            self.end.problems.append(f"{self.end.name}: {report} is out of turn")
            return
        if isinstance(report, BlocksReleased):
            del self.attempts[report.attempt]
            self.end.give_back(attempt.blocks)
            return
        attempt.told = True
        if isinstance(report, NotDelivered):
            self.end.counts[f"not_delivered_{report.reason}"] += 1
            return
        self.end.counts["delivered"] += 1
        self.end.counts["delivered_kib"] += attempt.leg.blocks * BLOCK_BYTES >> 10
        wanted = _number_of(attempt.leg.number, attempt.leg.blocks)
        if not np.all(self.end.words[list(attempt.blocks)] == wanted):
            self.end.problems.append(f"{self.end.name}: wrong bytes of {attempt.leg.name}")

    def cancel(self) -> None:
        """Cancel what is due."""
        now = time.monotonic()
        for attempt in self.attempts.values():
            if now >= attempt.cancel_at and not attempt.told:
                attempt.cancel_at = float("inf")
                self.end.submit(Cancelled(TransferId(attempt.leg.name)))


def consume(name: str, control: Connection, seed: int, fault_rate: float) -> None:
    """Have transfers, one after the other and many at once, until told to end."""
    end = _End(name, control)
    mine = _Consumer(end, random.Random(seed), fault_rate)
    control.send(("address", end.runtime.address))
    ending: float | None = None
    while ending is None or (mine.attempts and time.monotonic() < ending):
        while control.poll():
            what, value = control.recv()
            if what == "producer":
                mine.address, mine.legs = value
            else:
                ending = time.monotonic() + DRAIN_S
        for report in end.runtime.bridge.take():
            mine.hear(report)
        mine.cancel()
        while ending is None and len(mine.attempts) < AT_ONCE and mine.begin():
            pass
        end.counts["begun"] = mine.number
        end.sample()
        end.runtime.bridge.wait(0.002)
    end.finish()
