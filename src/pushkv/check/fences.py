"""What keeps a row from acting on what is not meant for it, or too early: each fence, taken out.

Fences are of two kinds. Within an action they are conditions: one under which the action returns
the state it was given, or one that compares `now` with a deadline. Around it they are names: of an
attempt, an epoch, a connection, which routing or the action compares with its own. A row without
its fence acts as if the condition allowed it, or as if the name were its own.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from attrs import evolve, frozen

from pushkv.core.consumer_table import CONSUMER
from pushkv.core.effects import Effect
from pushkv.core.events import (
    ArrivalSeen,
    Closed,
    ConnectionClosed,
    Proven,
    RegistrationReceived,
    WriteDone,
    WriteFailed,
    WriteRefused,
    WriterGone,
    WriteUnknown,
)
from pushkv.core.ids import AttemptId, Instant, Worker
from pushkv.core.link import LINK
from pushkv.core.links import LinkKey, Links
from pushkv.core.messages import AttemptMessage, Query, Received, Revoke
from pushkv.core.producer import HOLDING, Producer
from pushkv.core.producer_table import PRODUCER
from pushkv.core.receiving import TO_CONSUMER, Receiving
from pushkv.core.sending import Sending
from pushkv.core.table import Row, Rules, Table

from .patch import Patch

__all__ = ["Fence", "fences_of"]

Action = Callable[[Any, Any, Instant, Rules], Any]
NAMED = (
    Query,
    Revoke,
    Received,
    RegistrationReceived,
    WriteDone,
    WriteFailed,
    WriteRefused,
    WriteUnknown,
)
"""Events of a producer that name an attempt, which may be another than the one that is served."""


@frozen
class Fence:
    """One fence of one row.

    Attributes:
        apply: How to take it out.
        row: The row without it; None for a fence around the row, which keeps it from firing.
    """

    what: str
    apply: Callable[[Patch], None]
    row: Row | None = None


def fences_of(table: Table[Any], row: Row) -> tuple[Fence, ...]:
    """The fences of an acting row: conditions in its order, then names."""
    assert row.action is not None, "only rows that act have fences"
    found = [_acting(table, row, what, action) for what, action in _conditions(row, row.action)]
    return (*found, *_names(table, row))


def _acting(table: Table[Any], row: Row, what: str, action: Action) -> Fence:
    """In this row `action` runs, and may end anywhere."""
    without = evolve(row, action=action, targets=frozenset(table.statuses))
    return Fence(what, lambda patch: patch.row(table, without), without)


# -- conditions within an action


def _conditions(row: Row, action: Action) -> Iterator[tuple[str, Action]]:
    """Each fence within an action that can matter in this row, and the action without it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(action)))
    changed = min((line for node in ast.walk(tree) for line in _changes(node)), default=10**6)
    tree = ast.fix_missing_locations(_OfRow(row, action.__globals__, changed).visit(tree))
    function = cast("ast.FunctionDef", tree.body[0])
    for node in ast.walk(function):
        if not isinstance(node, ast.If) or isinstance(node.test, ast.Constant):
            continue
        test = node.test
        if node.lineno < changed and _refuses(node):
            yield from _without(tree, action, node, ast.Constant(value=False))
        elif _of_time(test):
            yield from _without(tree, action, node, ast.Constant(value=True))
        elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            for at, value in enumerate(test.values):
                if _of_time(value):
                    left = [*test.values[:at], *test.values[at + 1 :]]
                    yield from _without(tree, action, node, _all(left))


class _OfRow(ast.NodeTransformer):
    """What is known in one row of the event, and of the status until the line `changed`."""

    def __init__(self, row: Row, names: dict[str, Any], changed: int) -> None:
        self._row = row
        self._names = names
        self._changed = changed

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """``isinstance(event, …)``."""
        if ast.unparse(node).startswith("isinstance(event, "):
            kinds = eval(ast.unparse(node.args[1]), self._names)  # noqa: S307 - our own source
            return ast.Constant(value=issubclass(self._row.event, kinds))
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """``state.status is …``, at the beginning of an action."""
        compares = isinstance(node.ops[0], ast.Is | ast.IsNot) and node.lineno < self._changed
        if compares and ast.unparse(node.left) == "state.status":
            named = eval(ast.unparse(node.comparators[0]), self._names)  # noqa: S307
            same = named is self._row.status
            return ast.Constant(value=same is isinstance(node.ops[0], ast.Is))
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """What is known is left out."""
        self.generic_visit(node)
        if not isinstance(node.op, ast.And):
            return node
        known = [each.value for each in node.values if isinstance(each, ast.Constant)]
        if not all(known):
            return ast.Constant(value=False)
        return _all([each for each in node.values if not isinstance(each, ast.Constant)])


def _all(values: list[ast.expr]) -> ast.expr:
    if not values:
        return ast.Constant(value=True)
    return values[0] if len(values) == 1 else ast.BoolOp(ast.And(), values)


def _changes(node: ast.AST) -> Iterator[int]:
    """The line at which `state` is no longer what the action was given."""
    if isinstance(node, ast.Assign):
        for each in (name for target in node.targets for name in ast.walk(target)):
            if isinstance(each, ast.Name) and each.id == "state":
                yield node.lineno


def _refuses(node: ast.If) -> bool:
    """Whether it gives back the state it was given."""
    only = node.body[0]
    if len(node.body) > 1 or not isinstance(only, ast.Return):
        return False
    value = only.value
    return (
        isinstance(value, ast.Tuple)
        and isinstance(value.elts[0], ast.Name)
        and value.elts[0].id == "state"
        and isinstance(value.elts[1], ast.Tuple)
        and all(_counts(each) for each in value.elts[1].elts)
    )


