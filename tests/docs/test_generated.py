"""Pages that are made from what runs say what runs, and all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs._pages import PAGES
from docs._pages.errors import page as errors_page
from typer.main import get_command

from pushkv.cli.app import app
from pushkv.core import errors
from pushkv.core.messages import Reason

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_it_is_not_stale(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs-tables`"


def test_every_command_and_each_of_its_options_is_there() -> None:
    text = PAGES["commands.md"]()
    sections = dict(re.findall(r"^#{2,} `([^`]+)`\n((?:.*\n)+?)(?=#{2,} |\Z)", text, re.MULTILINE))

    def look(command, path: str) -> None:
        for option in command.params:
            if option.opts and "completion" not in option.name:
                told = sections[path]
                longest = re.escape(max(option.opts, key=len))
                assert re.search(rf"`(-\w, )?{longest}\W", told) or option.name.upper() in told
        for name, each in getattr(command, "commands", {}).items():
            look(each, f"{path} {name}")

    look(get_command(app), "pushkv")
    assert {"pushkv demo", "pushkv trace check", "pushkv simulate run"} <= sections.keys()


def test_every_error_and_every_reason_is_there_once() -> None:
    headings = re.findall(r"^## (\w+)$", errors_page(), re.MULTILINE)
    assert set(errors.__all__) <= set(headings)
    assert len(headings) == len(set(headings))
    codes = re.findall(r"^\| `(\w+)` \| \S.*\S \|$", errors_page(), re.MULTILINE)
    assert codes == sorted(reason.value for reason in Reason)
