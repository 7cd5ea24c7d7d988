"""From "prefill is over" to "decode may run", beside a bare NIXL loop and beside memcpy.

    python bench/hand_over.py [--rounds 40] [--json FILE]

Two processes, over whatever fabric UCX chooses between them. pushkv is all of it: the time goes
from the moment the producer's engine says that a prefill is over, through block map, WRITE, and
COMPLETE over the control channel, to the moment the consumer's engine holds DELIVERED. The blocks
were registered before, as they are when prefill takes its time.

The bare loop is NIXL and nothing else, on the same memory: one request, posted, then its state
asked for without a pause until it is done, while the consumer asks for notifications without a
pause. Its descriptors are ready before its time begins, and are those that pushkv WRITEs, or one
per block. Its progress thread is un-spun, as pushkv's is. The bytes of the first round of each are
compared.

Both take turns, round by round. Medians. Bars: latency of one block of 64 KiB at most 1.5 times;
bandwidth, of eight transfers of 64 MiB in scattered blocks of 64 KiB whose prefills end together,
at least 0.95 times; 32 MiB in blocks of 4 KiB, in the runs that an allocator gives, at least 2
times as fast as one descriptor per block. One transfer of 64 MiB alone is reported, and memcpy of
as much within a process. So is where pushkv's time goes, stage by stage.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from attrs import evolve, frozen

from pushkv.block_map import block_map
from pushkv.core.effects import Delivered, NotDelivered, PostWrite, ProducerAddress
from pushkv.core.events import Arrived, Computed, Offered, WriteDone
from pushkv.core.ids import EngineId, TransferId
from pushkv.core.machines import StepRecord
from pushkv.core.messages import Complete
from pushkv.core.policy import Policy
from pushkv.layout import CacheGroup, CacheLayout, CacheRegion
from pushkv.runtime import Runtime, RuntimeConfig
from pushkv.transport import load_transport

MEMORY_BYTES = 512 << 20
PERIOD = 1_000_003  # a prime, so that no two blocks are alike
WAIT_S = 60.0
REGISTER_S = 0.05
"""REGISTER crosses the control channel in less; then the hand-over is what is measured."""
PROGRESS_DELAY_US = 1_000
Moves = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Source and destination blocks of each transfer."""
STAGES = ("to the order", "WRITE", "COMPLETE crosses", "to the engine")
"""Computed to PostWrite; to WriteDone; to COMPLETE at the consumer; to DELIVERED at its engine."""


@frozen
class Case:
    """What is handed over.

    Attributes:
        blocks: How many.
        block_bytes: Bytes of each.
        run: Blocks that adjoin at both ends, at most; 1 for blocks scattered one by one.
        per_block: Whether the bare loop has a descriptor per block, not those of pushkv.
        transfers: So many at once, of which each has `blocks`; the bare loop posts them in turn.
    """

    name: str
    blocks: int
    block_bytes: int
    run: int = 1
    per_block: bool = False
    transfers: int = 1


CASES = (
    Case("latency", 1, 64 << 10),
    Case("1 MiB", 16, 64 << 10),
    Case("64 MiB", 1024, 64 << 10),
    Case("bandwidth", 1024, 64 << 10, transfers=8),
    Case("4 KiB in runs", 8192, 4 << 10, run=16, per_block=True),
    Case("4 KiB apart", 8192, 4 << 10, per_block=True),
)


class Bare:
    """A NIXL agent of its own over the same memory, and the loops that use it."""

    def __init__(self, name: str, memory: np.ndarray) -> None:
        from pushkv_nixl import _library

        bindings = self.bindings = _library.load_library().bindings
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.syncMode = bindings.NIXL_THREAD_SYNC_RW
        config.pthrDelay = PROGRESS_DELAY_US
        self.agent = bindings.nixlAgent(name, config)
        options = {"engine_config": "USE_MT_MUTEX=y"}  # as pushkv has it, for the same reason
        self.backends = [self.agent.createBackend("UCX", options)]
        row = np.array([[memory.ctypes.data, len(memory), 0]], np.uint64)
        self.agent.registerMem(bindings.nixlRegDList(bindings.DRAM_SEG, row), self.backends)
        self.peer = ""

    def load(self, metadata: bytes) -> None:
        """Learn the peer."""
        self.peer = bytes(self.agent.loadRemoteMD(metadata)).decode()

    def write(self, source: np.ndarray, destination: np.ndarray) -> int:
        """WRITE, and return when that began."""
        bindings, agent = self.bindings, self.agent
        began = time.monotonic_ns()
        local = bindings.nixlXferDList(bindings.DRAM_SEG, source)
        remote = bindings.nixlXferDList(bindings.DRAM_SEG, destination)
        handle = agent.createXferReq(
            bindings.NIXL_WRITE, local, remote, self.peer, b"done", self.backends
        )
        status = agent.postXferReq(handle)
        while status != bindings.NIXL_SUCCESS:
            status = agent.getXferStatus(handle)
        agent.releaseXferReq(handle)
        return began

    def arrive(self, count: int) -> int:
        """When so many notifications are here."""
        until = time.monotonic() + WAIT_S
        while count > 0:
            for notices in self.agent.getNotifs({}, self.backends).values():
                count -= len(notices)
            assert time.monotonic() < until, "no notification came"
        return time.monotonic_ns()


