"""How far the model is from what was published: every point, fitted to or not."""

from __future__ import annotations

from math import exp, log

from attrs import frozen

from .answers import Answer, Cells, Figure, Progress
from .calibration import FREE, GIVEN, Calibration, predict
from .published import Point, points

__all__ = ["REPEATS", "accuracy", "parameters"]

COLUMNS = (
    *("source", "design", "prompt", "output", "q/s"),
    *("what", "published", "model", "error", "use"),
)
REPEATS = 3
"""Runs per point, each with other arrivals."""


@frozen
class _Half:
    name: str
    said: list[tuple[float, float]]

    def row(self) -> tuple[str, ...]:
        """Typical error (the exponential of the mean absolute logarithm), and how many are near."""
        errors = [abs(log(predicted / value)) for predicted, value in self.said]
        near = sum(error <= log(1.25) for error in errors)
        typical = exp(sum(errors) / len(errors)) - 1
        return (self.name, str(len(errors)), f"{typical:.0%}", f"{near} of {len(errors)}")


def accuracy(
    calibration: Calibration, progress: Progress | None = None, repeats: int = REPEATS
) -> tuple[Answer, Answer]:
    """The error at every point, and all errors together; hand-overs by the real machines."""
    rows: list[tuple[str, ...]] = []
    scatter: dict[str, list[tuple[float, float]]] = {"fitted": [], "judged": []}
    systems: dict[str, list[tuple[float, float]]] = {}
    told = points()
    predicted: list[float] = []
    partial = Cells(progress)
    try:
        for number, group in enumerate(_groups(told)):
            if progress is not None:
                progress(number, len(_groups(told)), group[0].system, 0.0)
            predicted += predict(calibration, group, repeats, machines=True)
    except KeyboardInterrupt:
        partial.partial = True
    for point, said in zip(told, predicted, strict=False):
        half = "fitted" if point.fit else "judged"
        scatter[half].append((said, point.value))
        systems.setdefault(f"{half}, {point.source}", []).append((said, point.value))
        rows.append(_row(point, said))
    halves = [
        _Half(name, said).row() for name, said in (*scatter.items(), *systems.items()) if said
    ]
    lines = {name: [(value, said) for said, value in each] for name, each in scatter.items()}
    about = (
        f"Each the mean of {repeats} runs. The free parameters were fitted to those that say so."
    )
    return (
        Answer(
            "Error at every published point",
            about,
            COLUMNS,
            rows,
            Figure("Published and predicted", "published", "model", lines, log_x=True, log_y=True),
            [
                {"point": str(point), "published": point.value, "model": said, "fit": point.fit}
                for point, said in zip(told, predicted, strict=False)
            ],
            partial.partial,
        ),
        Answer(
            "Errors together",
            "Typical: the exponential of the mean absolute logarithm of model / published, less 1.",
            ("points", "how many", "typical error", "within 25 %"),
            halves,
            None,
            partial=partial.partial,
        ),
    )


def _groups(told: list[Point]) -> list[list[Point]]:
    """Points in order, cut where the source changes."""
    groups: list[list[Point]] = []
    for point in told:
        if groups and groups[-1][0].source == point.source:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def _row(point: Point, said: float) -> tuple[str, ...]:
    about = "about " if point.approximate else ""
    digits = 2 if point.value < 20 else 0
    return (
        point.source,
        str(point.design),
        f"{point.traffic.prompt_tokens:,}",
        f"{point.traffic.output_tokens}",
        f"{point.traffic.rate_hz:g}",
        point.metric.replace("_", " "),
        f"{about}{point.value:,.{digits}f}",
        f"{said:,.{digits}f}",
        f"{said / point.value - 1:+.0%}",
        "fitted" if point.fit else "judged",
    )


def parameters(calibration: Calibration) -> tuple[Answer, Answer]:
    """What is fitted, and what is given."""
    free = [(each.name, f"{calibration.values[each.name]:.4g}", each.meaning) for each in FREE]
    fitted_to = sum(point.fit for point in points())
    return (
        Answer(
            f"{len(FREE)} free parameters, fitted to {fitted_to} of {len(points())} points",
            "Seconds, bytes per second, tokens.",
            ("parameter", "value", "of what"),
            free,
            None,
        ),
        Answer("Given, not fitted", "", ("parameter", "value", "from where"), list(GIVEN), None),
    )
