"""Diagrams are Mermaid's own, cannot be confused on a page, and say what is wrong with them."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("sphinx", reason="Sphinx is not installed: see requirements/docs.txt")
pytest.importorskip("mermaidx", reason="mermaidx is not installed: see requirements/docs.txt")

TITLED = "sequenceDiagram\n    accTitle: A & B\n    A->>B: hello\n"
UNTITLED = "sequenceDiagram\n    A->>B: hello\n    B->>A: again\n"


def ids(svg: str) -> set[str]:
    found = re.findall(r' id="([^"]+)"', svg)
    assert len(found) == len(set(found)) > 0
    return set(found)


def test_two_diagrams_on_a_page_share_no_name() -> None:
    from docs._sphinx.diagrams import draw, named

    titled = named(draw(TITLED), TITLED, "Diagram: One")
    untitled = named(draw(UNTITLED), UNTITLED, 'Diagram: "Two" & three')
    assert ids(titled).isdisjoint(ids(untitled))
    for svg in (titled, untitled):
        assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= ids(svg)
        assert re.search(r"--natural: \d+px; max-width: \d+px", svg)
        assert "hello" in svg
    assert "aria-label=" not in titled
    assert "<title" in titled
    assert 'aria-label="Diagram: &quot;Two&quot; &amp; three"' in untitled


def test_what_cannot_be_drawn_is_said_with_its_place() -> None:
    from docs._sphinx.diagrams import draw

    with pytest.raises(RuntimeError, match=r"Parse error on line 2:\n.*A->B->C"):
        draw("sequenceDiagram\n    A->B->C\n")
