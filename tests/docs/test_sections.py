"""A page is put where it says, or where its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("sphinx", reason="Sphinx is not installed: see requirements/docs.txt")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("docs/vllm", "<!-- page: reference 10 -->\n# vLLM\n", ("reference", 10)),
        ("docs/why", "<!-- page: explanation -->\n# Why\n", ("explanation", 1000)),
        ("docs/tutorial-first", "# First\n", ("tutorial", 1000)),
        ("docs/operate-metrics", "# Metrics\n", ("how-to", 1000)),
        ("examples/own_engine/README", "# An engine\n", ("tutorial", 1000)),
        ("CONTRIBUTING", "# Contributing\n", ("project", 1000)),
        ("docs/late", "# Late\n<!-- page: reference -->\n", ("how-to", 1000)),
    ],
)
def test_place(name: str, text: str, expected: tuple[str, int]) -> None:
    from docs._sphinx.sections import place

    assert place(name, text) == expected


def test_an_unknown_section_is_refused_by_name() -> None:
    from docs._sphinx.sections import place

    with pytest.raises(ValueError, match=r"docs/a\.md: section 'howto': expected one of tutorial,"):
        place("docs/a", "<!-- page: howto -->\n# A\n")


def test_no_page_is_left_out_of_the_sections() -> None:
    from docs._sphinx.sections import SECTIONS, place

    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert {f"{{section}} {section}" in index for section in SECTIONS} == {True}
    for page in ROOT.glob("docs/*.md"):
        assert place(f"docs/{page.stem}", page.read_text(encoding="utf-8"))[0] in SECTIONS