def _counts(effect: ast.expr) -> bool:
    """Whether an effect says nothing but that the event was not for this row."""
    called = effect.func if isinstance(effect, ast.Call) else None
    return isinstance(called, ast.Name) and called.id == "Counted"


def _of_time(test: ast.expr) -> bool:
    """Whether a condition holds once a time has come."""
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Attribute) and test.func.attr == "fence_passed"
    if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Name):
        return False
    return test.left.id == "now" and isinstance(test.ops[0], ast.GtE | ast.Gt)


def _without(
    tree: ast.Module, action: Action, node: ast.If, test: ast.expr
) -> Iterator[tuple[str, Action]]:
    """The action with another condition at `node`, in the module that it is in."""
    before, node.test = node.test, test
    try:
        module = ast.fix_missing_locations(ast.Module(body=tree.body, type_ignores=[]))
        code = compile(ast.parse(ast.unparse(module)), "<without a fence>", "exec")
    finally:
        node.test = before
    names: dict[str, Any] = {}
    function = inspect.unwrap(action)
    exec(code, function.__globals__, names)  # noqa: S102 - our own source, less a condition
    yield ast.unparse(before), names[function.__name__]


# -- names


def _names(table: Table[Any], row: Row) -> Iterable[Fence]:
    """Whose the event is."""
    event = row.event
    if table is CONSUMER:
        if issubclass(event, TO_CONSUMER):
            return [Fence("of another attempt", _message_of_another(row))]
        if event is ArrivalSeen:
            return [Fence("of another attempt", _arrival_of_another(row))]
        if event is Proven:
            return [Fence("of another transfer", _proof_of_another(row, consumer=True))]
    if table is PRODUCER:
        if event in NAMED:
            return _named_another(table, row)
        if event is Proven:
            return [Fence("of another transfer", _proof_of_another(row, consumer=False))]
    if table is LINK and event is Closed:
        return [Fence("of another connection", _closed_by_another(row))]
    return []


def _message_of_another(row: Row) -> Callable[[Patch], None]:
    """A message that is nobody's is taken for one to an attempt of the same transfer."""
    routed = Receiving.message

    def message(
        self: Receiving, peer: Worker, message: AttemptMessage, now: Instant
    ) -> list[Effect]:
        live = self.consumers.states
        mine = live.get(message.attempt)
        if type(message) is row.event and (mine is None or mine.producer != peer):
            for name in reversed(live):
                if name.transfer == message.attempt.transfer and live[name].status is row.status:
                    return self._step(name, evolve(message, attempt=name), now)
        return routed(self, peer, message, now)

    return lambda patch: patch.set(Receiving, "message", message)


def _arrival_of_another(row: Row) -> Callable[[Patch], None]:
    """An arrival that is nobody's is taken for one of an attempt of the same transfer."""
    routed = Receiving.arrival

    def arrival(self: Receiving, event: ArrivalSeen, now: Instant) -> list[Effect]:
        live = self.consumers.states
        if event.attempt not in live:
            for name in reversed(live):
                if name.transfer == event.attempt.transfer and live[name].status is row.status:
                    token = live[name].register.arrival_token
                    return self._step(name, ArrivalSeen(name, event.part, token), now)
        return routed(self, event, now)

    return lambda patch: patch.set(Receiving, "arrival", arrival)


def _proof_of_another(row: Row, *, consumer: bool) -> Callable[[Patch], None]:
    """What is proven of one transfer is taken for proof of all."""
    owner: type[Receiving | Sending] = Receiving if consumer else Sending
    routed: Callable[..., list[Effect]] = owner.proof

    def proof(self: Any, event: WriterGone | Proven, now: Instant) -> list[Effect]:
        out = routed(self, event, now)
        if isinstance(event, Proven):
            live = self.consumers.states if consumer else self.producers.states
            for key in [each for each in live if live[each].status is row.status]:
                transfer = key.transfer if consumer else key[0]
                if transfer != event.transfer:
                    out += self._step(key, event, now)
        return out

    return lambda patch: patch.set(owner, "proof", proof)


def _attempt_of(state: Producer) -> AttemptId | None:
    """The attempt that is served, else the last that has ended."""
    if state.registration is not None:
        return state.registration.register.attempt
    return state.ended[-1].attempt if state.ended else None


def _named_another(table: Table[Any], row: Row) -> Iterable[Fence]:
    """What names another attempt is taken for this one's. Nobody is served while it is held."""
    real = row.action
    assert real is not None
    if row.status is HOLDING:
        return

    def action(state: Producer, event: Any, now: Instant, rules: Rules) -> Any:
        mine = _attempt_of(state)
        if mine is None:
            return real(state, event, now, rules)
        if isinstance(event, RegistrationReceived):
            return real(
                state, evolve(event, register=evolve(event.register, attempt=mine)), now, rules
            )
        return real(state, evolve(event, attempt=mine), now, rules)

    yield _acting(table, row, "of another attempt", action)


def _closed_by_another(row: Row) -> Callable[[Patch], None]:
    """The end of an older connection is taken for that of the link's own."""
    routed = Links.closed

    def closed(self: Links, event: ConnectionClosed, now: Instant) -> list[Effect]:
        found = None if event.connection is None else self._connections.get(event.connection)
        key: LinkKey | None = None if found is None else found.key
        link = None if key is None else self.store.states.get(key)
        if key is not None and link is not None and link.status is row.status:
            self._current.pop(key, None)
        return routed(self, event, now)

    return lambda patch: patch.set(Links, "closed", closed)
