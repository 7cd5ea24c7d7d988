"""Limits on size, and what the pure packages may import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE_PACKAGES = ("src/pushkv/core", "src/pushkv/model")
PURE_MODULES = {
    "__future__",
    "attrs",
    "bisect",
    "collections",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "operator",
    "types",
    "typing",
}
LINES_MAX = 500
TEST_LINES_MAX = 1000
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100

SOURCES = sorted(
    path
    for folder in ("src", "transports", "adapters", "tests", "fuzz", "bench", "examples", "docs")
    for path in (ROOT / folder).rglob("*.py")
)


def too_long(source: str, lines_max: int) -> Iterator[str]:
    lines = source.splitlines()
    if len(lines) > lines_max:
        yield f"{len(lines)} lines, more than {lines_max}"
    for number, line in enumerate(lines, start=1):
        if len(line) > COLUMNS_MAX:
            yield f"line {number} has {len(line)} columns, more than {COLUMNS_MAX}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = function_lines(node)
            if length > FUNCTION_LINES_MAX:
                yield f"{node.name}() has {length} lines, more than {FUNCTION_LINES_MAX}"


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    assert node.end_lineno is not None
    length = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        assert first.end_lineno is not None
        length -= first.end_lineno - first.lineno + 1
    return length


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Absolute names of all modules that `source`, a module of `package`, imports anywhere."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            ancestors = package.split(".")
            base = ".".join(ancestors[: len(ancestors) + 1 - node.level]) if node.level else ""
            if node.module:
                yield ".".join(filter(None, (base, node.module)))
            else:
                yield from (f"{base}.{alias.name}" for alias in node.names)


def impure(source: str, package: str) -> list[str]:
    """What `source` imports beyond the pure modules, its own package and the core."""

    def allowed(module: str) -> bool:
        own = any(
            module == name or module.startswith(f"{name}.") for name in (package, "pushkv.core")
        )
        return own or module.partition(".")[0] in PURE_MODULES

    return sorted({module for module in imported_modules(source, package) if not allowed(module)})


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_size(path: Path) -> None:
    limit = TEST_LINES_MAX if "tests" in path.relative_to(ROOT).parts[:1] else LINES_MAX
    violations = list(too_long(path.read_text(), limit))
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if name(path).startswith(PURE_PACKAGES)], ids=name
)
def test_pure(path: Path) -> None:
    package = ".".join(path.parent.relative_to(ROOT / "src").parts)
    assert impure(path.read_text(), package) == []


def test_the_limits_bite() -> None:
    long_function = "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX
    source = long_function + "#" * (COLUMNS_MAX + 1) + "\n"
    assert list(too_long(source, lines_max=71)) == [
        "72 lines, more than 71",
        "line 72 has 101 columns, more than 100",
        "f() has 71 lines, more than 70",
    ]


@pytest.mark.parametrize(
    ("statement", "module"),
    [
        ("import time", "time"),
        ("from random import Random", "random"),
        ("def f():\n    import threading", "threading"),
        ("if TYPE_CHECKING:\n    import numpy as np", "numpy"),
        ("from ..runtime import driver", "pushkv.runtime"),
        ("from .. import wire", "pushkv.wire"),
        ("import pushkv.corelike", "pushkv.corelike"),
    ],
)
def test_impure_imports_are_seen(statement: str, module: str) -> None:
    assert impure(statement, "pushkv.core") == [module]


def test_pure_imports_pass() -> None:
    source = "from collections.abc import Mapping\nfrom . import ids\nfrom .ids import Blocks\n"
    assert impure(source, "pushkv.core") == []
    assert impure("from pushkv.core import ids\nfrom attrs import frozen", "pushkv.model") == []
