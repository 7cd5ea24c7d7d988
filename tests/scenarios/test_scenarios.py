"""Every script comes out as it is written; and a script can fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.core.taken_out import without

from pushkv.testing.scenario import ScenarioError, main, run
from pushkv.testing.scenario_words import Words
from pushkv.testing.world import ViolationError

FOLDER = Path(__file__).parent
SCRIPTS = sorted(FOLDER.glob("*.txt"))
LIST = FOLDER.parents[1] / "docs" / "scenarios.md"

STORY = """\
engines d p
p prefills a
d offers a to p
    0.00s d dials p
    0.00s d → p REGISTER a/0
    0.00s p → d REGISTERED a/0
    0.00s p orders WRITE a/0 part 0, tokens [0, 8)
    0.00s p → d COMPLETE a/0 [0, 8)
    0.00s p is told: a source is free
    0.00s d is told: a/0 delivered
    0.00s d is told: a/0 blocks are free
    0.00s d → p RECEIVED a/0
    0.00s d counts late (ArrivalSeen)
expect d a delivered
"""


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_it_comes_out_as_it_is_written(path: Path) -> None:
    script = path.read_text(encoding="utf-8")
    assert run(script) == script, "run `make scenarios` and look at what has changed"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_it_says_where_it_comes_from_and_what_it_expects(path: Path) -> None:
    first, second, *rest = path.read_text(encoding="utf-8").splitlines()
    number = re.fullmatch(r"# (B\d+) \S.*", first)
    assert number is not None
    assert path.stem.startswith(f"{number[1].lower()}_")
    assert re.fullmatch(r"# https://\S+", second)
    assert any(line.startswith("# Expected: ") for line in rest)
    assert any(line.startswith("expect ") for line in rest)


def test_the_list_names_every_script_and_no_test_that_is_not_there() -> None:
    text = LIST.read_text(encoding="utf-8")
    linked = re.findall(r"\]\(\.\./tests/scenarios/(\w+)\.txt\)", text)
    assert sorted(linked) == [path.stem for path in SCRIPTS]
    rows = re.findall(r"^\| (B\d+) \| .* \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == len({number for number, _ in rows}) > 60
    for number, tested in rows:
        stems = re.findall(r"/(b\d+)_", tested)
        assert {stem.upper() for stem in stems} <= {number}
        where = ""
        for name in re.findall(r"`([\w/.]+)`", tested):
            where = name if "/" in name else where
            if name.startswith("test_"):
                assert f"def {name}(" in (LIST.parents[1] / where).read_text(encoding="utf-8")
    short = set(re.findall(r"B\d+", text.partition("## Where pushkv falls short")[2]))
    assert short == {number for number, tested in rows if tested.endswith("see below")}


def test_every_word_of_a_script_is_described() -> None:
    text = LIST.read_text(encoding="utf-8")
    described = set(re.findall(r"[a-z]+", text.partition("## The words of a script")[2]))
    words = {name.split("_", 2)[2] for name in dir(Words) if name.startswith("of_")}
    assert words <= described


def test_the_story_is_what_happened() -> None:
    assert run(STORY) == STORY
    bare = "".join(f"{line}\n" for line in STORY.splitlines() if not line.startswith(" "))
    assert run(bare) == STORY


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("expect d a failed gone", "it is ['delivered', 'released']"),
        ("expect d a exposed", "it is ['delivered', 'released']"),
        ("expect d counts late 3", "it is 1"),
        ("expect d free 63", "it is 64"),
        ("expect d sent REGISTER 2", "it is 1"),
        ("expect d dialed 2", "it is 1"),
        ("expect d keeps links 0", "it is 1"),
        ("expect p pins a", "its source is free"),
        ("expect p freed a expired", "it is "),
        ("expect p freed b", "its source was freed 0 times"),
        ("expect p a is HOLDING", "it is ['DONE']"),
        ("expect q a delivered", "there is no engine 'q'"),
        ("expect d b delivered", "d has offered no b"),
        ("expect d a happy", "expected one of"),
        ("d sings a", "no such word"),
        ("d offers a", "missing a required argument: 'to'"),
        ("p posts a", "no such WRITE of p is open"),
        ("again p d FAILED", "p has sent no FAILED"),
        ("drop p d FAILED", "no FAILED waits"),
        ("deliver p d", "nothing waits there"),
        ("wait long", "could not convert"),
        ("d offers b to p tokens=4000", "1000 blocks are wanted"),
        ("p computes a", "'a'"),
        ("repeat", "expected repeat and a number"),
        ("repeat 2", "expected a line that says end"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(line: str, what: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        run(f"{STORY}{line}\n")
    assert what in str(caught.value)
    commands = [each for each in STORY.splitlines() if not each.startswith(" ")]
    if not line.startswith("repeat 2"):
        assert str(caught.value).startswith(f"line {len(commands) + 1}: ")


def test_what_is_repeated_is_told_once() -> None:
    told = run("engines d p\nd offers a to p\nwait 3\n")
    assert "    1.00s d → p QUERY a/0, 3 times until 3.00s\n" in told


@pytest.mark.parametrize(
    ("script", "rule", "what"),
    [
        ("b30_the_drain_outlives_the_request", "cancel frees", "I1"),
        ("b79_gone_and_back_at_once", "no permit", "I1"),
        ("b40_done_before_visible", "done is taken for visible", "I2"),
        ("b02_the_only_completion_is_lost", "nothing remembered", "failed"),
        ("b01_a_write_that_cannot_be_posted", "first rank frees", "released"),
        ("b29_abort_while_a_write_is_under_way", "cancel frees", "it is 8"),
    ],
)
def test_without_its_rule_a_script_breaks(script: str, rule: str, what: str) -> None:
    text = (FOLDER / f"{script}.txt").read_text(encoding="utf-8")
    with without(rule), pytest.raises((ViolationError, ScenarioError)) as caught:
        run(text)
    assert str(caught.value).startswith("line ")
    assert what in str(caught.value).partition("\n")[0]


def test_the_command_compares_and_rewrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "story.txt"
    path.write_text(STORY.replace("REGISTERED", "GIFT"), encoding="utf-8")
    assert main([str(path)]) == 1
    assert "-    0.00s p → d GIFT a/0" in capsys.readouterr().err
    assert main(["--rewrite", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == STORY
    assert main([str(path)]) == 0
    path.write_text(STORY + "expect d a waits\n", encoding="utf-8")
    assert main(["--rewrite", str(path)]) == 1
    assert f"{path}: line 5: expect d a waits: it is" in capsys.readouterr().err
