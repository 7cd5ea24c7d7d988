"""The export is what the Trace Event Format asks for, and says what the engines did."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pushkv.cli.trace import trace_app
from pushkv.core.events import Cancelled
from pushkv.core.ids import TransferId

from .traced_world import TracedWorld

Event = dict[str, Any]
NEEDED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "i": {"name", "cat", "pid", "tid", "ts", "s"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "C": {"name", "pid", "ts", "args"},
}
"""The fields of each phase that the format's document asks for, of the phases that are used."""


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    world = TracedWorld()
    world.folder = tmp_path_factory.mktemp("chrome")
    consumer, producer = world.node("D"), world.node("P")
    world.offer(consumer, "gone", [producer])
    world.settle()
    world.happen(consumer, Cancelled(TransferId("gone")))
    world.settle()
    world.prefill(producer, "a")
    world.offer(consumer, "a", [producer])
    world.settle()
    assert world.delivered(consumer, "a", 1)
    world.end()
    out = world.folder / "out.json"
    arguments = ["export", str(world.folder / "P"), str(world.folder / "D"), "--chrome", str(out)]
    found = CliRunner().invoke(trace_app, arguments)
    assert found.exit_code == 0, found.output
    return exported(out)


def exported(path: Path) -> list[Event]:
    found = json.loads(path.read_bytes())
    assert found["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = found["traceEvents"]
    return events


def of(events: list[Event], phase: str) -> list[Event]:
    return [each for each in events if each["ph"] == phase]


def test_every_event_has_what_its_phase_needs(events: list[Event]) -> None:
    assert {each["ph"] for each in events} == set(NEEDED)
    for each in events:
        assert NEEDED[each["ph"]] <= set(each)
        assert type(each["pid"]) is int
        assert type(each.get("tid", 0)) is int
        assert each.get("ts", 0) >= 0
        assert each.get("dur", 0) >= 0
        assert each.get("s", "t") == "t"
        assert each.get("bp", "e") == "e"
    for each in of(events, "C"):
        assert each["args"]
        assert all(type(value) is int for value in each["args"].values())


def test_processes_are_engines_and_tracks_are_transfers(events: list[Event]) -> None:
    named = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in of(events, "M")
        if each["name"] == "thread_name"
    }
    engines = {
        each["pid"]: each["args"]["name"].partition(":")[0]
        for each in of(events, "M")
        if each["name"] == "process_name"
    }
    assert sorted(engines.values()) == ["D", "P"]
    assert sorted((engines[pid], name) for (pid, _), name in named.items()) == [
        ("D", "a"),
        ("D", "gone"),
        ("P", "a"),
        ("P", "gone"),
    ]
    for each in (*of(events, "X"), *of(events, "i"), *of(events, "s"), *of(events, "f")):
        assert (each["pid"], each["tid"]) in named


def test_slices_of_one_track_do_not_overlap(events: list[Event]) -> None:
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for each in of(events, "X"):
        tracks[each["pid"], each["tid"]].append(each)
    assert tracks
    for slices in tracks.values():
        slices.sort(key=lambda each: each["ts"])
        for one, following in pairwise(slices):
            assert one["ts"] + one["dur"] <= following["ts"] + 1e-6


def test_arrows_go_forward_between_slices_of_both_engines(events: list[Event]) -> None:
    begins = {each["id"]: each for each in of(events, "s")}
    ends = {each["id"]: each for each in of(events, "f")}
    assert set(begins) == set(ends)
    assert len(ends) == len(of(events, "f"))
    for number, end in ends.items():
        begin = begins[number]
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"])
        assert begin["pid"] != end["pid"]
        assert begin["ts"] <= end["ts"]
        for point in (begin, end):
            assert any(
                (each["pid"], each["tid"]) == (point["pid"], point["tid"])
                and each["ts"] <= point["ts"] <= each["ts"] + each["dur"] + 1e-6
                for each in of(events, "X")
            ), "an arrow that begins or ends outside of all slices is not drawn"
    names = {each["name"] for each in begins.values()}
    assert {"REGISTER", "COMPLETE", "REVOKE", "REVOKED"} <= names


def test_the_counter_begins_with_an_offer_and_ends_at_zero(events: list[Event]) -> None:
    counts = [each["args"]["blocks"] for each in sorted(of(events, "C"), key=lambda e: e["ts"])]
    assert max(counts) > 0
    assert counts[-1] == 0
    assert len(counts) == 4, "two attempts, each offered and released"
