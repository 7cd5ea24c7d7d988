"""What a soak's processes held, drawn: ``python -m tests.matrix.soak_plot soak.json soak.svg``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from attrs import define, field

from pushkv.core.errors import MissingDependencyError

__all__ = ["HELD", "Line", "draw", "early_and_late", "lines", "rates"]

HELD = {
    "rss_mib": "resident memory, MiB",
    "native_threads": "threads",
    "descriptors": "file descriptors",
}
RATE_S = 15.0
"""Over which the rate of transfers is taken."""
Samples = Sequence[Mapping[str, Any]]


@define
class Line:
    """One life of one end: what it held when so many transfers had begun, over all ends."""

    end: str
    transfers: list[int] = field(factory=list)
    held: dict[str, list[float]] = field(factory=lambda: {name: [] for name in HELD})


def lines(samples: Samples) -> list[Line]:
    """A line for each process, in the order in which they were first sampled."""
    found: dict[tuple[str, int], Line] = {}
    for sample, transfers in _counted(samples):
        line = found.setdefault((sample["end"], sample["pid"]), Line(sample["end"]))
        line.transfers.append(transfers)
        for name in HELD:
            line.held[name].append(sample[name])
    return list(found.values())


def rates(samples: Samples) -> list[tuple[int, float]]:
    """Transfers so far, and how many began in a second up to then."""
    found: list[tuple[int, float]] = []
    since: tuple[float, int] | None = None
    for sample, transfers in _counted(samples):
        if since is None:
            since = sample["at_s"], transfers
        elif sample["at_s"] >= since[0] + RATE_S:
            found.append((transfers, (transfers - since[1]) / (sample["at_s"] - since[0])))
            since = sample["at_s"], transfers
    return found


def early_and_late(line: Line) -> dict[str, tuple[float, float]]:
    """Medians over the second and the last quarter of a life: the first is for getting warm."""
    quarter = len(line.transfers) // 4
    return {
        name: (median(held[quarter : 2 * quarter] or held), median(held[-quarter:] or held))
        for name, held in line.held.items()
    }


def draw(soak: Mapping[str, Any], path: Path) -> None:
    """Write an SVG with a panel for each of `HELD`, and one for the rate of transfers.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "pip install 'pushkv[bench]'") from error
    rcParams["svg.hashsalt"] = "soak"  # the same bytes from the same numbers
    figure = Figure(figsize=(9, 10), layout="constrained")
    panels = figure.subplots(len(HELD) + 1, 1, sharex=True)
    ends = sorted({each["end"] for each in soak["samples"]})
    colours = {end: f"C{at}" for at, end in enumerate(ends)}
    named: set[str] = set()
    for line in lines(soak["samples"]):
        for panel, name in zip(panels, HELD, strict=False):
            label = line.end if line.end not in named and name == "rss_mib" else None
            panel.plot(
                line.transfers, line.held[name], color=colours[line.end], label=label, linewidth=1.2
            )
        named.add(line.end)
    for panel, title in zip(panels, HELD.values(), strict=False):
        panel.set_ylabel(title)
        panel.set_ylim(bottom=0)
    began = rates(soak["samples"])
    panels[-1].plot([each[0] for each in began], [each[1] for each in began], color="black")
    panels[-1].set_ylabel("transfers begun per second")
    panels[-1].set_ylim(bottom=0)
    panels[-1].set_xlabel("transfers begun, over all engines")
    figure.legend(loc="outside upper center", ncols=len(ends), fontsize="small")
    figure.savefig(path, format="svg", metadata={"Date": None})


def _counted(samples: Samples) -> Iterable[tuple[Mapping[str, Any], int]]:
    """Samples in order, each with how many transfers had begun by then."""
    begun: dict[tuple[str, int], int] = {}
    for sample in sorted(samples, key=lambda each: each["at_s"]):
        begun[sample["end"], sample["pid"]] = sample.get("begun", 0)
        yield sample, sum(begun.values())


def main() -> int:
    """Draw, and say what those held that lived from beginning to end."""
    source, path = map(Path, sys.argv[1:])
    soak = json.loads(source.read_text())
    draw(soak, path)
    found = lines(soak["samples"])
    ends = [line.end for line in found]
    for line in found:
        if ends.count(line.end) == 1:
            held = early_and_late(line)
            print(line.end, *(f"{name}: {a:.0f}, later {b:.0f};" for name, (a, b) in held.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
