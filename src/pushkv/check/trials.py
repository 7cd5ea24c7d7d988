"""What becomes of each mutant: killed by a script or a property, equivalent, or alive.

Scenario scripts come first, since they take no time: one that does not come out as it is written
kills. Then every configuration that fires the row is searched, the smallest first, until a property
breaks, "sometimes" included: every row that the configuration reaches is reached. Neither is done
where a mutant of a row makes no difference at any step of the run without it (`felt`): it would be
the same run. Rules are first looked for where they are known to be missed, so that each has its
shortest trace. Where nothing breaks, every configuration has exactly the states, by a digest over
all of them, and as many edges as before, and some configuration or script gets there at all, the
mutant is equivalent within these bounds. What is left survives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed

from attrs import evolve, frozen

from .configurations import STANDARD, Configuration
from .felt import feeling
from .known import MISSED_IN
from .mutants import Mutant, mutants
from .pool import workers
from .runner import Limits, Report, check_one
from .scripts import Script, scripts

__all__ = ["Baseline", "Fate", "Searched", "run", "searched", "try_one"]

HUNT_STATES = 50_000


@frozen
class Fate:
    """What became of a mutant: killed where and by what, equivalent, or alive.

    Attributes:
        where: The configuration, or the script.
        by: The property that broke, or "scenario"; "" where none did.
        story: The shortest way there, or what the script says otherwise.
        equivalent: Nothing broke, and every configuration has the states and edges it had; not so
            where the row was never reached.
    """

    name: str
    rule: str
    where: str = ""
    by: str = ""
    story: str = ""
    equivalent: bool = False

    @property
    def survives(self) -> bool:
        """Whether it is neither killed nor equivalent."""
        return not self.by and not self.equivalent

    @property
    def told(self) -> str:
        """How it ended, in a word."""
        return "SURVIVES" if self.survives else "equivalent" if self.equivalent else "killed"


@frozen
class Searched:
    """What the search of a configuration comes to, and which mutants of rows are felt in it."""

    configuration: Configuration
    report: Report
    felt: frozenset[str]


@frozen
class Baseline:
    """What scripts and searches come to while nothing is taken out."""

    scripts: tuple[Script, ...]
    searches: tuple[Searched, ...]


def searched(configuration: Configuration) -> Searched:
    """Search a configuration with nothing taken out, in this process."""
    with feeling() as felt:
        report = check_one(configuration, fingerprint=True)
    return Searched(configuration, report, frozenset(felt))


def try_one(mutant: Mutant, baseline: Baseline) -> Fate:
    """Try `mutant` on scripts and in searches, the cheapest first, until something breaks."""
    fate = Fate(mutant.name, mutant.rule)
    here = MISSED_IN.get(mutant.name)
    if here is not None:
        fate = _hunt(mutant, fate, [each for each in STANDARD if each.name == here])
    if not fate.by:
        fate = _in_scripts(mutant, fate, baseline.scripts)
    if not fate.by:
        fate = _in_searches(mutant, fate, baseline)
    if fate.by or mutant.rule == "row":
        return fate
    known = {here, *(each.configuration.name for each in baseline.searches)}
    return _hunt(mutant, fate, [each for each in STANDARD if each.name not in known])


def _felt(mutant: Mutant, felt: frozenset[str]) -> bool:
    """Whether a run may be another one with the mutant in force."""
    return mutant.row is None or mutant.name in felt


def _in_scripts(mutant: Mutant, fate: Fate, scripts: Sequence[Script]) -> Fate:
    for script in scripts:
        if not _felt(mutant, script.felt):
            continue
        with mutant.in_force():
            broken = script.broken()
        if broken:
            return evolve(fate, where=script.name, by="scenario", story=broken)
    return fate


def _in_searches(mutant: Mutant, fate: Fate, baseline: Baseline) -> Fate:
    fires = frozenset(mutant.fires)
    same, fired = True, not fires or any(fires & script.rows for script in baseline.scripts)
    for search in sorted(baseline.searches, key=lambda each: each.report.states):
        before, name = search.report, search.configuration.name
        fired = fired or bool(fires & before.rows)
        if not _felt(mutant, search.felt):
            continue
        limits = Limits(states=4 * before.states + 10_000)
        try:
            with mutant.in_force():
                report = check_one(search.configuration, limits, fingerprint=True)
        except Exception as error:  # noqa: BLE001 - whatever it breaks, it breaks
            return evolve(fate, where=name, by="no exception", story=repr(error))
        for told in report.violations:
            return evolve(fate, where=name, by=told.broken[0][0], story=told.story)
        missed = sorted(before.rows - report.rows)
        if report.complete and missed:
            by = f"sometimes {missed[0][1]}"
            return evolve(fate, where=name, by=by, story=f"{by}: never reached")
        found = report.complete, report.fingerprint, report.edges
        same = same and found == (before.complete, before.fingerprint, before.edges)
    return evolve(fate, equivalent=same and fired)


def _hunt(mutant: Mutant, fate: Fate, configurations: Sequence[Configuration]) -> Fate:
    """Rules are also missed in configurations too large to be exhausted for each mutant."""
    for configuration in configurations:
        with mutant.in_force():
            report = check_one(configuration, Limits(states=HUNT_STATES))
        for told in report.violations:
            return evolve(
                fate,
                where=configuration.name,
                by=told.broken[0][0],
                story=told.story,
                equivalent=False,
            )
    return fate


def _try(name: str, baseline: Baseline) -> Fate:
    return try_one(mutants()[name], baseline)


def run(
    names: Sequence[str],
    configurations: Sequence[Configuration],
    *,
    jobs: int = 2,
    known: Mapping[str, Fate] | None = None,
    done: Callable[[Fate], None] | None = None,
) -> list[Fate]:
    """Try the named mutants, `jobs` at a time, but for those whose fate is `known` already.

    `done` hears of each that was tried. Blocks until all are tried.
    """
    fates = dict(known or {})
    rules = {name for name, each in mutants().items() if each.rule != "row"}
    left = [name for name in names if name not in fates]
    left.sort(key=lambda name: name in rules)  # those first that take the least time
    if left:
        with workers(jobs) as pool:
            before = pool.map(searched, configurations)
            baseline = Baseline(scripts(), tuple(before))
            trials = [pool.submit(_try, name, baseline) for name in left]
            for trial in as_completed(trials):
                fate = trial.result()
                fates[fate.name] = fate
                if done is not None:
                    done(fate)
    return [fates[name] for name in names]
