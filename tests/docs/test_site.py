"""The site builds without a warning, has every page, and no link in it leads nowhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("sphinx", reason="Sphinx is not installed: see requirements/docs.txt")
pytest.importorskip("furo", reason="furo is not installed: see requirements/docs.txt")


class Page(HTMLParser):
    """What a page refers to, and what in it can be referred to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in {"href", "src"} and value is not None:
                self.links.add(value)
                if tag in {"img", "link", "script"}:
                    self.loaded.add(value)
            elif name in {"id", "name"} and value is not None:
                self.anchors.add(value)


def dead_links(site: Path) -> Iterator[str]:
    """Each link to the site's own files that leads nowhere, with the page that it is on."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for path, page in sorted(pages.items()):
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.is_file() or (
                anchor and target in pages and anchor not in pages[target].anchors
            ):
                yield f"{path.relative_to(site)}: {link}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site").resolve()
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs"]
    ran = subprocess.run(
        [*command, "-d", str(folder / "doctrees"), ".", str(folder / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return folder / "html"


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/api/*.md")]
    pages += [*ROOT.glob("examples/**/*.md")]
    assert len(pages) > 10
    missing = [
        page for page in pages if not (site / page.relative_to(ROOT)).with_suffix(".html").is_file()
    ]
    assert missing == []


def test_no_link_leads_nowhere(site: Path) -> None:
    assert list(dead_links(site)) == []


def test_the_way_in_is_the_index(site: Path) -> None:
    page = Page((site / "index.html").read_text(encoding="utf-8"))
    assert "docs/index.html" in page.links
    index = Page((site / "docs" / "index.html").read_text(encoding="utf-8"))
    assert {"vllm.html", "protocol.html", "../ARCHITECTURE.html"} <= index.links


def test_dead_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there"></a><a href="b.html#not"></a><a href="c.html"></a>'
        '<a href="#self" id="self"></a><a href="https://example.org/none"></a><img src="no.svg">'
    )
    (tmp_path / "b.html").write_text('<p id="there"></p>')
    assert list(dead_links(tmp_path.resolve())) == [
        "a.html: b.html#not",
        "a.html: c.html",
        "a.html: no.svg",
    ]


def test_diagrams_are_drawn_and_need_no_script(site: Path) -> None:
    html = (site / "docs" / "machines.html").read_text(encoding="utf-8")
    fences = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8").count("```mermaid")
    assert fences > 0
    assert html.count('<div class="diagram"') == html.count('<svg aria-label="Diagram: ') == fences
    assert "QUARANTINED" in html.partition('class="diagram"')[2].partition("</svg>")[0]


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = Page(path.read_text(encoding="utf-8")).loaded
        assert {urlsplit(link).netloc for link in loaded} <= {""}, path


def test_docstrings_are_in_the_site(site: Path) -> None:
    anchors = Page((site / "docs" / "api" / "core.html").read_text(encoding="utf-8")).anchors
    assert {"pushkv.core.ids.AttemptId", "pushkv.core.errors.TransportError"} <= anchors
    text = (site / "docs" / "api" / "core.html").read_text(encoding="utf-8")
    said = r"<p>Stands in .*? for tokens that are not kept: those that left a sliding window\.</p>"
    assert re.search(said, text), "the sentence under NO_BLOCK was taken for a type"


def test_what_scrolls_can_be_reached_without_a_mouse(site: Path) -> None:
    html = (site / "docs" / "machines.html").read_text(encoding="utf-8")
    assert html.count('<div tabindex="0" class="table-wrapper ') == html.count("<table ") > 0
    assert '<pre tabindex="0">' in (site / "README.html").read_text(encoding="utf-8")
    for path in site.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        assert "<pre>" not in page, path
        assert 'role="heading">' not in page, path
