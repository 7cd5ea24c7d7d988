"""What a run of the checks gives: a report, or an error that names the check."""

from __future__ import annotations

from attrs import field, frozen

__all__ = ["CheckResult", "ConformanceError", "ConformanceReport", "NotApplicable"]


class ConformanceError(AssertionError):
    """A transport does not do what the contract says.

    Attributes:
        check: The check that found it.
        expected: What the contract says.
        seen: What happened instead.

    Raised:
        By `check_transport`, for the first check that fails.

    What to do:
        Mend the transport, or declare less in its `Capabilities` where the check follows from what
        it declares.
    """

    def __init__(self, check: str, expected: str, seen: str) -> None:
        super().__init__(f"{check}: expected {expected}; seen: {seen}")
        self.check = check
        self.expected = expected
        self.seen = seen


class NotApplicable(Exception):  # noqa: N818 - no error: the report lists it as skipped
    """This transport or these ends cannot be checked for that; the message says why."""


@frozen
class CheckResult:
    """One check that did not fail.

    Attributes:
        name: The check.
        skipped: Why it did not apply; "" for a check that passed.
        duration_s: How long it took, in seconds.
    """

    name: str
    skipped: str
    duration_s: float = field(eq=False)


@frozen
class ConformanceReport:
    """The checks of one run, in the order in which they ran.

    Attributes:
        transport: `Capabilities.name` of the transport.
        version: Its version.
    """

    transport: str
    version: str
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> tuple[str, ...]:
        """The names of the checks that passed."""
        return tuple(each.name for each in self.results if not each.skipped)

    @property
    def skipped(self) -> dict[str, str]:
        """Why each check that did not apply did not."""
        return {each.name: each.skipped for each in self.results if each.skipped}

    def __str__(self) -> str:
        lines = [f"{self.transport}, version {self.version}"]
        for each in self.results:
            what = f"skipped: {each.skipped}" if each.skipped else "passed"
            lines.append(f"  {each.name:<36} {each.duration_s:6.2f} s  {what}")
        return "\n".join(lines)
