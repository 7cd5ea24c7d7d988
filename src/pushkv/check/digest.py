"""What the fates of mutants depend on, as one short word: the rows, and the code behind them.

Two cores have the same digest where they do the same: comments, docstrings, the words in which a
row is justified, and the layout of the source do not count, nor does the version of Python.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from hashlib import sha256
from types import ModuleType

from pushkv.core import (
    capabilities,
    consumer,
    consumer_actions,
    deadlines,
    effects,
    endpoint,
    events,
    ids,
    link,
    links,
    machines,
    messages,
    policy,
    producer,
    producer_actions,
    producer_pieces,
    receiving,
    request,
    rules,
    sending,
    table,
)

from .coverage import TABLES

__all__ = ["code_digest", "core_digest"]

MODULES: tuple[ModuleType, ...] = (
    capabilities,
    consumer,
    consumer_actions,
    deadlines,
    effects,
    endpoint,
    events,
    ids,
    link,
    links,
    machines,
    messages,
    policy,
    producer,
    producer_actions,
    producer_pieces,
    receiving,
    request,
    rules,
    sending,
    table,
)
"""Everything that a row runs. The modules of tables are their rows."""
BUILDS_ROWS = "_build"


def core_digest() -> str:
    """The digest of the tables that run, and of what their rows run."""
    whole = sha256()
    for line in _rows():
        whole.update(line.encode())
    for module in MODULES:
        whole.update(code_digest(inspect.getsource(module)).encode())
    return whole.hexdigest()[:16]


def code_digest(source: str) -> str:
    """The digest of what a module does. A function that only builds rows is left out."""
    return sha256("".join(_code(ast.parse(source))).encode()).hexdigest()


def _rows() -> Iterator[str]:
    for machine in TABLES:
        for row in machine.rows.values():
            action = row.action.__name__ if row.action is not None else ""
            targets = ",".join(sorted(row.targets))
            yield f"{machine.name} {row.name} {row.kind} {action} {targets}\n"


def _code(node: ast.AST) -> Iterator[str]:
    """A tree as text, alike in every version of Python: what is empty is left out."""
    if isinstance(node, ast.FunctionDef) and node.name == BUILDS_ROWS:
        return
    yield f"({type(node).__name__}"
    for name, value in ast.iter_fields(node):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                continue  # a docstring, or the note below an attribute
            if isinstance(each, ast.AST):
                yield f" {name}="
                yield from _code(each)
            elif each is not None and name not in ("kind", "type_comment"):
                yield f" {name}={each!r}"
    yield ")"
