"""Writes them: `python -m docs._pages`, which is what `make docs-tables` does."""

from __future__ import annotations

from pathlib import Path

from docs._pages import PAGES

FOLDER = Path(__file__).parents[1]

for name, page in PAGES.items():
    (FOLDER / name).write_text(page(), encoding="utf-8")
