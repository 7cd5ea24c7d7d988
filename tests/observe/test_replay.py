"""Traces of real runs are legal; a trace that was tampered with is not, whatever was done to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.node import Node

from pushkv.core.capabilities import Capabilities
from pushkv.core.errors import ConfigurationError
from pushkv.core.events import Cancelled
from pushkv.core.ids import EngineId, Incarnation, TransferId, Worker
from pushkv.core.policy import Policy
from pushkv.core.table import Rules
from pushkv.demo.report import DemoReport
from pushkv.observe.replay import check_trace
from pushkv.observe.timeline import read_timelines
from pushkv.observe.trace import TraceWriter
from pushkv.testing.reference_engine import ReferenceCache
from pushkv_memory import MemoryFabric

from .traced_world import TracedWorld

PROGRAM = "from pushkv.cli import main; main()"
PROMPT = tuple(range(100))

Line = dict[str, Any]
Lines = list[Line]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The traces of a producer and a consumer: one transfer given up, one done."""
    world = TracedWorld()
    world.folder = tmp_path_factory.mktemp("traces")
    consumer, producer = world.node("D"), world.node("P")
    world.offer(consumer, "gone", [producer])
    world.settle()
    world.happen(consumer, Cancelled(TransferId("gone")))
    world.settle()
    world.prefill(producer, "a")
    world.offer(consumer, "a", [producer])
    world.settle()
    assert world.delivered(consumer, "a", 1)
    world.end()
    return {name: world.folder / name for name in ("P", "D")}


