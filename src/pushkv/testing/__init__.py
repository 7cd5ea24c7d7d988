"""For tests and for those who build on pushkv.

The conformance checks of transports are named here (see `pushkv.testing.conformance`), and loaded
when first used. `strategies` needs hypothesis, and `reference_engine` is an engine small enough to
read.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .conformance import (
        CHECKS,
        CheckResult,
        ConformanceError,
        ConformanceReport,
        EndHandle,
        Limits,
        LocalEnds,
        ProcessEnds,
        TransportEnds,
        check_transport,
    )

__all__ = [
    "CHECKS",
    "CheckResult",
    "ConformanceError",
    "ConformanceReport",
    "EndHandle",
    "Limits",
    "LocalEnds",
    "ProcessEnds",
    "TransportEnds",
    "check_transport",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".conformance", __name__), name)
