"""The micro-benchmarks run, count what they say they count, and judge by their bars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.nixl
def test_hand_over_compares_bytes_and_tells_its_stages(tmp_path: Path) -> None:
    """The script itself asserts that what either way wrote are the right bytes."""
    arguments = ("--case", "1 MiB", "--case", "latency", "--rounds", "2")
    found = run(tmp_path, "hand_over.py", *arguments)
    cases, bars = found["cases"], found["bars"]
    assert isinstance(cases, dict)
    assert isinstance(bars, dict)
    assert set(cases) == {"1 MiB", "latency"}
    for case in cases.values():
        assert {name: len(times) for name, times in case["times_ms"].items()} == {
            "pushkv": 2,
            "bare": 2,
        }
        assert len(case["stages_p50_ms"]) == 4
        assert all(took > 0 for took in case["stages_p50_ms"].values())
    (bar,) = bars.values()
    assert bar["value"] == cases["latency"]["ratio"]
    assert bar["met"] == (bar["value"] <= bar["most"])
