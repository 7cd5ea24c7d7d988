"""docs/transports.md: its programs run, and its table is the list of checks."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pushkv.testing import CHECKS

PAGE = (Path(__file__).parents[2] / "docs" / "transports.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def output_of(program: str, folder: Path) -> str:
    path = folder / "program.py"
    path.write_text(program)
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    return re.sub(r"\d+\.\d\d s", "0.00 s", ran.stdout)


def test_the_local_program_prints_what_the_page_says(tmp_path: Path) -> None:
    (printed,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    expected = re.sub(r"\d+\.\d\d s", "0.00 s", printed)
    assert output_of(PROGRAMS[0], tmp_path) == expected


@pytest.mark.nixl
def test_the_program_between_processes_runs(tmp_path: Path) -> None:
    assert len(PROGRAMS) == 2
    output = output_of(PROGRAMS[1], tmp_path)
    assert "nixl/UCX" in output
    assert output.count("passed\n") == 2


def test_the_table_has_every_check_and_what_it_demands() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [(name, inspect.getdoc(check)) for name, check in CHECKS.items()]
