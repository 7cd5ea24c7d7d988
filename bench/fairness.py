"""One block beside half a GiB: how long it waits, with and without a budget for each consumer.

    python bench/fairness.py [--rounds 10] [--json FILE]

Three processes over NIXL: a producer, and two consumers. The prefill of a long prompt ends, and at
once that of a prompt of one block, for the same consumer or for the other one. Told is the time
from the engine's word to DELIVERED at its consumer, of both; medians. The budgets take turns, each
with processes of its own; `none` is more than there is to write. What was written is compared with
what was computed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from pushkv.core.effects import Delivered, NotDelivered, ProducerAddress
from pushkv.core.events import Arrived, Computed, Offered
from pushkv.core.ids import EngineId, TransferId
from pushkv.layout import CacheGroup, CacheLayout, CacheRegion
from pushkv.runtime import Runtime, RuntimeConfig
from pushkv.transport import load_transport

BLOCK_BYTES = 64 << 10
LONG_BLOCKS = 8192
BUDGETS_MIB = {"none": 1 << 20, "256 MiB": 256, "128 MiB": 128, "32 MiB": 32, "8 MiB": 8}
WAIT_S = 60.0
REGISTER_S = 0.1
"""REGISTER crosses the control channel in less."""
LONG, SHORT = range(LONG_BLOCKS), range(LONG_BLOCKS, LONG_BLOCKS + 1)


def serve(pipe: Connection, name: str, budget_bytes: int) -> None:
    """A process's life: one engine, moved over a pipe."""
    memory = np.zeros((LONG_BLOCKS + 1, BLOCK_BYTES), np.uint8)
    region = CacheRegion(memory.ctypes.data, BLOCK_BYTES, len(memory))
    layout = CacheLayout((CacheGroup(1, (region,)),), "uint8", "NHD")
    config = RuntimeConfig(EngineId(name), layout, write_budget_bytes=budget_bytes)
    runtime = Runtime(config, load_transport("nixl", {}))
    runtime.start()
    pipe.send(runtime.address)
    while True:
        try:
            order, *about = pipe.recv()
        except EOFError:
            runtime.stop()
            return
        if order == "offer":
            transfer, attempt, address, blocks = about
            memory[blocks.start : blocks.stop] = 0
            event = Offered(
                TransferId(transfer),
                attempt,
                (ProducerAddress(*address),),
                (tuple(blocks),),
                0,
                len(blocks),
                b"prompt",
            )
            runtime.bridge.submit(event)
        elif order == "compute":
            (prefills,) = about
            began = {}
            for number, (transfer, blocks) in enumerate(prefills):
                memory[blocks.start : blocks.stop] = 1 + number
                runtime.bridge.submit(Arrived(TransferId(transfer), b"prompt"))
            time.sleep(REGISTER_S)
            for transfer, blocks in prefills:
                began[transfer] = time.monotonic_ns()
                event = Computed(TransferId(transfer), len(blocks), (tuple(blocks),), True)
                runtime.bridge.submit(event)
            pipe.send(began)
        elif order == "delivered":
            pipe.send(_delivered(runtime, about[0]))
        else:
            blocks, content = about
            pipe.send(bool((memory[blocks.start : blocks.stop] == content).all()))


def _delivered(runtime: Runtime, wanted: set[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    until = time.monotonic() + WAIT_S
    while set(found) != wanted:
        assert time.monotonic() < until, f"{wanted - set(found)} did not come"
        runtime.bridge.wait(1.0)
        at = time.monotonic_ns()
        for report in runtime.bridge.take():
            assert not isinstance(report, NotDelivered), report
            if isinstance(report, Delivered):
                found[report.transfer] = at
    return found


class Remote:
    """One engine in a process of its own."""

    def __init__(self, name: str, budget_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, budget_bytes), daemon=True)
        self.process.start()
        theirs.close()
        self.address = self.hear()

    def tell(self, *order: object) -> None:
        """Order something."""
        self.pipe.send(order)

    def hear(self):
        """The answer."""
        assert self.pipe.poll(WAIT_S), "a process does not answer"
        return self.pipe.recv()

    def stop(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Stage:
    """The three engines under one budget."""

    def __init__(self, budget_bytes: int) -> None:
        self.producer, self.one, self.other = (Remote(name, budget_bytes) for name in "pde")
        self.count = 0

    def round(self, same: bool) -> tuple[float, float]:
        """Milliseconds of the short one and of the long one."""
        self.count += 2
        long, short = f"long-{self.count}", f"short-{self.count}"
        target = self.one if same else self.other
        self.one.tell("offer", long, self.count, self.producer.address, LONG)
        target.tell("offer", short, self.count + 1, self.producer.address, SHORT)
        self.one.tell("delivered", {long, short} if same else {long})
        if not same:
            self.other.tell("delivered", {short})
        self.producer.tell("compute", ((long, LONG), (short, SHORT)))
        began = self.producer.hear()
        at = {**self.one.hear(), **({} if same else self.other.hear())}
        for engine, blocks, content in ((self.one, LONG, 1), (target, SHORT, 2)):
            engine.tell("holds", blocks, content)
            assert engine.hear(), "other bytes were delivered"
        return tuple((at[name] - began[name]) / 1e6 for name in (short, long))

    def stop(self) -> None:
        """End all."""
        for engine in (self.producer, self.one, self.other):
            engine.stop()


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds, by budget."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in BUDGETS_MIB}
    for _ in range(2):  # what the machine does beside is shared out
        for name, mib in BUDGETS_MIB.items():
            stage = Stage(mib << 20)
            try:
                stage.round(True)  # connects, and warms up
                stage.round(False)
                for _ in range(-(-rounds // 2)):
                    for which, same in (("same", True), ("other", False)):
                        short, long = stage.round(same)
                        found[name].setdefault(f"short_{which}_ms", []).append(short)
                        found[name].setdefault("long_ms", []).append(long)
            finally:
                stage.stop()
    return {
        name: {what: statistics.median(each) for what, each in kinds.items()}
        for name, kinds in found.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.rounds)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; milliseconds")
    print(f"{'budget':10}{'short, same rank':>20}{'short, other rank':>20}{'long':>12}")
    for name, row in result.items():
        columns = row["short_same_ms"], row["short_other_ms"], row["long_ms"]
        print(f"{name:10}{columns[0]:20.1f}{columns[1]:20.1f}{columns[2]:12.1f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
