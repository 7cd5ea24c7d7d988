"""What every command of `pushkv` does alike."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from pushkv.cli.app import app

ROOT = get_command(app)
PUSHKV = "import sys; sys.argv[0] = 'pushkv'; from pushkv.cli import main; main()"
WRITES_ELSEWHERE = {
    "pushkv simulate fit": "its argument says where its JSON goes",
    "pushkv trace export": "--chrome says where its JSON goes",
}


def commands(command: Any = ROOT, name: str = "pushkv") -> Iterator[tuple[str, Any]]:
    inside = getattr(command, "commands", None)
    if inside is None:
        yield name, command
    for word, each in (inside or {}).items():
        yield from commands(each, f"{name} {word}")


COMMANDS = dict(commands())
BAD = {
    "demo": ["demo", "--engine", "reference", "--transport", "smoke-signals"],
    "trace check": ["trace", "check", "nowhere.ndjson"],
    "check": ["check", "--config", "[red]nothing"],
}


def run(
    *arguments: str, code: str = PUSHKV, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_it_has_the_options_of_all(name: str) -> None:
    options = {option for each in COMMANDS[name].params for option in each.opts}
    assert {"--quiet", "-q"} <= options
    assert ("--json" in options) == (name not in WRITES_ELSEWHERE)


@pytest.mark.parametrize("name", COMMANDS)
def test_its_help_teaches_with_an_example_that_can_be_typed(name: str) -> None:
    text = " ".join((COMMANDS[name].help or "").split())
    example = re.search(r"Example: (pushkv [^,]*(?:,[^ ][^,]*)*)", text)
    assert example is not None, "no example"
    words = shlex.split(example[1])
    assert words[: len(name.split())] == name.split()
    context = typer.Context(COMMANDS[name], info_name=name, resilient_parsing=True)
    COMMANDS[name].make_parser(context).parse_args(words[len(name.split()) :])


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_and_argument_is_explained(name: str) -> None:
    assert [each.name for each in COMMANDS[name].params if not getattr(each, "help", "")] == []


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD)
def test_an_error_names_field_and_value_in_one_line_even_if_quiet(arguments: list[str]) -> None:
    for more in ([], ["--quiet"]):
        ran = CliRunner().invoke(app, [*arguments, *more])
        assert ran.exit_code == 2
        assert ran.stdout == ""
        (line,) = filter(None, ran.stderr.splitlines())
        assert line.startswith("pushkv ")
        assert arguments[-1] in line


def test_json_to_standard_output_is_all_that_goes_there() -> None:
    ran = CliRunner().invoke(app, ["swarm", "--seed", "1", "--transfers", "20", "--json", "-"])
    assert json.loads(ran.stdout)["runs"][0]["settings"]["transfers"] == 20
    assert "digest" in ran.stderr


def test_quiet_says_nothing(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    ran = CliRunner().invoke(
        app, ["swarm", "--seed", "1", "--transfers", "20", "--json", str(out), "-q"]
    )
    assert (ran.exit_code, ran.output) == (0, "")
    assert json.loads(out.read_text())["runs"]


def test_no_color_takes_the_colours_away() -> None:
    bad = BAD["check"]
    coloured = run(*bad, FORCE_COLOR="1")
    plain = run(*bad, FORCE_COLOR="1", NO_COLOR="1")
    assert "\x1b[1;31m" in coloured.stderr
    assert not re.search(r"\x1b\[[\d;]*3\dm", plain.stderr)
    assert "nothing" in plain.stderr


def test_control_c_ends_with_130() -> None:
    command = [sys.executable, "-c", PUSHKV, "swarm", "--seed", "1", "--runs", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline().startswith(b"seed 1")
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert b"Traceback" not in errors


def test_a_shell_can_complete_commands_and_options() -> None:
    script = run(_PUSHKV_COMPLETE="source_bash")
    assert "complete " in script.stdout
    assert "pushkv" in script.stdout
    asked = {"_PUSHKV_COMPLETE": "complete_bash", "COMP_WORDS": "pushkv tr", "COMP_CWORD": "1"}
    assert run(**asked).stdout.split() == ["trace"]
