"""What every transport must do, as checks that its author can run.

Independent of any test framework. See `check_transport`, and docs/transports.md.
"""

from .bench import Limits
from .ends import EndHandle, TransportEnds
from .local import LocalEnds
from .process import ProcessEnds
from .report import CheckResult, ConformanceError, ConformanceReport
from .suite import CHECKS, check_transport

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
