"""Keeps napoleon from reading the sentence under a constant as `type: description`."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

BEFORE_NAPOLEON = 400


def as_prose(
    _app: Sphinx, what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Begin it with an empty comment: only what is on the first line is taken for a type."""
    if what in {"attribute", "data"}:
        lines[:0] = ["..", ""]


def setup(app: Sphinx) -> ExtensionMetadata:
    """Listen."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", as_prose, priority=BEFORE_NAPOLEON)
    return {"parallel_read_safe": True}
