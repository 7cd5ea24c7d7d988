"""No search outlives the command, however the command ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

WAIT_S = 30.0


def marked(mark: bytes) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def until(what: str, mark: bytes, count: int, *, at_most: bool = False) -> None:
    end = time.monotonic() + WAIT_S
    while True:
        running = len(marked(mark))
        if running <= count if at_most else running >= count:
            return
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("arguments", [[], ["--mutants"]], ids=["search", "mutants"])
def test_no_worker_is_left_behind(arguments: list[str], how: signal.Signals) -> None:
    mark = f"PUSHKV_TEST_MARK={uuid4().hex}"
    name, _, value = mark.partition("=")
    program = (
        "import sys; from pushkv.cli import main; sys.argv = sys.argv[:1] + sys.argv[2:]; main()"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", program, "pushkv", "check", "--jobs", "2", *arguments],
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        # The command, two workers and multiprocessing's resource tracker.
        until("the workers did not start", mark.encode(), 4)
        command.send_signal(how)
        _, errors = command.communicate(timeout=WAIT_S)
        assert command.returncode == (130 if how is signal.SIGINT else -how), errors
        until("a worker outlived the command", mark.encode(), 0, at_most=True)
    finally:
        command.kill()
        command.wait()
