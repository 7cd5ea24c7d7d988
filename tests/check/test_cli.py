"""`pushkv check`, as it is typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pushkv.check.configurations import by_name
from pushkv.check.patch import Patch
from pushkv.check.runner import Limits, check_one
from pushkv.check.taken_out import TAKEN_OUT
from pushkv.cli import check as command
from pushkv.cli.app import app


def test_check_says_what_it_has_seen(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    arguments = ["check", "--config", "nothing-to-send", "--jobs", "1", "--json", str(out)]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    found = json.loads(out.read_text())
    (only,) = found["configs"]
    assert (only["name"], only["states"], only["edges"]) == ("nothing-to-send", 1_466, 5_107)
    assert only["violations"] == []
    assert only["complete"]
    assert "consumer.settling/ArrivalSeen" in found["unreached_rows"]["consumer"]


def test_who_does_not_watch_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LINE_EVERY_S", 0.001)
    ran = CliRunner().invoke(app, ["check", "--config", "retry", "--jobs", "1"])
    assert ran.exit_code == 0, ran.output
    assert re.search(r"retry: [\d,]+ states, [\d,]+/s, frontier [\d,]+, depth \d+\n", ran.output)


def test_an_unknown_configuration_is_named() -> None:
    ran = CliRunner().invoke(app, ["check", "--config", "everything"])
    assert ran.exit_code == 2
    assert "everything" in ran.output
    assert "nothing-to-send" in ran.output


def test_a_violation_is_told_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patch = Patch()
    TAKEN_OUT["link end frees"](patch)
    try:
        report = check_one(by_name("ends"))
    finally:
        patch.undo()
    monkeypatch.setattr(command, "check", lambda *_, **__: [report])
    out = tmp_path / "found.json"
    passed = command.run_check(["ends"], jobs=1, out=out)
    assert not passed
    printed = capsys.readouterr().out
    assert "I1 is broken" in printed
    assert "sequenceDiagram" in printed
    (violation,) = json.loads(out.read_text())["configs"][0]["violations"]
    assert violation["broken"][0][0] == "I1"
    assert [move["kind"] for move in violation["moves"]][-1] == "write"


def test_a_limit_that_is_reached_fails_but_not_in_the_deep_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = check_one(by_name("cancel"), Limits(states=2_000))
    monkeypatch.setattr(command, "check", lambda *_, **__: [report])
    assert not command.run_check(["cancel"], jobs=1)
    assert command.run_check(["cancel-deeper"], deep=True, jobs=1)


def test_a_row_that_nothing_reaches_fails_the_whole_set_and_no_part_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check_one(by_name("nothing-to-send"))
    monkeypatch.setattr(command, "check", lambda *_, **__: [report])
    assert not command.run_check([], jobs=1)
    assert "rows that nothing reached: " in capsys.readouterr().out
    assert command.run_check(["nothing-to-send"], jobs=1)


def test_rows_that_fire_unlike_they_are_listed_fail_the_whole_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check_one(by_name("nothing-to-send"))
    monkeypatch.setattr(command, "check", lambda *_, **__: [report])
    monkeypatch.setattr(command, "unreached", lambda _: {})
    assert not command.run_check([], jobs=1)
    assert "consumer.settling/Complete" in capsys.readouterr().out
    assert command.run_check(["nothing-to-send"], jobs=1)
