"""Scenario scripts: what happens to a few engines, line by line, and what each is told of it.

A script is text. A line that begins at the margin is a command or, after ``#``, a remark; what
follows a command, indented, is what came of it. `run` makes those lines anew, so a script is right
when it comes out as it went in. ``expect`` lines say what must be so, whatever else changes.

A script that begins with ``search NAME`` happens in the world of that configuration of the model
checker instead, move by move; ``without NAME`` before it takes a rule out for as long as it runs.

`python -m pushkv.testing.scenario FILE...` compares, and with ``--rewrite`` writes what comes out.
The words are described in ``docs/scenarios.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from difflib import unified_diff
from pathlib import Path

from pushkv.check.mutants import mutants
from pushkv.check.script import SearchStage

from .scenario_expect import Stage
from .scenario_world import ScenarioError
from .world import ViolationError

__all__ = ["ScenarioError", "main", "run"]

INDENT = "    "
QUIETLY = "quietly "


def run(script: str, *, as_it_is: bool = False) -> str:
    """Run a script, and return it with what came of each command.

    Args:
        script: The script; lines that say what came of a command are made anew.
        as_it_is: Take no rule out, whatever the script says.

    Raises:
        ScenarioError: A line cannot be understood, or an expectation does not hold; names the line.
        ViolationError: The protocol broke one of its promises; names the line as well.
    """
    lines = [line for line in script.splitlines() if not line.startswith(INDENT)]
    with ExitStack() as taken_out:
        return _run(lines, None if as_it_is else taken_out)


def _run(lines: list[str], taken_out: ExitStack | None) -> str:
    stage: Stage | SearchStage = Stage()
    out: list[str] = []
    numbered = iter(list(enumerate(lines, start=1)))
    for number, line in numbered:
        out.append(line)
        if not line or line.startswith("#"):
            continue
        words = line.split()
        if words[0] == "without":
            _take_out(number, line.removeprefix("without "), taken_out)
        elif words[0] == "search":
            with _at(number, line, stage):
                stage = SearchStage.named(*words[1:])
        elif words[0] == "repeat":
            times = _times(number, words)
            body = list(_body(numbered))
            out += (text for _, text in body)
            out.append("end")
            for turn in range(times):
                for inner, text in body:
                    _do(stage, inner, text.replace("%", str(turn)))
            stage.take_story()
        else:
            _do(stage, number, line.removeprefix(QUIETLY))
            if line.startswith(QUIETLY):
                stage.take_story()
            out += (f"{INDENT}{told}" for told in stage.take_story())
    with _at(len(lines), lines[-1] if lines else "", stage):
        stage.end()
    return "\n".join(out) + "\n"


def _take_out(number: int, name: str, taken_out: ExitStack | None) -> None:
    known = mutants()
    if name not in known:
        raise ScenarioError(f"line {number}: without {name}: `pushkv check --mutants` knows none")
    if taken_out is not None:
        taken_out.enter_context(known[name].in_force())


def _times(number: int, words: list[str]) -> int:
    if len(words) != 2 or not words[1].isdigit():
        raise ScenarioError(f"line {number}: {' '.join(words)}: expected repeat and a number")
    return int(words[1])


def _body(numbered: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    for number, line in numbered:
        if line == "end":
            return
        yield number, line
    raise ScenarioError("repeat: expected a line that says end")


def _do(stage: Stage | SearchStage, number: int, line: str) -> None:
    if not line or line.startswith("#"):
        return
    with _at(number, line, stage):
        stage.do(line.split())


@contextmanager
def _at(number: int, line: str, stage: Stage | SearchStage) -> Iterator[None]:
    """What is raised names the line, and tells what came of it until then."""
    try:
        yield
    except (ScenarioError, ViolationError) as error:
        story = "".join(f"\n{INDENT}{told}" for told in stage.take_story())
        raise type(error)(f"line {number}: {line}: {error}{story}") from error


def main(arguments: list[str]) -> int:
    """Run scripts; compare, or rewrite them. Returns the exit code."""
    rewrite = "--rewrite" in arguments
    code = 0
    for path in (Path(each) for each in arguments if each != "--rewrite"):
        before = path.read_text(encoding="utf-8")
        try:
            after = run(before)
        except (ScenarioError, ViolationError) as error:
            sys.stderr.write(f"{path}: {error}\n")
            code = 1
            continue
        if after != before and rewrite:
            path.write_text(after, encoding="utf-8")
        elif after != before:
            old, new = before.splitlines(), after.splitlines()
            changes = unified_diff(old, new, str(path), "what comes out", lineterm="")
            sys.stderr.writelines(f"{line}\n" for line in changes)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
