"""The fates of all mutants are kept; they are those of this core, and some are tried again here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pushkv.check import kept as keeping
from pushkv.check.configurations import by_name
from pushkv.check.digest import code_digest, core_digest
from pushkv.check.kept import EQUIVALENT_MOST, KEPT, RENEW, Keeper, chosen, read, summary
from pushkv.check.mutants import mutants
from pushkv.check.patch import Patch
from pushkv.check.scripts import FOLDERS, find
from pushkv.check.trials import Baseline, Fate, searched, try_one
from pushkv.cli import mutants as command
from pushkv.cli.app import app
from pushkv.core.consumer import QUARANTINED
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.events import Tick
from pushkv.testing.scenario import run as run_script

AGAIN = 30
"""How many fates are found out again on every run of the tests; which ones, the digest says."""
STATES_MOST = 25_000
ROOT = Path(__file__).parents[2]
DIGEST, FATES = read(KEPT)
SCRIPTS = sorted(FOLDERS[1].glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_about_rows_comes_out_as_it_is_written(path: Path) -> None:
    script = path.read_text(encoding="utf-8")
    assert run_script(script) == script, "run `make scenarios` and look at what has changed"
    assert script.splitlines()[1].startswith("# ")
    assert "\n# Expected: " in script


def test_the_kept_fates_are_those_of_this_core() -> None:
    stale = sorted({*FATES} ^ {*mutants()})
    assert (DIGEST, stale) == (core_digest(), []), f"they are stale: run `{RENEW}`"


def test_no_mutant_survives_and_few_change_nothing() -> None:
    assert [fate.name for fate in FATES.values() if fate.survives] == []
    assert sum(fate.equivalent for fate in FATES.values()) < EQUIVALENT_MOST * len(FATES)


def quickly() -> list[str]:
    """The mutants that are killed by a script, or in a small configuration."""
    return [name for name, fate in FATES.items() if fate.by == "scenario" or fate.where in SMALL]


SMALL = ("delivers-in-time", "delivers-weak", "streaming-faults", "asked-when-done")


@pytest.mark.parametrize("name", chosen(DIGEST, quickly(), AGAIN))
def test_what_is_kept_is_found_again(name: str) -> None:
    fate = FATES[name]
    if fate.by == "scenario":
        baseline = Baseline((find(fate.where),), ())
    else:
        baseline = Baseline((), (searched(by_name(fate.where)),))
    again = try_one(mutants()[name], baseline)
    assert (again.by, again.where) == (fate.by, fate.where), again.story


def test_others_are_chosen_for_another_core() -> None:
    names = sorted(FATES)
    first = chosen("one", names, AGAIN)
    assert len(first) == len(set(first)) == AGAIN
    assert first == chosen("one", reversed(names), AGAIN)
    assert set(first) != set(chosen("other", names, AGAIN))


CODE = '''
"""What it is."""
NUMBER = 3
"""Of something."""
def _build():
    return 1
def double(value: int) -> int:
    """Twice as much."""
    return value * 2  # as it says
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("Twice as much", "It doubles", True),
        ("# as it says", "# truly", True),
        ("Of something", "Of nothing", True),
        ("return 1", "return 0", True),
        ("value * 2", "(value\n    * 2)", True),
        ("value * 2", "value * 3", False),
        ("NUMBER = 3", "NUMBER = 4", False),
    ],
)
def test_only_what_the_code_does_counts(old: str, new: str, same: bool) -> None:
    assert old in CODE
    assert (code_digest(CODE) == code_digest(CODE.replace(old, new))) is same


def test_a_row_that_is_other_makes_the_fates_stale() -> None:
    before = core_digest()
    patch = Patch()
    mutants()["dropped: consumer.quarantined/Tick"].apply(patch)
    try:
        assert CONSUMER.rows[QUARANTINED, Tick].kind == "ignore"
        assert core_digest() != before
    finally:
        patch.undo()
    assert core_digest() == before


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_hash_seed_changes_no_digest(seed: str) -> None:
    code = "from pushkv.check.digest import core_digest\nprint(core_digest())\n"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert ran.stdout.strip() == core_digest()


KILLED = Fate("one", "row", "retry", "I1", "how")
SAME = Fate("two", "row", equivalent=True)
ALIVE = Fate("three", "R1")


def test_fates_come_back_as_they_were_kept(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    keeping.write(path, [KILLED, SAME, ALIVE])
    digest, fates = read(path)
    assert digest == core_digest()
    assert fates["one"] == Fate("one", "row", "retry", "I1")
    assert fates["two"] == SAME
    assert fates["three"].survives
    assert summary([KILLED, SAME, ALIVE]) == {
        "mutants": 3,
        "killed": 1,
        "equivalent": 1,
        "survivors": ["three"],
    }


def test_a_run_that_was_cut_off_is_taken_up(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    assert keeper.known() == {}
    keeper.keep(KILLED)
    keeper.keep(SAME)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:-9])
    assert Keeper(tmp_path).known() == {"one": KILLED}


def mutate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fates: list[Fate]) -> tuple[int, str]:
    """Run the command where all fates but none are known."""
    names = {each.name: each for each in fates}
    monkeypatch.setattr(command, "mutants", lambda: names)
    for fate in fates:
        Keeper(tmp_path / "rest").keep(fate)
    out = tmp_path / "found.json"
    arguments = ["check", "--mutants", "--checkpoints", str(tmp_path / "rest"), "--json", str(out)]
    ran = CliRunner().invoke(app, arguments)
    assert json.loads(out.read_text())["mutants"] == len(fates)
    return ran.exit_code, ran.output


def test_the_command_fails_for_a_survivor_or_too_many_that_change_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    many = [Fate(f"{number}", "row", "retry", "I1") for number in range(21)]
    assert mutate(monkeypatch, tmp_path / "all", many)[0] == 0
    assert mutate(monkeypatch, tmp_path / "few", [*many, SAME])[0] == 0
    assert mutate(monkeypatch, tmp_path / "equal", [KILLED, SAME])[0] == 1
    code, printed = mutate(monkeypatch, tmp_path / "alive", [*many, ALIVE])
    assert code == 1
    assert "three: SURVIVES" in printed
