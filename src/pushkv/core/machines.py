"""Where one endpoint's machines live: by kind and key, with their deadlines and their observer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from attrs import frozen

from .deadlines import Deadlines
from .effects import Counted, Effect
from .events import (
    ArrivalSeen,
    RegistrationReceived,
    WriteDone,
    WriteFailed,
    WriteRefused,
    WriteUnknown,
)
from .ids import Instant
from .messages import AttemptMessage, Grant, Ping
from .table import Row, Rules, Table

__all__ = ["LifeObserver", "Machines", "Observer", "StepRecord", "Store"]


class _Timed(Protocol):
    @property
    def status(self) -> Any: ...

    @property
    def next_deadline(self) -> Instant: ...


S = TypeVar("S", bound=_Timed)
K = TypeVar("K")

INPUT = (
    AttemptMessage
    | Ping
    | Grant
    | RegistrationReceived
    | ArrivalSeen
    | WriteDone
    | WriteFailed
    | WriteRefused
    | WriteUnknown
)
"""What comes from peers and transports, and is counted where a row ignores it (I5)."""

LEAST_WAIT = 1_000_000
"""A machine is not looked at again within a millisecond of its last Tick."""


@frozen
class StepRecord:
    """One step of one machine, for observers: what came in, what fired, what came out."""

    now: Instant
    machine: str
    key: object
    event: object
    before: object
    after: object
    row: Row
    effects: tuple[Effect, ...]


Observer = Callable[[StepRecord], None]
LifeObserver = Callable[[str, object, object], None]
"""Told a machine's name, its key, and its first state; None for the state when it is forgotten."""


@frozen
class Store(Generic[K, S]):
    """The live machines of one kind."""

    table: Table[Any]
    states: dict[K, S]


class Machines:
    """Steps machines and keeps their states and deadlines. Not thread-safe."""

    def __init__(
        self, rules: Rules, observer: Observer | None, lives: LifeObserver | None = None
    ) -> None:
        self.rules = rules
        self.observer = observer
        self.lives = lives
        self.deadlines: Deadlines[tuple[str, Any]] = Deadlines()

    def put(self, store: Store[K, S], key: K, state: S) -> None:
        """Add a machine."""
        store.states[key] = state
        self.deadlines.set((store.table.name, key), state.next_deadline)
        if self.lives is not None:
            self.lives(store.table.name, key, state)

    def drop(self, store: Store[K, S], key: K) -> None:
        """Remove a machine."""
        del store.states[key]
        self.deadlines.forget((store.table.name, key))
        if self.lives is not None:
            self.lives(store.table.name, key, None)

    def step(self, store: Store[K, S], key: K, event: object, now: Instant) -> tuple[Effect, ...]:
        """Step the machine under `key`, keep its new state, and return what it wants done.

        What a peer or a transport sent and a row ignores is counted (I5).
        """
        before = store.states[key]
        step = store.table.step(before, event, now, self.rules)
        after = step.state
        if after is not before:
            store.states[key] = after
            self.deadlines.set((store.table.name, key), after.next_deadline)
        if self.observer is not None:
            record = StepRecord(
                now, store.table.name, key, event, before, after, step.row, step.effects
            )
            self.observer(record)
        if step.row.kind == "ignore" and isinstance(event, INPUT):
            return (Counted("ignored", step.row.name),)
        return step.effects

    def look_again(self, store: Store[K, S], key: K, now: Instant) -> None:
        """After a Tick: the heap's entry for `key` was used up."""
        if key in store.states:
            at = store.states[key].next_deadline
            self.deadlines.set((store.table.name, key), max(at, Instant(now + LEAST_WAIT)))