class End:
    """What one process does; methods are called over a pipe."""

    def __init__(self, name: str, block_bytes: int) -> None:
        self.memory = np.zeros(MEMORY_BYTES, np.uint8)
        region = CacheRegion(self.memory.ctypes.data, block_bytes, MEMORY_BYTES // block_bytes)
        self.layout = CacheLayout((CacheGroup(1, (region,)),), "uint8", "NHD")
        # No part of this is about time running out, on a machine that may be busy.
        policy = evolve(Policy(), exposed_blocks=1 << 30)
        config = RuntimeConfig(EngineId(name), self.layout, policy=policy, observer=self._mark)
        self.runtime = Runtime(config, load_transport("nixl", {}))
        self.runtime.start()
        self.bare = Bare(f"bare-{name}", self.memory)
        self.attempts = 0
        self.marks: list[int] = []

    def _mark(self, record: StepRecord) -> None:
        """In the runtime's thread: when the steps happened that end a stage."""
        if isinstance(record.event, WriteDone | Complete) or any(
            isinstance(effect, PostWrite) for effect in record.effects
        ):
            self.marks.append(time.monotonic_ns())

    def take_marks(self) -> list[int]:
        """Those of the last hand-over; of several WRITEs, the last one's end."""
        taken, self.marks = self.marks, []
        return [taken[0], *taken[1:][-1:]] if taken else []

    def facts(self) -> tuple[tuple[str, int], CacheLayout, bytes]:
        """Address of the control channel, layout, the bare agent's metadata."""
        return self.runtime.address, self.layout, bytes(self.bare.agent.getLocalMD())

    def load(self, metadata: bytes) -> None:
        """Learn the bare peer."""
        self.bare.load(metadata)

    def fill(self) -> None:
        """Bytes that are alike nowhere."""
        self.memory[:] = np.resize(content(), len(self.memory))

    def clear(self) -> None:
        """Nothing left of what was written."""
        self.memory[:] = 0

    # -- pushkv

    def arrived(self, transfer: str) -> None:
        """The producer's engine has the request."""
        self.runtime.bridge.submit(Arrived(TransferId(transfer), b"prompt"))

    def offer(self, transfer: str, address: tuple[str, int], blocks: tuple[int, ...]) -> None:
        """The consumer's engine offers blocks."""
        producer = ProducerAddress(*address)
        number, self.attempts = self.attempts, self.attempts + 1
        self.runtime.bridge.submit(
            Offered(TransferId(transfer), number, (producer,), (blocks,), 0, len(blocks), b"prompt")
        )

    def computed(self, sources: dict[str, tuple[int, ...]]) -> int:
        """The prefills are over; when the engine said so."""
        began = time.monotonic_ns()
        for transfer, blocks in sources.items():
            event = Computed(TransferId(transfer), len(blocks), (blocks,), True)
            self.runtime.bridge.submit(event)
        return began

    def delivered(self, transfers: set[str]) -> int:
        """When the consumer's engine holds DELIVERED of all of them."""
        bridge = self.runtime.bridge
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            bridge.wait(1.0)
            at = time.monotonic_ns()
            for report in bridge.take():
                assert not isinstance(report, NotDelivered), report
                if isinstance(report, Delivered):
                    transfers.discard(report.transfer)
            if not transfers:
                return at
        raise TimeoutError(transfers)

    # -- the bare loop

    def descriptors(self, peer: CacheLayout, moves: Moves, apart: bool) -> int:
        """Make the descriptors of each WRITE ready; returns their number."""
        self.ready = []
        for source, destination in moves:
            if apart:
                size = self.layout.groups[0].regions[0].block_bytes
                bases = (self.memory.ctypes.data, peer.groups[0].regions[0].address)
                pair = [
                    np.array([[base + number * size, size] for number in blocks], np.uint64)
                    for base, blocks in zip(bases, (source, destination), strict=True)
                ]
            else:
                count = len(source)
                pair = list(block_map(self.layout, peer, (source,), 0, (destination,), 0, 0, count))
            self.ready.append([np.pad(each, ((0, 0), (0, 1))) for each in pair])
        return sum(len(source) for source, _ in self.ready)

    def write(self) -> int:
        """WRITE what is ready, one after the other; when the first began."""
        return min([self.bare.write(*each) for each in self.ready])

    def arrive(self, count: int) -> int:
        """When so many notifications are here."""
        return self.bare.arrive(count)

    # -- both

    def holds(self, source: tuple[int, ...], destination: tuple[int, ...]) -> bool:
        """Whether each block has the bytes of its source, and no other has any."""
        size = self.layout.groups[0].regions[0].block_bytes
        whole = np.resize(content(), MEMORY_BYTES).reshape(-1, size)
        mine = self.memory.reshape(-1, size)
        fine = bool((mine[list(destination)] == whole[list(source)]).all())
        others = np.setdiff1d(np.arange(len(mine)), np.array(destination))
        return fine and not mine[others].any()

    def memcpy(self, length_bytes: int) -> int:
        """Nanoseconds of a copy between the halves of the memory."""
        began = time.monotonic_ns()
        half = MEMORY_BYTES // 2
        np.copyto(self.memory[half : half + length_bytes], self.memory[:length_bytes])
        return time.monotonic_ns() - began

    def close(self) -> None:
        """End."""
        self.runtime.stop()


def content() -> np.ndarray:
    """What the producer's memory repeats; no byte is zero."""
    return np.random.default_rng(1).integers(1, 256, PERIOD, np.uint8)


def serve(connection: Connection, name: str, block_bytes: int) -> None:
    """A process's life."""
    end = End(name, block_bytes)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            end.close()
            return
        connection.send(getattr(end, method)(*arguments))


class Remote:
    """An `End` in a process of its own."""

    def __init__(self, name: str, block_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, block_bytes), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, method: str, *arguments: object) -> None:
        """Call without waiting."""
        self.connection.send((method, arguments))

    def end(self):
        """The answer of the last `begin`."""
        assert self.connection.poll(WAIT_S), "a process does not answer"
        return self.connection.recv()

    def call(self, method: str, *arguments: object):
        """Call and wait."""
        self.begin(method, *arguments)
        return self.end()

    def stop(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Pair:
    """A producer and a consumer with blocks of one size."""

    def __init__(self, block_bytes: int) -> None:
        self.producer, self.consumer = Remote("p", block_bytes), Remote("d", block_bytes)
        self.address, _, metadata = self.producer.call("facts")
        _, self.layout, theirs = self.consumer.call("facts")
        self.producer.call("load", theirs)
        self.consumer.call("load", metadata)
        self.producer.call("fill")
        self.transfers = 0
        self.stages: list[list[float]] = []

    def pushkv(self, moves: Moves) -> int:
        """Nanoseconds of one hand-over, or of several at once."""
        sources = {}
        for source, destination in moves:
            self.transfers += 1
            transfer = f"t-{self.transfers}"
            sources[transfer] = source
            self.producer.call("arrived", transfer)
            self.consumer.call("offer", transfer, self.address, destination)
        time.sleep(REGISTER_S)
        self.consumer.begin("delivered", set(sources))
        began = self.producer.call("computed", sources)
        delivered = self.consumer.end()
        marks = [*self.producer.call("take_marks"), *self.consumer.call("take_marks")]
        if len(moves) == 1:
            assert len(marks) == len(STAGES) - 1, marks
            ends = [began, *marks, delivered]
            self.stages.append([(b - a) / 1e6 for a, b in pairwise(ends)])
        return int(delivered - began)

    def bare(self, moves: Moves) -> int:
        """Nanoseconds of as many bare WRITEs."""
        self.consumer.begin("arrive", len(moves))
        began = self.producer.call("write")
        return int(self.consumer.end() - began)

    def measure(self, case: Case, rounds: int) -> dict[str, object]:
        """Both, in turns; after a first round whose bytes are compared."""
        moves = tuple(zip(scatter(case, 1), scatter(case, 2), strict=True))
        source, destination = (sum(each, ()) for each in zip(*moves, strict=True))
        apart = self.producer.call("descriptors", self.layout, moves, case.per_block)
        times: dict[str, list[float]] = {"pushkv": [], "bare": []}
        for index in range(-2, rounds):
            for name in ("pushkv", "bare") if index % 2 else ("bare", "pushkv"):
                if index == -2:
                    self.consumer.call("clear")
                took = self.pushkv(moves) if name == "pushkv" else self.bare(moves)
                if index < 0:
                    self.stages.clear()
                if index == -2:
                    same = self.consumer.call("holds", source, destination)
                    assert same, f"{case.name}: {name} wrote other bytes"
                if index >= 0:
                    times[name].append(took / 1e6)
        p50 = {name: statistics.median(found) for name, found in times.items()}
        return {
            "bytes": case.transfers * case.blocks * case.block_bytes,
            "bare_descriptors": apart,
            "p50_ms": p50,
            "p95_ms": {name: float(np.percentile(found, 95)) for name, found in times.items()},
            "ratio": p50["pushkv"] / p50["bare"],
            "stages_p50_ms": {
                name: statistics.median(found)
                for name, found in zip(STAGES, zip(*self.stages, strict=True), strict=False)
            },
            "times_ms": times,
        }

    def stop(self) -> None:
        """End both."""
        self.producer.stop()
        self.consumer.stop()


def scatter(case: Case, seed: int) -> list[tuple[int, ...]]:
    """Block ids of each transfer: runs of `case.run` in a random order, at random places."""
    random = np.random.default_rng(seed)
    runs = random.permutation(MEMORY_BYTES // case.block_bytes // case.run)
    first = runs[: -(-case.transfers * case.blocks // case.run)] * case.run
    found = (first[:, None] + np.arange(case.run)).reshape(-1)
    return [
        tuple(found[at * case.blocks : (at + 1) * case.blocks].tolist())
        for at in range(case.transfers)
    ]


def judge(cases: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """The bars: pushkv's time over the bare loop's."""
    found: dict[str, dict[str, object]] = {}
    for name, case, least, most in (
        ("latency, times the bare loop's", "latency", None, 1.5),
        ("bandwidth, times the bare loop's", "bandwidth", 0.95, None),
        ("4 KiB in runs, times as fast as one descriptor a block", "4 KiB in runs", 2.0, None),
    ):
        if case not in cases:
            continue
        ratio = cases[case]["ratio"]
        assert isinstance(ratio, float)
        value = ratio if most is not None else 1 / ratio
        met = value <= most if most is not None else least is not None and value >= least
        found[name] = {"value": value, "least": least, "most": most, "met": met}
    return found


def measure(rounds: int, chosen: tuple[Case, ...]) -> dict[str, object]:
    """Some cases, a pair of processes for each size of block."""
    cases: dict[str, dict[str, object]] = {}
    copies: list[float] = []
    for block_bytes in sorted({case.block_bytes for case in chosen}, reverse=True):
        pair = Pair(block_bytes)
        try:
            for case in chosen:
                if case.block_bytes == block_bytes:
                    cases[case.name] = pair.measure(case, rounds)
            copies += [pair.consumer.call("memcpy", 64 << 20) / 1e6 for _ in range(5)]
        finally:
            pair.stop()
    return {
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "cases": cases,
        "memcpy_64_mib_ms": statistics.median(copies),
        "bars": judge(cases),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    names = [case.name for case in CASES]
    parser.add_argument("--case", action="append", choices=names, help="all by default")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    wanted = arguments.case or names
    result = measure(arguments.rounds, tuple(case for case in CASES if case.name in wanted))
    cases, bars = result["cases"], result["bars"]
    assert isinstance(cases, dict)
    assert isinstance(bars, dict)
    for name, case in cases.items():
        p50 = case["p50_ms"]
        print(
            f"{name:14} pushkv {p50['pushkv']:8.2f} ms, bare {p50['bare']:8.2f} ms with "
            f"{case['bare_descriptors']} descriptors: {case['ratio']:.2f}"
        )
        stages = case["stages_p50_ms"].items()
        if stages:
            print("   " + ", ".join(f"{stage} {took:.2f}" for stage, took in stages))
    print(f"memcpy of 64 MiB: {result['memcpy_64_mib_ms']:.2f} ms")
    for name, bar in bars.items():
        told = "met" if bar["met"] else "MISSED"
        print(f"{name}: {bar['value']:.2f}, bar {bar['most'] or bar['least']}: {told}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
