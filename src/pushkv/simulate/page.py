"""The tables of docs/simulate.md, between their markers.

`python -m pushkv.simulate.page docs/simulate.md` runs everything and writes them, and the figures
beside them where matplotlib is installed; with a name after the file, only that one. What the wall
CPU column says is of the machine that wrote it; all else is the same everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from pushkv.core.errors import ConfigurationError, MissingDependencyError

from .accuracy import accuracy, parameters
from .answers import Answer
from .asked import Asked
from .calibration import fitted
from .plots import write_svg
from .questions import QUESTIONS

__all__ = ["SECTIONS", "filled", "main", "markdown"]

REQUESTS = 400


def _calibration() -> list[Answer]:
    values = fitted()
    return [*parameters(values), *accuracy(values)]


def _asking(name: str) -> Callable[[], list[Answer]]:
    return lambda: [QUESTIONS[name](Asked(fitted(), 0, REQUESTS))]


SECTIONS: dict[str, Callable[[], list[Answer]]] = {
    "calibration": _calibration,
    **{name: _asking(name) for name in QUESTIONS},
}


def markdown(answers: list[Answer]) -> str:
    """Tables, each under its title."""
    parts = []
    for answer in answers:
        lines = [f"**{answer.title}.** {answer.about}".rstrip(), ""]
        lines.append("| " + " | ".join(answer.columns) + " |")
        lines.append("|" + "---|" * len(answer.columns))
        lines += ["| " + " | ".join(row) + " |" for row in answer.rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def filled(text: str, name: str, inside: str) -> str:
    """`text` with what is between the markers of `name` replaced.

    Raises:
        ConfigurationError: The markers are not there.
    """
    begin, end = f"<!-- simulated: {name} -->\n", f"\n<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ConfigurationError("page", name, f"a file with {begin.strip()} and {end.strip()}")
    return f"{before}{begin}{inside}{end}{after}"


def main(arguments: list[str]) -> int:
    """Write the sections named after the file, or all."""
    if not arguments or not set(arguments[1:]) <= set(SECTIONS):
        sys.stderr.write(
            f"usage: python -m pushkv.simulate.page FILE [{' | '.join(SECTIONS)}]...\n"
        )
        return 2
    path = Path(arguments[0])
    for name in arguments[1:] or SECTIONS:
        answers = SECTIONS[name]()
        text = filled(path.read_text(encoding="utf-8"), name, markdown(answers))
        path.write_text(text, encoding="utf-8")
        for answer in answers:
            if answer.figure is not None:
                try:
                    write_svg(answer.figure, path.parent / "simulate" / f"{name}.svg")
                except MissingDependencyError as error:
                    sys.stderr.write(f"no figure: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
