"""The page about errors, made from the docstrings of their types and from the reasons."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

from pushkv.core import errors, messages
from pushkv.core.messages import Reason
from pushkv.testing.conformance import ConformanceError

__all__ = ["page"]

INTRODUCTION = """\
<!-- page: reference 40 -->
# Errors and reasons

Made by `make docs-tables` from the docstrings; a test fails when this page is stale.

An error is raised to whoever made a mistake, or lacks something. What goes wrong between engines
raises nothing: the transfer ends for a [reason](#reasons), the request is computed again or ends
with an error, as the engine's policy says, and everything else goes on.
"""

REASONS = """\
## Reasons

Why a transfer did not deliver: one code per cause, the same in messages, in the log
`pushkv.transfers` and in the counters `not_delivered_CAUSE` and `not_served_CAUSE`.

| code | meaning |
|---|---|
"""

SECTION = re.compile(r"^(Raised|What to do):\n((?:    .*\n|\n)+)", re.MULTILINE)


def page() -> str:
    """The whole page, in Markdown."""
    types = [getattr(errors, name) for name in errors.__all__]
    types.sort(key=lambda each: (len(each.__mro__), each.__name__))
    parts = [INTRODUCTION, *(_error(each) for each in [*types, ConformanceError])]
    rows = [f"| `{reason}` | {_meanings()[reason.name]} |" for reason in sorted(Reason)]
    return "\n".join([*parts, REASONS + "\n".join(rows) + "\n"])


def _error(error: type[BaseException]) -> str:
    text = inspect.cleandoc(error.__doc__ or "") + "\n"
    sections = {name: textwrap.dedent(body).strip() for name, body in SECTION.findall(text)}
    bases = " and ".join(f"`{base.__name__}`" for base in error.__bases__)
    return "\n".join(
        [
            f"## {error.__name__}\n",
            f"From `{error.__module__}`, derived from {bases}.\n",
            text.partition("\n\n")[0].strip() + "\n",
            f"**Raised.** {sections['Raised']}\n",
            f"**What to do.** {sections['What to do']}\n",
        ]
    )


def _meanings() -> dict[str, str]:
    """The sentence under each reason, by its name."""
    module = ast.parse(inspect.getsource(messages))
    (found,) = (
        node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Reason"
    )
    return {
        assigned.targets[0].id: said.value.value
        for assigned, said in zip(found.body, found.body[1:], strict=False)
        if isinstance(assigned, ast.Assign)
        and isinstance(assigned.targets[0], ast.Name)
        and isinstance(said, ast.Expr)
        and isinstance(said.value, ast.Constant)
        and isinstance(said.value.value, str)
    }
