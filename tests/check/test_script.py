"""A path through a search is a script, and the script goes the same way again."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from pushkv.check.configurations import STANDARD, by_name
from pushkv.check.lines import line_of
from pushkv.check.moves import KINDS
from pushkv.check.mutants import mutants
from pushkv.check.script import HoldsError, ImpossibleError
from pushkv.check.search import NO_LIMITS
from pushkv.check.wide import WIDE
from pushkv.check.world import World
from pushkv.cli.app import app
from pushkv.cli.scenarios import search_without
from pushkv.core.errors import ConfigurationError
from pushkv.testing.scenario import ScenarioError, run
from pushkv.testing.world import ViolationError

WALKS, STEPS = 4, 40
COMMANDS = ("expect", "peace", "repeat", "search", "without")
STORY = """\
search nothing-to-send
d offers a
    d dials p
    d is told: a/0 delivered
p gets a
connect d p
deliver p d HELLO link=1
    d → p REGISTER a/0
deliver d p HELLO link=1
deliver d p REGISTER a/0 link=1
    p → d REGISTERED a/0
p computes a tokens=1
    p → d COMPLETE a/0 of nothing
    p is told: a source is free
peace
    d deadline a/0 from=p: asks again
    d → p REGISTER a/0
    d deadline a/0 from=p: has waited too long
    d → p REVOKE a/0
    d deadline link to p: suspects its link
    d is told: a/0 blocks are free
expect nothing broken
"""


def violation(name: str, configuration: str) -> str:
    (report,) = search_without(name, [by_name(configuration)], NO_LIMITS)
    (told,) = report.violations
    return told.scenario


def replay(text: str, path: Path) -> tuple[int, str]:
    path.write_text(text, encoding="utf-8")
    ran = CliRunner().invoke(app, ["check", "--replay", str(path)])
    return ran.exit_code, ran.output


def test_every_move_has_a_line_of_its_own() -> None:
    """On walks through each configuration; and every kind of move is somewhere on the way."""
    kinds: set[str] = set()
    chance = Random(5)
    for configuration in (*STANDARD, *WIDE):
        world = World(configuration)
        for _ in range(WALKS):
            state = world.initial()
            for _ in range(STEPS):
                following = world.successors(state)
                lines = dict[str, object]()
                for move, after, _ in following:
                    kinds.add(move.kind)
                    line = line_of(world, state, move)
                    assert lines.setdefault(line, after) == after, f"{configuration.name}: {line}"
                    assert line == " ".join(line.split())
                    assert line.split()[0] not in COMMANDS
                if not following:
                    break
                kind = chance.choice(sorted({move.kind for move, _, _ in following}))
                of_kind = [after for move, after, _ in following if move.kind == kind]
                state = chance.choice(of_kind)
    assert kinds == set(KINDS)


def test_what_is_told_is_what_happened() -> None:
    bare = "".join(f"{line}\n" for line in STORY.splitlines() if not line.startswith(" "))
    assert run(bare) == run(STORY) == STORY


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("search everything", "expected one of cancel, "),
        ("search cancel shallow", "expected one of cancel, "),
        ("without cancels", "`pushkv check --mutants` knows none"),
        ("expect broken I9", "expected nothing broken, or broken and one of I1, "),
        ("expect broken I1", "I1 is not broken"),
        ("expect a delivered", "expected nothing broken, or broken and one of I1, "),
        ("d cancels a", "not possible here; what is: "),
    ],
)
def test_what_is_wrong_is_named_with_its_line(line: str, what: str) -> None:
    lines = [each for each in STORY.splitlines() if not each.startswith(" ")]
    with pytest.raises(ScenarioError) as caught:
        run("\n".join([*lines, line]))
    assert str(caught.value).startswith(f"line {len(lines) + 1}: {line}")
    assert what in str(caught.value)


def test_a_violation_is_written_and_made_again(tmp_path: Path) -> None:
    arguments = ["check", "--config", "ends", "--without", "link end frees"]
    ran = CliRunner().invoke(app, [*arguments, "--scenarios", str(tmp_path / "found")])
    assert ran.exit_code == 1, ran.output
    (path,) = (tmp_path / "found").iterdir()
    assert path.name == "ends-I1.txt"
    assert f"written: {path}" in ran.output
    text = path.read_text(encoding="utf-8")
    assert run(text) == text
    first, second, third, *commands = text.splitlines()
    assert first == f"# ends: {by_name('ends').purpose}"
    assert second.startswith("# I1 is broken (no byte lands in a block")
    assert third == "# Before: p gets, d offers; whatever they sent has come."
    assert commands[:2] == ["without link end frees", "search ends"]
    assert commands[-1] == "expect broken I1"
    code, output = replay(text, path)
    assert code == 0
    assert "without link end frees: broken, as the script says\n" in output
    assert re.search(r"^as it is: holds, line \d+: .*\w", output, re.MULTILINE)


def test_what_is_broken_as_it_is_fails(tmp_path: Path) -> None:
    text = violation("link end frees", "ends").replace("without link end frees\n", "")
    with mutants()["link end frees"].in_force():
        code, output = replay(text, tmp_path / "broken.txt")
    assert (code, output) == (1, "as it is: broken, as the script says\n")
    code, output = replay(text, tmp_path / "whole.txt")
    assert code == 0
    assert output.startswith("as it is: holds, line ")


def test_a_step_that_is_not_possible_any_more_is_named(tmp_path: Path) -> None:
    text = violation("no permit", "ends")
    (post,) = [each for each in text.splitlines() if each.startswith("p posts ")]
    code, output = replay(text, tmp_path / "permit.txt")
    assert code == 0
    assert f": {post}: not possible here; what is: " in output


def test_another_violation_than_the_script_says_is_one(tmp_path: Path) -> None:
    text = violation("link end frees", "ends").replace("expect broken I1", "expect broken I2")
    code, output = replay(text, tmp_path / "other.txt")
    assert code == 2
    assert "what breaks" in output
    longer = text.replace("expect broken I2", "time passes\nexpect broken I2")
    with pytest.raises(ViolationError, match=r"^line \d+: time passes: I1: part 0 of "):
        run(longer)


def test_a_violation_that_nobody_expects_is_raised() -> None:
    text = violation("link end frees", "ends").replace("expect broken I1\n", "")
    with pytest.raises(ViolationError, match="I1: part 0 of "):
        run(text)


@pytest.mark.parametrize("text", ["engines d p\n", "search cancel\nd offers a\n"])
def test_a_script_of_no_violation_is_refused(text: str, tmp_path: Path) -> None:
    code, output = replay(text, tmp_path / "none.txt")
    assert code == 2
    assert "expect broken" in output


def test_an_unknown_mutant_is_named() -> None:
    with pytest.raises(ConfigurationError, match="cancels"):
        search_without("cancels", [by_name("ends")], NO_LIMITS)


def test_what_never_ends_is_looked_for_from_there(tmp_path: Path) -> None:
    text = violation("failed parts are owed", "delivers-retried")
    assert text.endswith("\nexpect broken ends\n")
    assert "\nwithout failed parts are owed\nsearch delivers-retried\n" in text
    assert run(text) == text
    with pytest.raises((HoldsError, ImpossibleError)):
        run(text, as_it_is=True)
