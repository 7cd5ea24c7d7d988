"""What engines cost, read from outside: CPU from /proc, hooks from a file, queues from /metrics."""

from __future__ import annotations

import array
import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import Factory, frozen

from pushkv.core.ids import TransferId
from pushkv.demo.engine_site.sitecustomize import HOOKS
from pushkv.observe.timeline import Timeline

from .results import Hooks, Transfers, percentiles

__all__ = [
    "Reading",
    "available_gib",
    "group_cpu_s",
    "parse_metrics",
    "read_hooks",
    "summarise_transfers",
]

SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
QUEUE = "vllm:request_queue_time_seconds"
TRANSFER = "vllm:nixl_xfer_time_seconds"
COMPUTED = "vllm:prompt_tokens_by_source_total"


@frozen
class Reading:
    """Totals of one engine at one moment; two of them give what was between.

    Attributes:
        cpu_s: User and system time of its process group.
        hooks: Calls, wall and CPU time in its connector's hooks.
        metrics: Sums and counts, by short names.
    """

    cpu_s: float
    hooks: Hooks
    metrics: Mapping[str, float] = Factory(dict)

    def since(self, earlier: Reading) -> Reading:
        """The difference."""
        return self._with(earlier, -1)

    def plus(self, other: Reading) -> Reading:
        """The sum."""
        return self._with(other, 1)

    def _with(self, other: Reading, sign: int) -> Reading:
        names = self.metrics.keys() | other.metrics.keys()
        return Reading(
            self.cpu_s + sign * other.cpu_s,
            Hooks(
                self.hooks.calls + sign * other.hooks.calls,
                self.hooks.wall_s + sign * other.hooks.wall_s,
                self.hooks.cpu_s + sign * other.hooks.cpu_s,
            ),
            {
                name: self.metrics.get(name, 0.0) + sign * other.metrics.get(name, 0.0)
                for name in names
            },
        )


def group_cpu_s(group: int) -> float:
    """CPU of all processes of a process group that live, with their children that are gone."""
    total = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if os.getpgid(int(entry.name)) == group:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                total += sum(int(each) for each in fields[11:15])
    return total / os.sysconf("SC_CLK_TCK")


def available_gib() -> float:
    """Memory that can be had without swapping, in GiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / (1 << 20)
    return float("inf")


def read_hooks(path: Path | None) -> Hooks:
    """The totals of an engine's hooks; zeros before its connector is made, or without one."""
    totals = array.array("Q")
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            totals.frombytes(path.read_bytes())
    if len(totals) < 3 * len(HOOKS):
        return Hooks(0, 0.0, 0.0)
    return Hooks(sum(totals[0::3]), sum(totals[1::3]) / 1e9, sum(totals[2::3]) / 1e9)


def parse_metrics(text: str) -> dict[str, float]:
    """The totals that a run looks at, from vLLM's /metrics."""
    found = {"queued": 0.0, "queued_s": 0.0, "moved": 0.0, "moved_s": 0.0, "computed": 0.0}
    names = {
        f"{QUEUE}_count": "queued",
        f"{QUEUE}_sum": "queued_s",
        f"{TRANSFER}_count": "moved",
        f"{TRANSFER}_sum": "moved_s",
    }
    for line in text.splitlines():
        sample = SAMPLE.match(line)
        if sample is None:
            continue
        if sample["name"] in names:
            found[names[sample["name"]]] += float(sample["value"])
        elif sample["name"] == COMPUTED and '"local_compute"' in (sample["labels"] or ""):
            found["computed"] += float(sample["value"])
    return found


def summarise_transfers(
    timelines: Mapping[TransferId, Timeline], wanted: Iterable[str]
) -> Transfers | None:
    """What the traces say of those of the `wanted` transfers that were delivered."""
    wanted = set(wanted)
    write_s, exposed_s, hidden_s = [], [], []
    early = 0
    for transfer, one in timelines.items():
        if transfer not in wanted or one.delivered_at is None or one.prefilled_at is None:
            continue
        early += one.early
        exposed_s.append((one.delivered_at - one.prefilled_at) / 1e9)
        began, done = one.write_began_at, one.written_at
        if began is not None and done is not None:
            write_s.append((done - began) / 1e9)
            hidden_s.append(max(0, min(done, one.prefilled_at) - began) / 1e9)
    write, exposed, hidden = (percentiles(each) for each in (write_s, exposed_s, hidden_s))
    if write is None or exposed is None or hidden is None:
        return None
    return Transfers(len(exposed_s), early / len(exposed_s), write, exposed, hidden)
