"""Violations as scenario scripts: what `pushkv check` writes, and makes again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from attrs import evolve
from rich.console import Console

from pushkv.check.bounds import Configuration
from pushkv.check.mutants import mutants
from pushkv.check.runner import Report, check_one
from pushkv.check.script import HoldsError, ImpossibleError, without
from pushkv.check.search import Limits
from pushkv.core.errors import ConfigurationError
from pushkv.testing.scenario import run
from pushkv.testing.scenario_world import ScenarioError
from pushkv.testing.world import ViolationError

__all__ = [
    "ReplayOption",
    "ScenariosOption",
    "WithoutOption",
    "run_replay",
    "search_without",
    "write_scenarios",
]

WithoutOption = Annotated[
    str,
    typer.Option(
        help="Take this rule or row out first: one of those that --mutants names, such as "
        "'cancel frees'."
    ),
]
ScenariosOption = Annotated[
    Path | None,
    typer.Option(
        help="Write each violation there, as a scenario script that makes it again.",
        file_okay=False,
    ),
]
ReplayOption = Annotated[
    Path | None,
    typer.Option(
        help="Search nothing: make the violation of this script again.",
        exists=True,
        dir_okay=False,
    ),
]


def search_without(
    name: str, configurations: Sequence[Configuration], limits: Limits
) -> list[Report]:
    """Search in this process, with one thing taken out, until something breaks.

    Raises:
        ConfigurationError: There is no mutant of that name.
    """
    known = mutants()
    if name not in known:
        raise ConfigurationError("without", name, "one of those that --mutants names")
    reports: list[Report] = []
    for configuration in configurations:
        with known[name].in_force():
            report = check_one(configuration, limits)
        told = tuple(
            evolve(each, scenario=without(name, each.scenario)) for each in report.violations
        )
        reports.append(evolve(report, violations=told))
        if told:
            break
    return reports


def write_scenarios(directory: Path, reports: Iterable[Report]) -> list[Path]:
    """Write each violation as `<configuration>-<property>.txt`. Returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for report in reports:
        for told in report.violations:
            name = f"{report.name}-{told.broken[0][0]}.txt".replace(" ", "-")
            paths.append(directory / name)
            paths[-1].write_text(told.scenario, encoding="utf-8")
    return paths


def run_replay(path: Path) -> bool:
    """Make a violation again: as its script says, and with no rule taken out.

    Returns whether nothing breaks while no rule is taken out.

    Raises:
        ConfigurationError: It is no script of a violation, or does not break what it says while its
            rule is taken out.
    """
    console = Console()
    script = path.read_text(encoding="utf-8")
    commands = [line for line in script.splitlines() if not line.startswith((" ", "#"))]
    if not any(line.startswith("expect broken ") for line in commands):
        raise ConfigurationError("replay", str(path), "a script that says `expect broken`")
    for line in commands:
        if line.startswith("without "):
            _, told = _replay(path, script, as_it_is=False)
            console.print(f"{line}: {told}", highlight=False, markup=False, soft_wrap=True)
    holds, told = _replay(path, script, as_it_is=True)
    console.print(f"as it is: {told}", highlight=False, markup=False, soft_wrap=True)
    return holds


def _replay(path: Path, script: str, *, as_it_is: bool) -> tuple[bool, str]:
    """Whether the property holds, and what is to be said of it."""
    try:
        run(script, as_it_is=as_it_is)
    except (HoldsError, ImpossibleError) as error:
        if not as_it_is:
            raise ConfigurationError("replay", str(path), f"what breaks: {error}") from error
        return True, f"holds, {error}"
    except ViolationError as error:
        return False, f"broken, {error}"
    except ScenarioError as error:
        raise ConfigurationError("replay", str(path), f"a script: {error}") from error
    return False, "broken, as the script says"
