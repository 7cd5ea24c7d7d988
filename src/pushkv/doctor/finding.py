"""One thing that was looked at."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from attrs import frozen

__all__ = ["Finding", "Verdict", "worst"]


class Verdict(StrEnum):
    """What came of looking, from best to worst."""

    SKIPPED = "skipped"
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILURE = "failure"


@frozen
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What it is about, such as ``nixl UCX``.
        verdict: NOTE is how things are and nobody can change; a WARNING works, but hardly as it was
            meant; with a FAILURE nothing is pushed.
        seen: What was found, with values.
        remedy: What to do about it; "" where there is nothing to do.
    """

    subject: str
    verdict: Verdict
    seen: str
    remedy: str = ""


def worst(findings: Iterable[Finding]) -> Verdict:
    """The worst verdict of all; SKIPPED where nothing was looked at."""
    order = list(Verdict)
    return max((each.verdict for each in findings), key=order.index, default=Verdict.SKIPPED)
