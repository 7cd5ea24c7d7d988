"""One request's life, read from the traces of real engines, and what is refused as none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.node import Node, until
from typer.testing import CliRunner

from pushkv.cli.trace import trace_app
from pushkv.core.errors import ConfigurationError
from pushkv.core.events import Cancelled
from pushkv.core.ids import TransferId
from pushkv.observe.story import find_transfer, read_stories
from pushkv.observe.timeline import read_timelines
from pushkv_memory import MemoryFabric

PROMPT = tuple(range(100))
STEP_OF_LINK = ("step", "link")
Line = dict[str, Any]
Paths = dict[str, Path]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """Two transfers that are done, one in each order, and one that the consumer gives up."""
    folder = tmp_path_factory.mktemp("stories")
    paths = {name: folder / f"{name}.ndjson" for name in ("P", "D")}
    fabric = MemoryFabric()
    with (
        Node(fabric, "P", trace_path=paths["P"]) as producer,
        Node(fabric, "D", trace_path=paths["D"]) as consumer,
    ):
        waits = consumer.consume("cmpl-early-0", PROMPT, producer.address)
        producer.produce("cmpl-early-0", PROMPT).result(10)
        assert waits.result(10).tokens
        producer.produce("cmpl-late-0", PROMPT).result(10)
        assert consumer.consume("cmpl-late-0", PROMPT, producer.address).result(10).tokens
        gone = consumer.consume("cmpl-late", PROMPT, producer.address)
        until(lambda: any('"cmpl-late"' in each for each in registrations(paths["P"])))
        consumer.runtime.bridge.submit(Cancelled(TransferId("cmpl-late")))
        assert gone.result(10).reason is not None
    return paths


def registrations(path: Path) -> list[str]:
    """The steps of a producer that may still be running, in which it takes a registration."""
    return [each for each in path.read_text().splitlines() if '"RegistrationReceived"' in each]


def read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, lines: list[Line]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    found = CliRunner().invoke(trace_app, list(map(str, arguments)), env={"COLUMNS": "200"})
    return found.exit_code, found.stdout, found.stderr


def test_phases_are_when_the_other_reader_says(paths: Paths) -> None:
    stories = read_stories(list(paths.values()))
    timelines = read_timelines(paths["P"], paths["D"])
    for name in ("cmpl-early-0", "cmpl-late-0"):
        story, timeline = stories.transfers[TransferId(name)], timelines[TransferId(name)]
        ends = {each.name: (each.begin, each.end) for each in story.phases}
        assert story.outcome == "delivered"
        assert ends["registration"][1] == timeline.registered_at
        assert ends["prefill"][1] == timeline.prefilled_at
        assert ends["write"] == (timeline.write_began_at, timeline.written_at)
        assert ends["admission"][1] == timeline.delivered_at
        assert ends["registration"][0] <= ends["write"][0] <= ends["notify"][0]
    given_up = stories.transfers[TransferId("cmpl-late")]
    assert given_up.outcome == "not delivered: cancelled"
    assert given_up.lasted("release") is not None


def test_each_event_is_told_once_in_order_with_its_engine_and_reason(
    paths: Paths, tmp_path: Path
) -> None:
    out = tmp_path / "story.json"
    code, shown, _ = run("view", *paths.values(), "--transfer", "early", "--json", out)
    assert code == 0
    [story] = json.loads(out.read_bytes())["transfers"]
    events = story["events"]
    steps = [
        line["row"]
        for path in paths.values()
        for line in read(path)
        if line["kind"] == "step" and "cmpl-early-0" in str(line["key"])
    ]
    assert sorted(each["row"] for each in events if each["row"]) == sorted(steps)
    assert [each["at_ns"] for each in events] == sorted(each["at_ns"] for each in events)
    assert all(each["why"] for each in events if each["row"])
    order = [
        next(at for at, each in enumerate(events) if each["engine"] == who and part in each["what"])
        for who, part in (
            ("D:0", "blocks offered"),
            ("D:0", "send REGISTER"),
            ("P:0", "REGISTER came"),
            ("P:0", "order WRITE"),
            ("P:0", "ended: done"),
            ("P:0", "send COMPLETE"),
            ("D:0", "outcome: delivered"),
            ("P:0", "RECEIVED came"),
        )
    ]
    assert order == sorted(order)
    assert "blocks released" in shown
    assert "\x1b" not in shown, "no colour where there is no terminal"


def test_the_list_has_each_transfer_with_its_outcome(paths: Paths) -> None:
    code, shown, _ = run("view", *paths.values())
    rows = {line.split()[0]: line for line in shown.splitlines()[2:]}
    assert code == 0
    assert set(rows) == {"cmpl-early-0", "cmpl-late-0", "cmpl-late"}
    assert "not delivered: cancelled" in rows["cmpl-late"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cmpl-late", "cmpl-late"),  # whole, though it is the beginning of another
        ("cmpl-e", "cmpl-early-0"),
        ("late-0", "cmpl-late-0"),
        ("early", "cmpl-early-0"),
    ],
)
def test_a_transfer_is_found_by_what_names_it_alone(paths: Paths, name: str, expected: str) -> None:
    assert find_transfer(read_stories(list(paths.values())), name).transfer == expected


@pytest.mark.parametrize("name", ["cmpl", "late", "zzz"])
def test_what_names_none_or_several_is_refused(paths: Paths, name: str) -> None:
    code, _, error = run("view", *paths.values(), "--transfer", name)
    assert code == 2
    assert f"transfer = '{name}': expected one of 'cmpl-" in error


# -- clocks


def elsewhere(lines: list[Line], ahead: int) -> list[Line]:
    """As an engine on a host whose clock is ahead by so many nanoseconds would have written it."""
    for line in lines:
        if line["kind"] == "start":
            line["clock"] = "another host's"
        if "t" in line:
            line["t"] += ahead
        if "deadline_at" in line.get("state", {}):
            line["state"]["deadline_at"] += ahead
    return lines


@pytest.mark.parametrize("ahead", [0, 10**15, -(10**9)])
def test_clocks_of_two_hosts_are_aligned_by_messages(
    paths: Paths, tmp_path: Path, ahead: int
) -> None:
    there = written(tmp_path / "D", elsewhere(read(paths["D"]), ahead))
    stories = read_stories([paths["P"], there])
    clock = stories.clocks[1]
    assert abs(clock.ahead - ahead) <= clock.error
    story = stories.transfers[TransferId("cmpl-early-0")]
    assert story.error == clock.error > 0
    sent, came = (
        next(each.at for each in story.scenes if fits(each.moment))
        for fits in (
            lambda each: any(name[0] == "Complete" for name in each.sent),
            lambda each: each.event.type == "Complete",
        )
    )
    assert sent < came
    assert "clocks aligned by messages" in run("view", paths["P"], there, "--transfer", "early")[1]


def test_one_clock_needs_no_alignment(paths: Paths) -> None:
    stories = read_stories(list(paths.values()))
    assert [(each.ahead, each.error) for each in stories.clocks] == [(0, 0), (0, 0)]


def test_clocks_without_messages_both_ways_are_refused(paths: Paths, tmp_path: Path) -> None:
    lines = elsewhere(read(paths["D"]), 10**12)
    first = next(at for at, line in enumerate(lines) if "Register'" in str(line.get("effects")))
    there = written(
        tmp_path / "D",
        [
            line
            for line in lines[: first + 1]
            if (line["kind"], line.get("machine")) != STEP_OF_LINK
        ],
    )
    code, _, error = run("view", paths["P"], there)
    assert code == 2
    assert "messages both ways" in error
    assert run("view", there)[0] == 0, "alone it can be seen"


def test_clocks_that_contradict_each_other_are_refused(paths: Paths, tmp_path: Path) -> None:
    lines = elsewhere(read(paths["D"]), 0)
    for line in lines:
        if line.get("event", {}).get("type") == "Complete":
            line["t"] -= 10**12
    with pytest.raises(ConfigurationError, match="clocks that keep step"):
        read_stories([paths["P"], written(tmp_path / "D", lines)])


# -- what is no trace


def spoil(line: int, text: str) -> Callable[[list[str]], None]:
    def change(lines: list[str]) -> None:
        lines[line - 1] = text

    return change


def retype(lines: list[str]) -> None:
    at = next(at for at, line in enumerate(lines) if '"WriteDone"' in line)
    lines[at] = lines[at].replace('"part":0', '"part":"first"').replace('"part":1', '"part":"f"')
    lines[:] = lines[: at + 1]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (spoil(3, '{"kind":"step","t":1'), r":3 = .*malformed|truncated"),
        (spoil(2, "INFO 12:00 starting"), r"P:2 = 'INFO 12:00 starting'"),
        (spoil(4, '{"kind":"step","t":"soon"}'), r"P:4 = .*\$\.t"),
        (spoil(4, '{"kind":"metrics","t":1}'), r"P:4 = .*\$\.kind"),
        (spoil(1, '{"kind":"counted","t":1,"cause":""}'), r"P:1 = .*line of kind start"),
        (retype, r"P:\d+ = .*\$\.event\.part"),
        (list.clear, "expected a line of kind start"),
    ],
)
def test_what_is_no_trace_is_named_by_file_line_and_field(
    paths: Paths, tmp_path: Path, change: Callable[[list[str]], None], expected: str
) -> None:
    lines = paths["P"].read_text().splitlines()
    change(lines)
    spoiled = tmp_path / "P"
    spoiled.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ConfigurationError, match=expected):
        read_stories([spoiled])
    assert run("view", spoiled)[0] == 2


def test_a_line_that_its_writer_was_killed_in_is_left_out_and_counted(
    paths: Paths, tmp_path: Path
) -> None:
    text = paths["P"].read_text()
    cut = tmp_path / "P"
    cut.write_text(text[: len(text) * 2 // 3])
    assert read_stories([cut]).transfers
    cut.write_text(f'{text}{{"kind":"st\n{text}no line of a trace\n{{}}\n')
    bad = 2 * text.count("\n") + 2
    with pytest.raises(ConfigurationError, match=rf"P:{bad} = 'no line of a trace'"):
        read_stories([cut])
    assert run("view", tmp_path / "missing")[0] == 2
