"""`pushkv top` and `pushkv admin`, as they are typed, over running engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.node import Node, until
from tests.runtime.operator_calls import Bomb, place, state, unbounded
from typer.testing import CliRunner, Result

from pushkv.cli import top
from pushkv.cli.app import app
from pushkv.core.ids import seconds
from pushkv.runtime.admin.operator import RISK
from pushkv_memory import MemoryFabric

PROMPT = (1, 2, 3)
SLOW = {"expected": seconds(60), "waiting": seconds(60), "hold": seconds(60)}
WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}
__all__ = ["place"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], env=WIDE)


def registered(path: Path, count: int) -> bool:
    found = state(path)
    lines = [each for each in found.transfers if each.status == "consumer.registered"]
    return len(lines) == count and all(link.lease_left_s for link in found.links)


def test_top_shows_the_oldest_first_and_writes_what_it_saw(place: Path) -> None:
    fabric, d, out = MemoryFabric(), place / "d", place / "seen.json"
    with (
        Node(fabric, "P", changes=SLOW) as producer,
        Node(fabric, "D", changes=SLOW, admin_socket=d) as consumer,
    ):
        for number, name in enumerate(("zebra", "apple"), start=1):
            consumer.consume(name, PROMPT, producer.address)
            until(partial(registered, d, number))
        ran = run("top", "--once", "--json", out, d, place / "nobody")
        assert ran.exit_code == 1
        assert ran.output.index("zebra") < ran.output.index("apple")
        assert "gone: no engine is there" in ran.output
        found = json.loads(out.read_text())
        assert [each["transfer"] for each in found[str(d)]["transfers"]] == ["zebra", "apple"]
        assert "no engine" in found[str(place / "nobody")]["gone"]
        cut = run("top", "--once", "--rows", 1, d)
        assert cut.exit_code == 0
        assert "zebra" in cut.output
        assert "apple" not in cut.output
        assert "and 1 more" in cut.output


def test_an_engine_that_is_gone_comes_back_to_top(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three looks: it lives, it is gone, its successor lives."""
    d, lives = place / "d", []
    node = Node(MemoryFabric(), "D", admin_socket=d)
    node.runtime.start()

    def sleep(_: float) -> None:
        lives.append(top_sees[-1][0].state)
        if len(lives) == 1:
            node.runtime.stop()
        elif len(lives) == 2:
            successor.runtime.start()
        else:
            raise KeyboardInterrupt

    successor = Node(MemoryFabric(), "D", admin_socket=d)
    top_sees: list[Any] = []
    looks = top.look

    def look(*arguments: Any) -> Any:
        top_sees.append(looks(*arguments))
        return top_sees[-1]

    monkeypatch.setattr(top, "look", look)
    monkeypatch.setattr("pushkv.cli.top.time.sleep", sleep)
    try:
        assert run("top", d).exit_code == 130
    finally:
        successor.runtime.stop()
        node.runtime.stop()
        for each in (node, successor):
            each.trace.unlink(missing_ok=True)
    first, gone, second = lives
    assert gone is None
    assert first.incarnation != second.incarnation


def test_ctrl_c_ends_top_and_leaves_the_terminal_as_it_was(place: Path) -> None:
    d = place / "d"
    with Node(MemoryFabric(), "D", admin_socket=d) as node:
        command = "from pushkv.cli import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", command, "top", "--every-s", "0.1", str(d)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **WIDE},
            text=True,
        )
        operator = node.runtime.counters
        until(lambda: operator["admin_answered"] >= 2, timeout_s=60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    assert "D/0" in out


def test_a_drain_waits_until_nothing_is_under_way(place: Path) -> None:
    fabric, p, out = MemoryFabric(), place / "p", place / "out.json"
    with (
        Node(fabric, "P", changes=SLOW, admin_socket=p) as producer,
        Node(fabric, "D") as consumer,
    ):
        producer.produce("t", PROMPT).result(10)
        until(lambda: producer.runtime.left == 1)
        ran = run("admin", "drain", p, "--wait-s", "0.3", "--json", out)
        assert ran.exit_code == 1
        assert "drained, 1 under way" in ran.output
        assert json.loads(out.read_text())[str(p)] == {"is_on": True, "left": 1, "is_empty": False}
        consumer.consume("t", PROMPT, producer.address).result(10)
        ran = run("admin", "drain", p, "--wait-s", "10")
        assert ran.exit_code == 0
        assert "drained and empty" in ran.output
        assert "drained and empty" in run("admin", "list", p).output
        ran = run("admin", "undrain", p)
        assert (ran.exit_code, state(p).drain.is_on) == (0, False)


def test_a_release_needs_the_word_and_says_what_it_risks(place: Path) -> None:
    fabric, bomb, d, out = unbounded(), Bomb(), place / "d", place / "out.json"
    with (
        Node(fabric, "P", changes=SLOW, observer=bomb) as producer,
        Node(fabric, "D", changes=SLOW, admin_socket=d) as consumer,
    ):
        free = consumer.free
        consumer.consume("t", PROMPT, producer.address)
        until(lambda: registered(d, 1))
        bomb.armed = True
        until(lambda: state(d).quarantined)
        shown = run("admin", "list", d)
        assert "verdict, death, word" in shown.output
        peer = str(state(d).quarantined[0].peer)
        ran = run("admin", "release", d, "--peer", peer)
        assert (ran.exit_code, RISK in ran.output) == (2, True)
        assert run("admin", "release", d, "--peer", "P/1").exit_code == 2
        assert len(state(d).quarantined) == 1
        word = "--nothing-can-reach-them"
        ran = run("admin", "release", d, "--peer", peer, word, "--json", out)
        assert (ran.exit_code, "released 1 block of t" in ran.output) == (0, True)
        assert json.loads(out.read_text())["released"][0]["transfer"] == "t"
        until(lambda: consumer.free == free)


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("/nowhere/at.all", "is it running, with admin_socket?"),
        ("host:1", "--shared-secret"),
        ("host:port", "HOST:PORT"),
    ],
)
def test_what_cannot_be_reached_is_named_with_what_to_do(target: str, hint: str) -> None:
    ran = run("admin", "undrain", target)
    assert ran.exit_code == 2
    assert hint in ran.output


def test_what_is_no_engine_is_said_to_be_none(place: Path) -> None:
    """Somebody else's server, at the path."""
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()\n"
        "c, _ = s.accept(); c.recv(9999); c.sendall(b'HTTP/1.1 200 OK\\r\\ncontent-length: 2"
        "\\r\\n\\r\\n[]')"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(place / "x")]):
        until((place / "x").exists)
        time.sleep(0.05)
        ran = run("admin", "undrain", place / "x")
    assert ran.exit_code == 2
    assert "not an engine of this version" in ran.output
