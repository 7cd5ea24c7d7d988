"""What others have measured: `published.json`, one line per point, each with its source."""

from __future__ import annotations

import json
from importlib.resources import files

from attrs import frozen

from .settings import Design, Traffic

__all__ = ["Point", "Source", "points", "sources"]


@frozen
class Source:
    """Where points are from, and how they were read."""

    title: str
    url: str
    date: str
    read: str


@frozen
class Point:
    """One published number.

    Attributes:
        system: Which machines and model: a key of the calibration.
        metric: Of which quantity: a mean or percentile in ms, requests per second, or a ratio.
        value: The number as published.
        traffic: What was sent.
        fit: Whether parameters are fitted to it; else it judges them.
        approximate: Published as "about".
    """

    source: str
    system: str
    design: Design
    metric: str
    value: float
    traffic: Traffic
    fit: bool
    approximate: bool


def _read() -> dict[str, object]:
    text = files("pushkv.simulate").joinpath("published.json").read_text(encoding="utf-8")
    found: dict[str, object] = json.loads(text)
    return found


def sources() -> dict[str, Source]:
    """Where the points are from, by name."""
    found = _read()["sources"]
    assert isinstance(found, dict), "published.json has an object of sources"
    return {name: Source(**each) for name, each in found.items()}


def points() -> list[Point]:
    """All points, in the order of their sources; every other one is for the fit."""
    found = _read()["points"]
    assert isinstance(found, list), "published.json has a list of points"
    return [_point(each) for each in found]


def _point(told: dict[str, object]) -> Point:
    own = ("source", "system", "metric", "value", "design", "use", "approximate")
    traffic = {name: value for name, value in told.items() if name not in own}
    value = told["value"]
    assert isinstance(value, int | float), "a point has a number"
    return Point(
        source=str(told["source"]),
        system=str(told["system"]),
        design=Design(str(told["design"])),
        metric=str(told["metric"]),
        value=float(value),
        traffic=Traffic(**traffic),  # type: ignore[arg-type]
        fit=told["use"] == "fit",
        approximate=bool(told["approximate"]),
    )
