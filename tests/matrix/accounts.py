"""Whether an engine's failures add up: what it was told, what its log says, what it has counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from tests.runtime.nixl_node import Failure, NixlNode

__all__ = ["books", "disagreement"]

WITHIN_S = 3.0


def books(name: str, node: NixlNode) -> tuple[str, ...]:
    """What is wrong with the accounts of an engine, once what is on its way has arrived."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        problem = disagreement(*node.call("failures"))
        if not problem:
            return ()
        if time.monotonic() > deadline:
            return (f"{name}: {problem}",)
        time.sleep(0.05)


def disagreement(
    told: Iterable[Failure], lines: Iterable[Failure], counters: Mapping[str, int]
) -> str:
    """Every failure is told once, is one line and counts one, each with the same cause.

    Args:
        told: What the engine heard from its bridge.
        lines: What the structured log says.
        counters: By ``not_delivered_CAUSE`` and ``not_served_CAUSE``.

    Returns:
        The first thing that does not add up; "" where everything does.
    """
    told, lines = list(told), list(lines)
    for what, failures in (("told", told), ("logged", lines)):
        for (verb, transfer, attempt), count in Counter(map(_about, failures)).items():
            if count > 1:
                return f"{transfer}, attempt {attempt}: {what} {count} times as not {verb}"
    if set(map(_with_cause, told)) != set(map(_with_cause, lines)):
        odd = sorted(map(str, set(map(_with_cause, told)) ^ set(map(_with_cause, lines))))
        return f"told to the engine or logged, but not both: {', '.join(odd)[:300]}"
    causes = Counter(f"not_{verb}_{cause}" for verb, _, _, cause in lines)
    if causes != Counter(counters):
        return f"{dict(causes)} in the log, {dict(counters)} in the counters"
    return ""


def _about(failure: Failure) -> tuple[str, str, int | None]:
    """A source is freed once for each transfer, whoever registered for it last."""
    verb, transfer, attempt, _ = failure
    return verb, transfer, attempt if verb == "delivered" else None


def _with_cause(failure: Failure) -> tuple[str, str, int | None, str]:
    return (*_about(failure), failure[3])
