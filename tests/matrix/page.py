"""The tables of docs/faults.md, from kept rows: ``python -m tests.matrix.page [FILE...]``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path

from tests.lanes import LANES

from pushkv.demo.systems import PULL, PUSH, PUSHKV

from .rows import Row, Rows, words

__all__ = ["filled", "main", "reference_table", "vllm_table"]

PAGE, KEPT = Path("docs/faults.md"), Path("docs/faults.json")
LANE_SYSTEMS = tuple(f"reference, {lane}" for lane in LANES)
VLLM_SYSTEMS = (PUSHKV.name, PUSH.name, PULL.name)
NOTHING = "No runs are kept yet."


def reference_table(rows: Iterable[Row]) -> str:
    """One line for each fault; runs by lane, the rest over all lanes."""
    by_fault = _by_fault(rows, LANE_SYSTEMS)
    if not by_fault:
        return NOTHING
    names = ["fault", f"runs: {' / '.join(LANES)}", "repeated", "right of asked", "wrong"]
    names += ["blocks lost", "recovered", "slowest, s"]
    lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    odd = []
    for fault, found in by_fault.items():
        runs = " / ".join(str(found[each].runs) if each in found else "–" for each in LANE_SYSTEMS)
        total = reduce(Row.plus, found.values())
        lines.append(
            f"| {fault} | {runs} | {total.missed or ''} | {total.right}/{total.clients} "
            f"| {total.wrong} | {total.leaked_blocks} | {total.recovered}/{total.runs} "
            f"| {total.slowest_s:g} |"
        )
        odd += [
            f"- {fault}, {row.system.removeprefix('reference, ')}: {words(row)}; "
            + "; ".join(row.notes)
            for row in found.values()
            if not row.is_green
        ]
    return "\n".join([*lines, *(["", "Not as it should be:", ""] if odd else []), *odd])


def vllm_table(rows: Iterable[Row]) -> str:
    """One line for each fault, one column for each connector."""
    by_fault = _by_fault(rows, VLLM_SYSTEMS)
    if not by_fault:
        return NOTHING
    lines = [
        "| fault | " + " | ".join(VLLM_SYSTEMS) + " |",
        "| --- |" + " --- |" * len(VLLM_SYSTEMS),
    ]
    lines += [
        f"| {fault} | " + " | ".join(_cell(found.get(each)) for each in VLLM_SYSTEMS) + " |"
        for fault, found in by_fault.items()
    ]
    return "\n".join(lines)


def filled(page: str, rows: Sequence[Row]) -> str:
    """The page with what the rows come to between its markers."""
    for name, table in (("reference", reference_table(rows)), ("vllm", vllm_table(rows))):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the page has no {begin.strip()} with an end")
        page = f"{before}{begin}\n{table}\n\n{end}{after}"
    return page


def _by_fault(rows: Iterable[Row], systems: Sequence[str]) -> Mapping[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.system in systems:
            found.setdefault(row.fault, {})[row.system] = row
    return found


def _cell(row: Row | None) -> str:
    return "not run" if row is None else f"{words(row)} in {row.runs} runs, {row.slowest_s:g} s"


def main() -> int:
    """Keep the rows of the files beside the page, and fill it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix.page",
        description="Take the rows of FILEs, of which a later one replaces the same fault and "
        f"system of an earlier one, into {KEPT}, and fill the tables of {PAGE} from it.",
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    kept = Rows(KEPT)
    for path in parser.parse_args().files:
        if not path.exists():
            parser.error(f"{path}: no such file")
        kept.rows.update(Rows(path).rows)
    if kept.rows:
        kept.save()
    PAGE.write_text(filled(PAGE.read_text(), [*kept.rows.values()]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
