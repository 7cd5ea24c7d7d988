"""A machine as data: one table of rows, and no transition outside it.

A row is (status, event type) → action, the statuses the action may end in, and why. `Table.freeze`
refuses a table with a gap: every pair is a row, an *ignore* with a reason, or *illegal*.
Documentation, mutation tests and the model checker read the same rows that run.

An action is a pure function ``(state, event, now, rules) -> (state, effects)``. Expected failures
are effects, never exceptions; an illegal event raises `LocalProtocolError` and the caller's state
is as it was, because states are immutable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from attrs import frozen

from .capabilities import Capabilities
from .effects import Effect
from .errors import LocalProtocolError
from .ids import Instant
from .policy import Policy

__all__ = ["Result", "Row", "Rules", "Step", "Table"]


@frozen
class Rules:
    """What the machines may assume: the policy, and what the transport declares."""

    policy: Policy
    capabilities: Capabilities


class _HasStatus(Protocol):
    @property
    def status(self) -> StrEnum: ...


S = TypeVar("S", bound=_HasStatus)
E = TypeVar("E")
Result = tuple[S, tuple[Effect, ...]]
Action = Callable[[S, E, Instant, Rules], tuple[S, tuple[Effect, ...]]]


@frozen
class Row:
    """One decided (status, event) pair.

    `kind` is "go" (an action), "ignore" (counted and dropped) or "illegal" (our own mistake).
    """

    status: StrEnum
    event: type
    kind: str
    action: Action[Any, Any] | None
    targets: frozenset[StrEnum]
    why: str

    @property
    def name(self) -> str:
        """The row's name in traces and tests: ``status/Event``."""
        return f"{self.status}/{self.event.__name__}"


class Step(NamedTuple, Generic[S]):
    """What a step did: the new state, what it wants done in this order, and the row that fired.

    A tuple, because one is made for every step, and a tuple is made in a third of the time.
    """

    state: S
    effects: tuple[Effect, ...]
    row: Row


_new_step = tuple.__new__
"""Makes a `Step` without the function that a named tuple makes itself with, twice as fast."""


class Table(Generic[S]):
    """The rows of one machine. Build with `on`, `ignore` and `illegal`; then `freeze`."""

    def __init__(self, name: str, statuses: type[StrEnum], events: Iterable[type]) -> None:
        self.name = name
        self.statuses = statuses
        self.events: tuple[type, ...] = tuple(events)
        self._rows: dict[tuple[StrEnum, type], Row] = {}
        self.rows: Mapping[tuple[StrEnum, type], Row] = MappingProxyType(self._rows)
        self._frozen = False

    def on(
        self,
        status: StrEnum | Iterable[StrEnum],
        event: type[E],
        *,
        to: StrEnum | Iterable[StrEnum],
        do: Action[S, E],
        why: str,
    ) -> None:
        """In `status`, `event` runs `do`, which ends in one of `to`."""
        targets = frozenset([to] if isinstance(to, StrEnum) else to)
        for each in _each(status):
            self._decide(Row(each, event, "go", do, targets, why))

    def ignore(self, status: StrEnum | Iterable[StrEnum], *events: type, why: str) -> None:
        """In `status`, `events` change nothing and are counted (I5)."""
        for each in _each(status):
            for event in events:
                self._decide(Row(each, event, "ignore", None, frozenset([each]), why))

    def illegal(self, status: StrEnum | Iterable[StrEnum], *events: type, why: str) -> None:
        """In `status`, `events` can only be our own mistake."""
        for each in _each(status):
            for event in events:
                self._decide(Row(each, event, "illegal", None, frozenset([each]), why))

    def _decide(self, row: Row) -> None:
        assert not self._frozen, f"{self.name}: the table is frozen"
        key = (row.status, row.event)
        assert key not in self._rows, f"{self.name}: {row.name} is decided twice"
        assert row.event in self.events, f"{self.name}: {row.event.__name__} is not its event"
        self._rows[key] = row

    def freeze(self) -> Table[S]:
        """Refuse gaps, then refuse changes.

        Raises:
            AssertionError: Some (status, event) pair is undecided; all of them are named.
        """
        gaps = [
            f"{status}/{event.__name__}"
            for status in self.statuses
            for event in self.events
            if (status, event) not in self._rows
        ]
        assert not gaps, f"{self.name}: undecided: {', '.join(gaps)}"
        self._frozen = True
        return self

    def step(self, state: S, event: object, now: Instant, rules: Rules) -> Step[S]:
        """Apply `event` to `state` at `now`. Pure.

        Raises:
            LocalProtocolError: The event is illegal here; nothing has changed.
        """
        row = self._rows.get((state.status, type(event)))
        if row is None or row.action is None:
            return self._without_action(row, state, event)
        after, effects = row.action(state, event, now, rules)
        assert after.status in row.targets, f"{row.name} ended in {after.status}"
        return _new_step(Step, (after, effects, row))

    def _without_action(self, row: Row | None, state: S, event: object) -> Step[S]:
        if row is None or row.kind == "illegal":
            why = "not an event of this machine" if row is None else row.why
            raise LocalProtocolError(
                f"{self.name}: {type(event).__name__} in {state.status}: {why}"
            )
        return Step(state, (), row)


def _each(status: StrEnum | Iterable[StrEnum]) -> Iterable[StrEnum]:
    return [status] if isinstance(status, StrEnum) else status
