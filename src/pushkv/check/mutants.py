"""The protocol with one thing taken out of it: each must break a property, or nothing was proven.

A mutant is a row that is ignored, a row that ends in another status, or a rule not in force. It is
killed by the first property that breaks in a configuration, "sometimes" included: every row that
the configuration reaches is reached. Where none breaks, every configuration has exactly the states,
by a digest over all of them, and as many edges as before, and some configuration gets there at all,
the mutant is equivalent within these bounds. What is left survives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from attrs import evolve, frozen

from pushkv.core.ids import Instant
from pushkv.core.table import Row, Rules, Table, replace

from .configurations import STANDARD, Configuration
from .coverage import TABLES
from .patch import Patch
from .pool import workers
from .runner import Limits, Report, check_one
from .taken_out import MISSED_IN, MISTAKES, TAKEN_OUT, rule_of

__all__ = ["Fate", "Mutant", "mutants", "of_rows", "of_rules", "run", "try_one"]


HUNT_STATES = 50_000


@frozen
class Mutant:
    """One thing taken out.

    Attributes:
        rule: Which rule it concerns, such as "R1"; "row" for rows of tables.
        fires: Rows that must fire for it to matter, as (table, row); empty for any.
    """

    name: str
    rule: str
    fires: tuple[tuple[str, str], ...]
    apply: Callable[[Patch], None]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """While this lasts the protocol is without it."""
        patch = Patch()
        try:
            self.apply(patch)
            yield
        finally:
            patch.undo()


@frozen
class Fate:
    """What became of a mutant: killed where and by what, equivalent, or alive.

    Attributes:
        by: The property that broke; "" where none did.
        story: The shortest way there.
        equivalent: No property broke, and every configuration has the states and edges it had; not
            so where the row was never reached.
    """

    name: str
    rule: str
    configuration: str = ""
    by: str = ""
    story: str = ""
    equivalent: bool = False

    @property
    def survives(self) -> bool:
        """Whether it is neither killed nor equivalent."""
        return not self.by and not self.equivalent


# -- rows


def _ignored(row: Row) -> Row:
    return evolve(row, kind="ignore", action=None, targets=frozenset([row.status]))


def _stays(row: Row, table: Table[Any]) -> Row:
    """What it does is done, but the status is kept; where it is kept, the next one is taken."""
    statuses = tuple(table.statuses)
    following = statuses[(statuses.index(row.status) + 1) % len(statuses)]
    action = row.action
    assert action is not None, "only rows that act are retargeted"

    def astray(state: Any, event: Any, now: Instant, rules: Rules) -> Any:
        after, effects = action(state, event, now, rules)
        status: StrEnum = state.status if after.status is not state.status else following
        return replace(after, status=status), effects

    return evolve(row, action=astray, targets=frozenset(statuses))


def _row_mutant(table: Table[Any], row: Row, kind: str) -> Mutant:
    def apply(patch: Patch) -> None:
        patch.row(table, _ignored(row) if kind == "dropped" else _stays(row, table))

    return Mutant(f"{kind}: {row.name}", "row", ((table.name, row.name),), apply)


def of_rows() -> tuple[Mutant, ...]:
    """Each acting row of each table, dropped and retargeted."""
    return tuple(
        _row_mutant(table, row, kind)
        for table in TABLES
        for row in table.rows.values()
        if row.kind == "go"
        for kind in ("dropped", "retargeted")
    )


def of_rules() -> tuple[Mutant, ...]:
    """Each rule taken out, in each way there is, and other mistakes."""
    found = TAKEN_OUT | MISTAKES
    return tuple(Mutant(name, rule_of(name), (), apply) for name, apply in found.items())


def mutants() -> dict[str, Mutant]:
    """All of them, by name: rules first."""
    return {each.name: each for each in (*of_rules(), *of_rows())}


# -- trials


def try_one(mutant: Mutant, baseline: Sequence[tuple[Configuration, Report]]) -> Fate:
    """Search with `mutant` in force, the smallest configuration first, until something breaks.

    Args:
        mutant: What is taken out.
        baseline: Configurations, and what their searches with fingerprints come to without it.
    """
    fate = Fate(mutant.name, mutant.rule)
    if mutant.name in MISSED_IN:
        fate = _hunt(mutant, fate, {each.name for each in STANDARD} - {MISSED_IN[mutant.name]})
        if fate.by:
            return fate
    same, fired = True, False
    for configuration, before in sorted(baseline, key=lambda each: each[1].states):
        if mutant.fires and not before.rows.intersection(mutant.fires):
            continue
        fired = True
        limits = Limits(states=4 * before.states + 10_000)
        name = configuration.name
        try:
            with mutant.in_force():
                report = check_one(configuration, limits, fingerprint=True)
        except Exception as error:  # noqa: BLE001 - whatever it breaks, it breaks
            return evolve(fate, configuration=name, by="no exception", story=repr(error))
        for told in report.violations:
            return evolve(fate, configuration=name, by=told.broken[0][0], story=told.story)
        missed = sorted(before.rows - report.rows)
        if report.complete and missed:
            by = f"sometimes {missed[0][1]}"
            return evolve(fate, configuration=name, by=by, story=f"{by}: never reached")
        found = report.complete, report.fingerprint, report.edges
        same = same and found == (before.complete, before.fingerprint, before.edges)
    fate = evolve(fate, equivalent=same and fired)
    if mutant.rule == "row":
        return fate
    return _hunt(mutant, fate, {each.name for each, _ in baseline})


def _hunt(mutant: Mutant, fate: Fate, known: set[str]) -> Fate:
    """Rules are also missed in the larger configurations; first where they are known to be."""
    for configuration in sorted(STANDARD, key=lambda each: each.name != MISSED_IN.get(mutant.name)):
        if configuration.name in known:
            continue
        with mutant.in_force():
            report = check_one(configuration, Limits(states=HUNT_STATES))
        for told in report.violations:
            return Fate(mutant.name, mutant.rule, configuration.name, told.broken[0][0], told.story)
    return fate


def _baseline(configuration: Configuration) -> Report:
    return check_one(configuration, fingerprint=True)


def _try(name: str, baseline: Sequence[tuple[Configuration, Report]]) -> Fate:
    return try_one(mutants()[name], baseline)


def run(
    names: Sequence[str],
    configurations: Sequence[Configuration],
    *,
    jobs: int = 2,
    done: Callable[[Fate], None] | None = None,
) -> list[Fate]:
    """Try the named mutants, `jobs` at a time; `done` hears of each. Blocks until all are tried."""
    with workers(jobs) as pool:
        before = list(pool.map(_baseline, configurations))
        baseline = tuple(zip(configurations, before, strict=True))
        trials = [pool.submit(_try, name, baseline) for name in names]
        for trial in as_completed(trials):
            if done is not None:
                done(trial.result())
        return [trial.result() for trial in trials]
