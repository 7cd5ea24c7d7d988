"""The pages of docs/ that are made from what runs; `python -m docs._pages` writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pushkv import tables_page

from . import commands, errors

__all__ = ["PAGES"]

PAGES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "commands.md": commands.page,
        "errors.md": errors.page,
        "machines.md": tables_page.page,
    }
)
"""What makes each page, by its name in docs/."""
