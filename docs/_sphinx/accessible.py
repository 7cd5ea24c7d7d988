"""Mends what Sphinx and furo write that screen readers and keyboards cannot use."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

MENDED = (
    # A heading without a level.
    ('<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
    # What scrolls must be reached without a mouse.
    ("<pre>", '<pre tabindex="0">'),
    ('<div class="table-wrapper ', '<div tabindex="0" class="table-wrapper '),
    # Two landmarks of one kind, which only their names tell apart.
    ('<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="All pages">'),
    ('<aside class="toc-drawer">', '<aside class="toc-drawer" aria-label="This page">'),
    # The corner of a table is no heading.
    ('<th class="head"><p></p></th>', '<td class="head"></td>'),
    # A page without a heading.
    ('<div id="search-results">', '<h1>Search</h1>\n<div id="search-results">'),
)

SIGNATURE = re.compile(r'<dt class="sig .*?</dt>', re.DOTALL)
PARAMETERS = (
    ("<dl>", '<span class="sig-parameters">'),
    ("</dl>", "</span>"),
    ("<dd>", '<span class="sig-parameter">'),
    ("</dd>", "</span>"),
)
"""The parameters of a long signature, one a line: they are no list of definitions."""


def mend(html: str) -> str:
    """The page; one that was mended stays as it is."""
    for wrong, right in MENDED:
        if right not in html:
            html = html.replace(wrong, right)
    return SIGNATURE.sub(lambda found: _replaced(found[0]), html)


def _replaced(signature: str) -> str:
    for wrong, right in PARAMETERS:
        signature = signature.replace(wrong, right)
    return signature


def mend_all(app: Sphinx, error: Exception | None) -> None:
    """Mend every page of the site that was built."""
    if error is None and app.builder.format == "html":
        for path in Path(app.outdir).rglob("*.html"):
            html = path.read_text(encoding="utf-8")
            path.write_text(mend(html), encoding="utf-8")


def setup(app: Sphinx) -> ExtensionMetadata:
    """Listen."""
    app.connect("build-finished", mend_all)
    return {"parallel_read_safe": True}
