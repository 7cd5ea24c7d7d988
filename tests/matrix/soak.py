"""The soak: ``python -m tests.matrix.soak --help``.

Two pairs of ends over real NIXL. The first pair lives from beginning to end, so that whatever leaks
in it is seen; of the second, either end is killed or stopped every few seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import define, field

from pushkv.core.effects import ProducerAddress

from .soak_engine import BLOCK_BYTES, SIZES, consume, produce
from .soak_plot import draw

CONTEXT = multiprocessing.get_context("spawn")
START_S = 60.0
END_S = 60.0


@define(eq=False)
class _Process:
    """One end, seen from here."""

    name: str
    run: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    process: Any = None
    control: Any = None
    address: ProducerAddress | None = None

    def start(self) -> None:
        self.control, theirs = CONTEXT.Pipe()
        arguments = (self.name, theirs, *self.arguments)
        self.process = CONTEXT.Process(target=_child, args=(self.run, arguments), daemon=True)
        self.process.start()
        theirs.close()
        if not self.control.poll(START_S):
            raise TimeoutError(f"{self.name} did not start")
        _, address = self.control.recv()
        self.address = ProducerAddress(*address)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def pause(self, pause_s: float) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        time.sleep(pause_s)
        os.kill(self.process.pid, signal.SIGCONT)


def _child(run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run(*arguments)


@define(eq=False)
class _Pair:
    producer: _Process
    consumer: _Process

    def connect(self) -> None:
        """Tell each of the other; as a router does when one of them is new."""
        theirs, ours = CONTEXT.Pipe(duplex=False)
        self.producer.control.send(("legs", theirs))
        self.consumer.control.send(("producer", (self.producer.address, ours)))
        theirs.close()
        ours.close()


@define
class Soak:
    """What happened so far."""

    samples: list[dict[str, Any]] = field(factory=list)
    problems: list[str] = field(factory=list)
    totals: Counter[str] = field(factory=Counter)
    faults: Counter[str] = field(factory=Counter)

    def hear(self, process: _Process) -> bool:
        """Take what an end says; returns whether it has ended."""
        try:
            while process.control.poll():
                what, value = process.control.recv()
                if what == "sample":
                    self.samples.append(value)
                elif what == "end":
                    counts, problems = value
                    self.totals.update(counts)
                    self.problems += problems
                    return True
        except (EOFError, OSError):
            return True
        return False

    def lost(self, process: _Process) -> None:
        """What an end that is killed had counted when it last said so."""
        self.hear(process)
        of_end = (each for each in reversed(self.samples) if each["end"] == process.name)
        last: dict[str, Any] = next(of_end, {})
        self.totals.update(
            {
                key: value
                for key, value in last.items()
                if key in ("begun", "delivered", "delivered_kib")
                or key.startswith(("not_", "to_be", "never"))
            }
        )

    def begun(self) -> int:
        """Transfers so far, over all lives."""
        last: dict[tuple[str, int], int] = {}
        for each in self.samples:
            last[each["end"], each["pid"]] = each.get("begun", 0)
        return sum(last.values())


def soak(transfers: int, seed: int, fault_rate: float, every_s: float) -> Soak:
    """Until so many transfers have begun; then everything drains, and is counted."""
    chooser, found = random.Random(seed), Soak()
    pairs = [
        _Pair(
            _Process(f"producer-{at}", produce),
            _Process(f"consumer-{at}", consume, (seed + at, fault_rate)),
        )
        for at in range(2)
    ]
    for pair in pairs:
        pair.producer.start()
        pair.consumer.start()
        pair.connect()
    ends = [end for pair in pairs for end in (pair.producer, pair.consumer)]
    next_fault, shown_at, began = time.monotonic() + every_s, 0.0, time.monotonic()
    while found.begun() < transfers and not found.problems:
        time.sleep(0.2)
        for end in ends:
            found.hear(end)
            if not end.process.is_alive():
                found.problems.append(f"{end.name} died")
        if time.monotonic() >= next_fault:
            _strike(pairs[1], chooser, found)
            next_fault = time.monotonic() + every_s
        if time.monotonic() > shown_at + 5:
            shown_at = time.monotonic()
            rate = found.begun() / (shown_at - began)
            print(f"{found.begun()} of {transfers}, {rate:.0f}/s, {dict(found.faults)}", flush=True)
    for pair in pairs:
        for end in (pair.consumer, pair.producer):
            with suppress(OSError):
                end.control.send(("end", None))
            _until_ended(end, found)
    for end in ends:
        end.kill()
    return found


def _strike(pair: _Pair, chooser: random.Random, found: Soak) -> None:
    victim = chooser.choice((pair.producer, pair.consumer))
    if chooser.random() < 0.5:
        found.faults[f"{victim.name} paused"] += 1
        victim.pause(chooser.uniform(0.1, 4.0))
        return
    found.faults[f"{victim.name} killed"] += 1
    found.lost(victim)
    victim.kill()
    victim.start()
    pair.connect()


def _until_ended(process: _Process, found: Soak) -> None:
    deadline = time.monotonic() + END_S
    while not found.hear(process):
        if time.monotonic() > deadline:
            found.problems.append(f"{process.name} did not end")
            return
        time.sleep(0.05)


def main() -> int:
    """Run, print what came of it, and fail if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix.soak", description=__doc__)
    parser.add_argument("--transfers", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--fault-rate", type=float, default=0.015, help="of all transfers")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two deaths")
    parser.add_argument("--json", type=Path, default=Path("soak.json"))
    parser.add_argument("--plot", type=Path, help="draw what the engines held, as SVG")
    options = parser.parse_args()
    print(f"seed {options.seed}; {SIZES[0][1]} to {SIZES[-1][2]} blocks of {BLOCK_BYTES} bytes")
    began = time.monotonic()
    found = soak(options.transfers, options.seed, options.fault_rate, options.every)
    kept = {
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
        "totals": dict(found.totals),
        "faults": dict(found.faults),
        "problems": found.problems,
        "samples": found.samples,
    }
    options.json.write_text(json.dumps(kept))
    if options.plot is not None:
        draw(kept, options.plot)
    print(json.dumps({"totals": dict(found.totals), "problems": found.problems}, indent=1))
    return int(bool(found.problems))


if __name__ == "__main__":
    sys.exit(main())
