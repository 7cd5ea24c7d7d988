"""Since when each machine lives, and is in its status: the machines themselves need not know."""

from __future__ import annotations

from collections.abc import Callable

from pushkv.core.machines import StepRecord

__all__ = ["Ages"]


class Ages:
    """Follows every machine of one endpoint. The runtime's thread only.

    Args:
        clock: Monotonic nanoseconds.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._born: dict[tuple[str, object], int] = {}
        self._changed: dict[tuple[str, object], int] = {}

    def life(self, machine: str, key: object, state: object) -> None:
        """A machine begins, or is forgotten where `state` is None."""
        if state is not None:
            self._born[machine, key] = self._clock()
            return
        self._born.pop((machine, key), None)
        self._changed.pop((machine, key), None)

    def step(self, record: StepRecord) -> None:
        """One step of one machine."""
        if record.row.status is not getattr(record.after, "status", None):
            self._changed[record.machine, record.key] = record.now

    def since(self, machine: str, key: object) -> int:
        """Since when it has been in its status, on the clock."""
        return self._changed.get((machine, key), self._born.get((machine, key), self._clock()))

    def status_s(self, machine: str, key: object) -> float:
        """How long it has been in its status, in seconds."""
        return max(0, self._clock() - self.since(machine, key)) / 1e9

    def age_s(self, machine: str, key: object) -> float:
        """How long it has lived, in seconds."""
        return max(0, self._clock() - self._born.get((machine, key), self._clock())) / 1e9
