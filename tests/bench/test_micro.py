"""The micro-benchmarks run, count what they say they count, and judge by their bars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def run(tmp_path: Path, script: str, *arguments: str) -> dict[str, object]:
    """What a script wrote into its JSON."""
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCH / script), "--json", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(out.read_text())
    return found


def test_core_steps_goes_whole_lives(tmp_path: Path) -> None:
    found = run(tmp_path, "core_steps.py", "--rounds", "2", "--lives", "40")
    rates, bars = found["steps_per_s"], found["bars"]
    assert isinstance(rates, dict)
    assert isinstance(bars, dict)
    assert rates["pushkv"] > 0
    assert bars["steps_per_s"]["value"] == rates["pushkv"]
    assert bars["steps_per_s"]["met"] == (rates["pushkv"] >= 500_000)
    missing = found["missing"]
    assert isinstance(missing, list)
    assert {*rates, *missing} == {"pushkv", "python-statemachine", "transitions", "automat"}


def test_live_transfers_keeps_as_many_alive_as_it_says(tmp_path: Path) -> None:
    """The script itself asserts that each transfer was delivered beside all that are live."""
    arguments = ("--few", "3", "--many", "30", "--transfers", "40")
    found = run(tmp_path, "live_transfers.py", *arguments)
    turns, costs = found["turns_us"], found["us_per_transfer"]
    assert isinstance(turns, dict)
    assert isinstance(costs, dict)
    assert {live: len(each) for live, each in turns.items()} == {"3": 2, "30": 2}
    assert found["ratio"] == costs["30"] / costs["3"]
