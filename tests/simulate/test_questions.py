"""Each question is answered, within what must hold of any answer; the command shows all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pushkv.cli.app import app
from pushkv.simulate.answers import Answer, Cells
from pushkv.simulate.asked import Asked, decode_hz, prefill_hz
from pushkv.simulate.calibration import fitted
from pushkv.simulate.questions import QUESTIONS
from pushkv.simulate.run import Result, simulate
from pushkv.simulate.settings import (
    Deployment,
    Design,
    EngineModel,
    Faults,
    Settings,
    Traffic,
)

REQUESTS = 30


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    asked = Asked(fitted(), seed=1, requests=REQUESTS)
    return {name: ask(asked) for name, ask in QUESTIONS.items() if name not in ("fleet", "sweep")}


def mean(result: object, what: str) -> float:
    assert isinstance(result, dict)
    value = result["result"][what]
    return float(value["mean"] if isinstance(value, dict) else value)


def test_every_row_has_every_column(answers: dict[str, Answer]) -> None:
    for name, answer in answers.items():
        assert answer.rows, name
        assert {len(row) for row in answer.rows} == {len(answer.columns)}, name
        assert answer.figure is not None
        assert answer.figure.lines
        assert not answer.partial
        json.dumps(answer.results)


def test_early_is_never_later_and_holds_blocks_for_longer(answers: dict[str, Answer]) -> None:
    results = answers["early-or-late"].results
    assert len(results) == 27
    for late, early in zip(results[1::3], results[2::3], strict=True):
        assert mean(early, "ttft_s") < mean(late, "ttft_s")
        assert mean(early, "reserved_block_s") > mean(late, "reserved_block_s")


def test_with_room_nobody_fails_for_deaths(answers: dict[str, Answer]) -> None:
    results = answers["quarantine"].results
    assert len(results) == 12
    assert not any(mean(each, "failed") for each in results[2::3])
    assert all(mean(each, "deaths") > 0 for each in results)


def test_a_longer_proof_quarantines_more() -> None:
    asked = Asked(fitted(), seed=1)
    traffic = Traffic(8.0, requests=100, prompt_tokens=8192)
    short, long = (
        simulate(
            Settings(
                Design.PUSH_EARLY,
                asked.engine,
                asked.link,
                Deployment(4, 4),
                traffic,
                Faults(2.0, proof_s, restarts_most=9),
            )
        )
        for proof_s in (0.01, 30.0)
    )
    assert long.quarantined_most > 2 * short.quarantined_most
    assert short.deaths > 5


def test_capacities_are_those_of_a_hand_count() -> None:
    engine = EngineModel(
        prefill_step_s=0.1, prefill_token_s=1e-4, decode_step_s=0.01, chunk_tokens=1000, slots=4
    )
    traffic = Traffic(prompt_tokens=2500, output_tokens=50)
    assert prefill_hz(engine, traffic) == pytest.approx(1 / (3 * 0.1 + 0.25))
    assert decode_hz(engine, traffic) == pytest.approx(4 / 0.5)


def test_cells_that_are_interrupted_leave_those_before() -> None:
    def stop(cell: int, _cells: int, _what: str, _share: float) -> None:
        if cell == 2:
            raise KeyboardInterrupt

    answer = QUESTIONS["placement"](Asked(fitted(), 0, 10, stop))
    assert answer.partial
    assert len(answer.rows) == 2
    assert not Cells(None).partial


def test_the_command_shows_a_run_and_writes_it(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    arguments = ["simulate", "run", "push-late", "--requests", "20", "--json", str(told)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "ttft_s" in shown.output
    written = json.loads(told.read_text())
    assert written["partial"] is False
    assert written["answers"][0]["results"][0]["result"]["ended"] == 20


def test_the_command_says_that_an_answer_is_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[object] = []

    def interrupted(settings: Settings, progress: Callable[[int], None] | None) -> Result:
        runs.append(settings)
        if len(runs) == 4:
            raise KeyboardInterrupt
        return simulate(settings, progress)

    monkeypatch.setattr("pushkv.simulate.answers.simulate", interrupted)
    told = tmp_path / "told.json"
    arguments = ["simulate", "placement", "--requests", "10", "--json", str(told)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 130
    assert "PARTIAL" in shown.output
    assert json.loads(told.read_text())["partial"] is True
    assert len(json.loads(told.read_text())["answers"][0]["rows"]) == 3


def test_help_teaches_by_an_example() -> None:
    for name in (*QUESTIONS, "calibration", "run", "fit"):
        shown = CliRunner().invoke(app, ["simulate", name, "--help"])
        assert shown.exit_code == 0
        assert f"pushkv simulate {name}" in shown.output


def test_a_setting_that_means_nothing_is_named() -> None:
    shown = CliRunner().invoke(app, ["simulate", "run", "sideways"])
    assert shown.exit_code == 2
    assert "sideways" in shown.output


def test_a_figure_is_the_same_file_again(tmp_path: Path, answers: dict[str, Answer]) -> None:
    pytest.importorskip("matplotlib")
    from pushkv.simulate.plots import write_svg

    figure = answers["placement"].figure
    assert figure is not None
    for name in ("one.svg", "other.svg"):
        write_svg(figure, tmp_path / name)
    one = (tmp_path / "one.svg").read_bytes()
    assert one == (tmp_path / "other.svg").read_bytes()
    assert b"push-early" in one
