"""The page about the commands, made from the help that Typer shows."""

from __future__ import annotations

from typing import Any

import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

from pushkv.cli.app import app

__all__ = ["page"]

INTRODUCTION = """\
<!-- page: reference 30 -->
# The commands

Made by `make docs-tables` from `pushkv --help` and the help of each command; a test fails when this
page is stale. They need `pip install "pushkv[demo]"`. `--json FILE` writes all numbers to a file,
`--json -` to standard output, where nothing else then goes. `--quiet` prints nothing but errors,
and `NO_COLOR` takes the colours away. `pushkv --install-completion` lets your shell complete
commands and options; `pushkv --show-completion` prints what it would install.

Exit codes: 0 if all is well, 1 where something did not hold, 2 where the command could not run (one
line on standard error says why), 130 after Ctrl-C.
"""


def page() -> str:
    """The whole page, in Markdown."""
    root = get_command(app)
    _in_full(root)
    text = get_docs_for_click(obj=root, ctx=typer.Context(root, info_name="pushkv"), name="pushkv")
    lines = [line for line in text.splitlines() if "-completion`:" not in line]
    return INTRODUCTION + "\n" + "\n".join(["## `pushkv`", *lines[1:]]).rstrip() + "\n"


def _in_full(command: Any) -> None:
    """Let a list of commands say the first sentence of each, however long it is."""
    command.short_help = " ".join((command.help or "").partition("\n\n")[0].split())
    for each in getattr(command, "commands", {}).values():
        _in_full(each)
