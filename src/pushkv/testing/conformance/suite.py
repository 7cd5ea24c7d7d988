"""All checks, and how to run them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from pushkv.core.errors import ConfigurationError

from . import delivery, failures, lifecycle, peers, work
from .bench import Bench, Limits
from .end import End
from .ends import TransportEnds
from .report import CheckResult, ConformanceError, ConformanceReport, NotApplicable

__all__ = ["CHECKS", "check_transport"]

CHECKS: Mapping[str, Callable[[Bench], None]] = MappingProxyType(
    {
        check.__name__: check
        for group in (delivery, failures, work, peers, lifecycle)
        for check in group.CHECKS
    }
)
"""Every check by name, in the order in which they run. The docstring says what is demanded."""


def check_transport(
    factory: Callable[[], TransportEnds],
    checks: Iterable[str] | None = None,
    limits: Limits | None = None,
) -> ConformanceReport:
    """Check that a transport does what `pushkv.transport.Transport` says.

    Args:
        factory: Makes the ends to check, for example
            ``lambda: ProcessEnds(MyTransport)``. They are closed before this returns.
        checks: Names of checks, to run those alone; see `CHECKS`.
        limits: How patient to be.

    Returns:
        What passed, and what did not apply. Takes some seconds.

    Raises:
        ConformanceError: A check failed. It is the first that did; the rest did not run.
        ConfigurationError: There is no check of that name.
    """
    names = list(CHECKS if checks is None else checks)
    for name in names:
        if name not in CHECKS:
            raise ConfigurationError("checks", name, f"names out of {list(CHECKS)}")
    ends = factory()
    bench = Bench(ends, limits or Limits())
    try:
        results = tuple(_run(bench, name) for name in names)
        bench.check = "facts"
        facts = bench.producer.run(End.facts)
    finally:
        ends.close()
    return ConformanceReport(facts.capabilities.name, facts.version, results)


def _run(bench: Bench, name: str) -> CheckResult:
    began_s = time.monotonic()
    skipped = ""
    bench.check = name
    try:
        bench.begin()
        CHECKS[name](bench)
        spare = bench.producer.run(End.take_completions, 1, bench.limits.quiet_s)
        bench.require(not spare, "no further completion", spare)
    except NotApplicable as reason:
        skipped = str(reason)
    except ConformanceError:
        raise
    except Exception as error:
        raise ConformanceError(name, "no exception", repr(error)) from error
    return CheckResult(name, skipped, time.monotonic() - began_s)
