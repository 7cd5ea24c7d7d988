"""`pushkv demo --engine reference` as its users run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]

PROGRAM = "from pushkv.cli import main; main()"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, "demo", "--engine", "reference", *arguments]


def children(pid: int) -> set[int]:
    """The processes below `pid`."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | children(child)
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize("dispatch", ["concurrent", "sequential"])
def test_the_demo_proves_its_point(dispatch: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        command("--dispatch", dispatch, "--json", str(report)),
        capture_output=True,
        text=True,
        timeout=50,
        env=os.environ | {"NO_COLOR": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    found = json.loads(report.read_text())
    count = found["requests"]
    assert count == len(found["timelines"]) >= 10
    assert (found["identical"], found["failed"], found["local_prefills"]) == (count, 0, 0)
    assert found["bytes_written"] == found["bytes_expected"] > 0
    assert found["canary_changed"]
    assert found["problems"] == []
    assert found["steps_checked"] >= 10 * count, "both engines' traces were run again"
    for each in found["timelines"]:
        assert each["registration_ms"] <= each["write_ms"] <= each["written_ms"]
        assert each["prefill_ms"] <= each["notify_ms"] <= each["first_token_ms"]
        assert each["bytes_written"] == each["bytes_expected"] > 0
        assert each["early"] == (each["registration_ms"] < each["prefill_ms"])
    assert found["early_registrations"] == sum(each["early"] for each in found["timelines"])
    if dispatch == "sequential":
        assert found["early_registrations"] == 0
    else:
        long = [each for each in found["timelines"] if each["prompt_tokens"] >= 1_000]
        assert any(each["early"] for each in long)


def test_ctrl_c_in_the_middle_leaves_no_process_behind() -> None:
    demo = subprocess.Popen(command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + 20
        below: set[int] = set()
        while len(below) < 2:
            assert time.monotonic() < end, "the engines did not start"
            assert demo.poll() is None, "it ended by itself"
            below = children(demo.pid)
            time.sleep(0.01)
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate(timeout=30)
        assert demo.returncode == 130, errors
        assert b"Traceback" not in errors, errors
        while any(map(alive, below)):
            assert time.monotonic() < end + 10, "an engine outlived the demo"
            time.sleep(0.02)
    finally:
        demo.kill()
        demo.wait()
