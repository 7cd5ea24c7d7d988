"""The counts on the page about the model checker, made by the searches themselves.

`python -m pushkv.check.counts docs/checking.md` searches the whole standard set and writes its
table there; names after the page search only those, and leave the others as they are. The tests
compare the quick ones with the page.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .configurations import STANDARD, Configuration
from .runner import check

__all__ = ["Counts", "main", "read", "rewritten"]

Counts = tuple[int, int]
"""States and edges of one configuration."""

BEGIN = "<!-- made by `python -m pushkv.check.counts docs/checking.md` -->"
END = "<!-- end -->"
ROW = re.compile(r"^\| ([\w-]+) \| .* \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)


def read(page: str) -> dict[str, Counts]:
    """What the table that is made says on `page`, by name."""
    table = page.split(BEGIN)[1].split(END, maxsplit=1)[0]
    return {name: (_number(states), _number(edges)) for name, states, edges in ROW.findall(table)}


def rewritten(
    page: str, counts: Mapping[str, Counts], configurations: Sequence[Configuration] = STANDARD
) -> str:
    """The page with new counts; a configuration without any is left out."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    lines = ["| name | what for | states | edges |", "|---|---|--:|--:|"]
    total = [0, 0]
    for each in configurations:
        if each.name in counts:
            states, edges = counts[each.name]
            total = [total[0] + states, total[1] + edges]
            lines.append(f"| {each.name} | {each.purpose} | {states:,} | {edges:,} |")
    lines.append(f"| *all* | | {total[0]:,} | {total[1]:,} |")
    return "\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{after}"])


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def main(arguments: Sequence[str]) -> int:
    """Search, and write the counts to the page named first. Blocks for minutes."""
    if not arguments:
        sys.stderr.write("usage: python -m pushkv.check.counts FILE [NAME ...]\n")
        return 2
    path, names = Path(arguments[0]), arguments[1:]
    chosen = [each for each in STANDARD if not names or each.name in names]
    reports = check(chosen, jobs=os.cpu_count() or 1)
    failed = [each.name for each in reports if not each.passed]
    if failed:
        sys.stderr.write(f"no counts of what fails: {', '.join(failed)}\n")
        return 1
    page = path.read_text()
    counts = read(page) | {each.name: (each.states, each.edges) for each in reports}
    path.write_text(rewritten(page, counts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