def read(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, lines: Lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def steps(lines: Lines, machine: str, kind: str) -> Iterator[int]:
    for index, line in enumerate(lines):
        if line["kind"] == "step" and (line["machine"], line["event"]["type"]) == (machine, kind):
            yield index


def test_a_trace_that_nobody_has_touched_is_legal(paths: dict[str, Path]) -> None:
    producer, consumer = check_trace(paths["P"]), check_trace(paths["D"])
    assert (producer.illegal, consumer.illegal) == (None, None)
    assert producer.lines == len(read(paths["P"]))
    assert consumer.steps == sum(line["kind"] == "step" for line in read(paths["D"]))
    assert consumer.rows["consumer.registered/Complete"] == 1
    assert consumer.rows["consumer.revoking/Revoked"] == 1
    assert producer.rows["producer.notifying/Received"] == 1
    assert consumer.alive == 1, "the link"
    assert producer.alive == 2, "the memory of the transfer, and the link"


def test_what_real_engines_wrote_is_legal(tmp_path: Path) -> None:
    fabric = MemoryFabric()
    paths = {name: tmp_path / name for name in ("P", "D")}
    with (
        Node(fabric, "P", trace_path=paths["P"]) as producer,
        Node(fabric, "D", trace_path=paths["D"]) as consumer,
    ):
        producer.produce("a", PROMPT).result(10)
        assert consumer.consume("a", PROMPT, producer.address).result(10).tokens
    for path in paths.values():
        report = check_trace(path)
        assert report.illegal is None
        assert report.steps > 0
    assert read_timelines(paths["P"], paths["D"])[TransferId("a")].bytes_written > 0


def change(kind: str, /, **fields: object) -> Callable[[Lines], int]:
    """Change the first line of this kind. Returns which."""

    def tamper(lines: Lines) -> int:
        index = next(index for index, line in enumerate(lines) if line["kind"] == kind)
        assert all(lines[index].get(name) != value for name, value in fields.items())
        lines[index].update(fields)
        return index

    return tamper


def change_step(machine: str, event: str, /, **fields: object) -> Callable[[Lines], int]:
    def tamper(lines: Lines) -> int:
        index = next(steps(lines, machine, event))
        lines[index].update(fields)
        return index

    return tamper


def change_event(machine: str, event: str, /, **fields: object) -> Callable[[Lines], int]:
    def tamper(lines: Lines) -> int:
        index = next(steps(lines, machine, event))
        lines[index]["event"].update(fields)
        return index

    return tamper


def drop_step(machine: str, event: str) -> Callable[[Lines], int]:
    """The line is gone, so that what follows from it has no cause, or finds another status."""

    def tamper(lines: Lines) -> int:
        index = next(steps(lines, machine, event))
        del lines[index]
        return index

    return tamper


def repeat_step(machine: str, event: str) -> Callable[[Lines], int]:
    def tamper(lines: Lines) -> int:
        index = next(steps(lines, machine, event))
        lines.insert(index + 1, lines[index])
        return index + 1

    return tamper


def drop_effect(machine: str, event: str) -> Callable[[Lines], int]:
    def tamper(lines: Lines) -> int:
        index = next(index for index in steps(lines, machine, event) if lines[index]["effects"])
        lines[index]["effects"].pop()
        return index

    return tamper


def send_another(lines: Lines) -> int:
    """A verdict of the same fields under another name."""
    index = next(
        index
        for index in steps(lines, "consumer", "Complete")
        if lines[index]["effects"][-1]["type"] == "Send"
    )
    message = lines[index]["effects"][-1]["message"]
    assert message["type"] == "Received"
    message["type"] = "Query"
    return index


def drop(kind: str) -> Callable[[Lines], int]:
    def tamper(lines: Lines) -> int:
        index = next(index for index, line in enumerate(lines) if line["kind"] == kind)
        del lines[index]
        return index

    return tamper


def repeat(kind: str) -> Callable[[Lines], int]:
    def tamper(lines: Lines) -> int:
        index = next(index for index, line in enumerate(lines) if line["kind"] == kind)
        lines.insert(index + 1, lines[index])
        return index + 1

    return tamper


def forget_early(lines: Lines) -> int:
    """A consumer is forgotten while its blocks are exposed."""
    index = next(steps(lines, "consumer", "LinkUp"))
    lines.insert(index + 1, {"kind": "end", "machine": "consumer", "key": lines[index]["key"]})
    return index + 1


def begin_late(lines: Lines) -> int:
    index = next(index for index, line in enumerate(lines) if line["kind"] == "begin")
    lines[index]["state"]["status"] = "request.releasing"
    return index


def another_policy(lines: Lines) -> int:
    """The rules at the start are those under which every step is run again."""
    lines[0]["rules"]["policy"]["lease"] //= 2
    return next(steps(lines, "link", "Grant"))


def link_down_of_nobody(lines: Lines) -> int:
    """An event that this status ignores, but that no link has made."""
    index = next(steps(lines, "producer", "Received"))
    peer = {"engine": "D", "incarnation": 1, "rank": 0}
    event = {"type": "LinkDown", "epoch": {"consumer": 1, "producer": 2}, "peer": peer}
    invented = {
        **lines[index],
        "event": {**event, "fence": None},
        "row": "producer.done/LinkDown",
        "from": "producer.done",
        "to": "producer.done",
        "effects": [],
    }
    last = max(steps(lines, "producer", "Received"))
    lines.insert(last + 1, {**invented, "key": lines[last]["key"], "t": lines[last]["t"]})
    return last + 1


def begin_another(lines: Lines) -> int:
    """A member that begins under another name than its registration has."""
    index = next(
        index
        for index, line in enumerate(lines)
        if (line["kind"], line.get("machine")) == ("begin", "consumer")
    )
    lines[index]["key"]["attempt"] += 100
    return index


TAMPERED: list[tuple[str, str, Callable[[Lines], int], str]] = [
    ("D", "no start", drop("start"), "does not begin as a trace does"),
    ("D", "another status", change_step("consumer", "Complete", to="consumer.released"), "another"),
    ("D", "no target", change_step("consumer", "Complete", to="consumer.registered"), "not end"),
    (
        "D",
        "a broken chain",
        change_step("consumer", "Complete", **{"from": "consumer.settling"}),
        "it was in another status",
    ),
    ("D", "another row", change_step("consumer", "Complete", row="consumer.x/Y"), "another row"),
    ("D", "no machine", change_step("consumer", "Complete", machine="courier"), "no such machine"),
    ("D", "no event", change_event("consumer", "Complete", type="Gift"), "no event of this"),
    ("D", "no part", change_event("consumer", "Complete", parts=[]), "another status"),
    ("D", "a bad part", change_event("consumer", "Complete", parts="all"), "cannot be read"),
    ("D", "one field more", change_event("consumer", "Complete", gift=1), "other fields"),
    ("D", "no effect", drop_effect("consumer", "Complete"), "other effects"),
    ("D", "another message", send_another, "other effects: message: type"),
    ("D", "time", change_step("consumer", "Complete", t=1), "time runs backwards"),
    ("D", "no cause", drop_step("consumer", "Complete"), "nothing has caused this event"),
    ("D", "twice", repeat_step("request", "MemberTold"), "nothing has caused"),
    ("D", "no link", drop_step("link", "Opened"), "nothing has caused this event"),
    ("D", "forgotten early", forget_early, "forgotten that is needed"),
    ("D", "not begun", drop("begin"), "acts that has not begun"),
    ("D", "begun twice", repeat("begin"), "begins that is there"),
    ("D", "begun elsewhere", begin_late, "no machine begins like this: status"),
    ("D", "begun under another name", begin_another, "the registration is another's: attempt"),
    ("P", "a link that nobody had", link_down_of_nobody, "nothing has caused this event"),
    ("D", "ended twice", repeat("end"), "acts that has not begun"),
    ("P", "no permit", drop_step("link", "Grant"), "nothing has caused this event"),
    ("P", "not written", change("write", outcome="failed"), "nothing has caused this event"),
    ("P", "written twice", repeat("write"), "ended that nobody ordered"),
    ("P", "another policy", another_policy, "other effects: until"),
    (
        "P",
        "another prompt",
        change_event("producer", "Arrived", prompt_digest=""),
        "another status",
    ),
]


@pytest.mark.parametrize(
    ("engine", "tamper", "what"),
    [(engine, tamper, what) for engine, _, tamper, what in TAMPERED],
    ids=[name for _, name, _, _ in TAMPERED],
)
def test_a_trace_that_was_tampered_with_is_found(
    engine: str,
    tamper: Callable[[Lines], int],
    what: str,
    paths: dict[str, Path],
    tmp_path: Path,
) -> None:
    lines = read(paths[engine])
    index = tamper(lines)
    report = check_trace(written(tmp_path / "trace", lines))
    assert report.illegal is not None
    assert what in report.illegal.what
    assert report.illegal.number > index, "no line before it is blamed"
    assert report.lines == report.illegal.number
    assert report.illegal.expected != report.illegal.seen


def test_the_line_and_the_machine_are_named(paths: dict[str, Path], tmp_path: Path) -> None:
    lines = read(paths["D"])
    index = change_step("consumer", "Complete", to="consumer.released")(lines)
    found = check_trace(written(tmp_path / "trace", lines)).illegal
    assert found is not None
    assert (found.number, found.machine) == (index + 1, "consumer")
    assert found.row == "consumer.registered/Complete"
    assert '"transfer":"a"' in found.key
    assert (found.expected, found.seen) == ("consumer.delivered", "consumer.released")


def test_a_line_that_its_writer_was_killed_in_is_left_out(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    data = paths["D"].read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(data[:-20])
    lines = data.count(b"\n")
    assert check_trace(cut).illegal is None
    assert check_trace(cut).lines == lines - 1
    rules = Rules(Policy(), Capabilities("memory", done_means_visible=True))
    worker = Worker(EngineId("D"), Incarnation(8), 0)
    TraceWriter(cut, worker, ReferenceCache(layers=2, block_count=2).layout, rules).close()
    assert check_trace(cut).illegal is None
    assert check_trace(cut).lines == lines, "the cut line is gone, the next life's is there"


def test_a_broken_line_is_found(paths: dict[str, Path], tmp_path: Path) -> None:
    first, second, rest = paths["D"].read_bytes().split(b"\n", 2)
    broken = tmp_path / "broken"
    broken.write_bytes(b"\n".join([first, second[:-20], rest]))
    found = check_trace(broken).illegal
    assert found is not None
    assert (found.number, found.what) == (2, "not a line of a trace")


def test_the_next_life_begins_anew(paths: dict[str, Path], tmp_path: Path) -> None:
    lines = read(paths["D"])
    both = check_trace(written(tmp_path / "both", lines + lines))
    assert both.illegal is None
    assert both.steps == 2 * check_trace(paths["D"]).steps


def test_timelines_are_read_from_the_same_traces(paths: dict[str, Path]) -> None:
    timelines = read_timelines(paths["P"], paths["D"])
    assert timelines[TransferId("a")].delivered_at is not None
    assert timelines[TransferId("gone")].delivered_at is None


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        check_trace(tmp_path / "nowhere")


def test_the_command(paths: dict[str, Path], tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, "trace", "check", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    lines = read(paths["D"])
    index = change_step("consumer", "Complete", to="consumer.released")(lines)
    bad, found = written(tmp_path / "bad", lines), tmp_path / "found.json"
    good = run(paths["P"], paths["D"])
    assert good.returncode == 0, good.stderr
    assert good.stdout.count(" steps of ") == 2
    assert "rows that can fire" not in good.stdout
    covered = run(paths["P"], paths["D"], "--rows")
    assert covered.returncode == 0, covered.stderr
    (of_requests,) = (line for line in covered.stdout.splitlines() if line.startswith("request: "))
    assert "request.preempted/Readmitted" in of_requests
    assert "request.receiving/MemberTold" not in of_requests
    assert covered.stdout.splitlines()[-1].startswith("all: ")
    tampered = run(paths["P"], bad, "--json", found)
    assert tampered.returncode == 1
    assert f"line {index + 1}: it ends in another status" in tampered.stdout
    told = json.loads(found.read_text())["traces"]
    assert [each["illegal"] is None for each in told] == [True, False]
    assert told[1]["illegal"]["number"] == index + 1
    assert sum(told[0]["rows"].values()) == told[0]["steps"]
    missing = run(tmp_path / "nowhere")
    assert missing.returncode == 2
    assert "nowhere" in missing.stderr


def test_an_illegal_step_keeps_the_demo_from_proving_anything(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    lines = read(paths["D"])
    change_step("consumer", "Complete", to="consumer.released")(lines)
    report = DemoReport("reference", "concurrent", canary_changed=True)
    assert report.problems == ["no engine wrote a trace"]
    report.check_traces((paths["P"], paths["D"]))
    assert report.steps_checked > 0
    assert report.problems == []
    report.check_traces((paths["P"], written(tmp_path / "bad", lines)))
    (problem,) = report.problems
    assert problem.startswith("bad: line ")
