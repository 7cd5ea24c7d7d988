"""Ctrl-C ends a run and everything it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PATIENCE_S = 60
MAIN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background
from pushkv.cli import main
main()
"""


def processes_with(word: str) -> list[int]:
    """Processes whose command line has `word`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if word in (entry / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.vllm
def test_nothing_is_left_after_an_interrupt(tmp_path: Path) -> None:
    """The engines' model lies in this test's own directory, by which they are found."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    ran = subprocess.Popen(
        [sys.executable, "-c", MAIN, "bench", "--mode", "pushkv", "--logs", str(tmp_path / "logs")],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ran:
        deadline = time.monotonic() + PATIENCE_S
        while len(processes_with(str(scratch))) < 6 and time.monotonic() < deadline:
            time.sleep(0.1)  # three engines, each under its guard
        before = processes_with(str(scratch))
        ran.send_signal(signal.SIGINT)
        _, said = ran.communicate(timeout=PATIENCE_S)
    assert len(before) >= 6
    assert ran.returncode == 130, said
    assert processes_with(str(scratch)) == []
    assert list(scratch.glob("pushkv-bench-*")) == []
