"""Points and parameters are what they are said to be, and the page says what the model says."""

from __future__ import annotations

import json
from collections import Counter
from math import log
from pathlib import Path

import pytest
from attrs import evolve

from pushkv.core.errors import ConfigurationError
from pushkv.simulate.accuracy import accuracy
from pushkv.simulate.calibration import FREE, GIVEN, Calibration, fit, fitted, loss, predict
from pushkv.simulate.page import SECTIONS, filled, main, markdown
from pushkv.simulate.published import points, sources
from pushkv.simulate.questions import QUESTIONS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "simulate.md"


def test_every_point_has_a_source_and_every_other_is_fitted_to() -> None:
    told = points()
    assert {point.source for point in told} == set(sources())
    assert [point.fit for point in told] == [number % 2 == 0 for number in range(len(told))]
    assert all(source.url and source.date and source.read for source in sources().values())
    values = Counter(point.value for point in told)
    assert {1744, 540} <= set(values), "what push is known for"


def test_fitted_values_are_the_free_parameters_within_their_ranges() -> None:
    values = fitted().values
    assert set(values) == {free.name for free in FREE}
    for free in FREE:
        assert free.least <= values[free.name] <= free.most, free.name
    assert len(FREE) < sum(point.fit for point in points()) / 1.5
    assert {name for name, _, _ in GIVEN}.isdisjoint(values)


def test_a_fit_finds_what_made_the_points() -> None:
    """Points that the model itself made, from values that the fit does not know."""
    truth = fitted()
    some = [point for point in points() if point.metric in ("prefill_ms", "transfer_ms")]
    made = [
        evolve(point, value=value)
        for point, value in zip(some, predict(truth, some, 1, machines=False), strict=True)
    ]
    wrong = Calibration({name: value * 1.4 for name, value in truth.values.items()})
    before = loss(wrong, made, 1)
    found, after = fit(made, 0, 120, 1, begin=wrong)
    assert before > log(1.1)
    assert after < before / 3
    assert loss(found, made, 1) == after


def test_the_page_has_the_errors_that_the_model_makes() -> None:
    """Also that the machines' hand-overs take the time that the fit assumed."""
    text = PAGE.read_text(encoding="utf-8")
    inside = markdown(SECTIONS["calibration"]())
    assert filled(text, "calibration", inside) == text, (
        "run `python -m pushkv.simulate.page docs/simulate.md calibration`"
    )


def test_the_page_has_every_question_and_its_figure() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in QUESTIONS:
        assert f"<!-- simulated: {name} -->\n**" in text
        assert f"(simulate/{name}.svg)" in text
        assert (PAGE.parent / "simulate" / f"{name}.svg").read_text().startswith("<?xml")


def test_a_page_without_markers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="calibration"):
        filled("nothing", "calibration", "inside")
    assert main([]) == 2
    assert main([str(tmp_path / "page.md"), "no such section"]) == 2


def test_ctrl_c_in_the_middle_leaves_the_rows_before_it() -> None:
    def stop(cell: int, _cells: int, _what: str, _share: float) -> None:
        if cell == 1:
            raise KeyboardInterrupt

    every, together = accuracy(fitted(), stop, repeats=1)
    assert every.partial
    assert together.partial
    assert {row[0] for row in every.rows} == {"push-blog"}
    json.dumps(every.results)
