"""Is a trace one that the tables allow? Every line is run again, and must come out the same.

A machine is rebuilt from the line with which it began; each event then goes through the table that
runs, under the policy and the capabilities that the trace began with. Row, status and effects must
be those of the trace, exactly. What passes between the machines of the trace is compared as well:
a request hears only what a member reported, a link's end only what a link said, and nothing was
DONE that the transport did not finish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from attrs import define, field, frozen

from pushkv.core import consumer, consumer_actions, link, producer, request
from pushkv.core.consumer import Consumer
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.effects import (
    LinkDown,
    LinkUp,
    Member,
    MemberFreed,
    MemberTold,
    PermitGranted,
    PostWrite,
    ProducerAddress,
)
from pushkv.core.errors import ConfigurationError, LocalProtocolError
from pushkv.core.events import (
    Arrived,
    Computed,
    Permitted,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
    WriteDone,
)
from pushkv.core.ids import AttemptId, Epoch, Incarnation, Instant, TransferId, Worker
from pushkv.core.link import LINK
from pushkv.core.messages import Register
from pushkv.core.producer_table import PRODUCER
from pushkv.core.request import REQUEST
from pushkv.core.table import Rules, Table

from .trace import tagged, trace_lines

__all__ = ["IllegalLine", "TraceReport", "check_trace"]

TABLES: dict[str, Table[Any]] = {table.name: table for table in (CONSUMER, REQUEST, PRODUCER, LINK)}
EARLIER = (Arrived, Computed, PrefillPreempted, PrefillResumed, PrefillAborted)
"""A rank that is heard of late is told what the engine said, as of when it said so."""
SHOWN_MAX = 400


@frozen
class IllegalLine:
    """The first line of a trace that cannot be.

    Attributes:
        number: The line's, from 1.
        machine: Which kind of machine, or "" where it is about none.
        key: Which one, as the trace names it.
        row: The row that the trace says has fired.
        what: What is wrong.
        expected: What the tables say.
        seen: What the trace says.
    """

    number: int
    machine: str
    key: str
    row: str
    what: str
    expected: str
    seen: str

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.machine, self.key, self.row)))
        return (
            f"line {self.number}: {self.what}" + (f" ({where})" if where else "") + "\n"
            f"  expected {self.expected}\n  seen     {self.seen}"
        )


@frozen
class TraceReport:
    """What is to be said of one trace.

    Attributes:
        lines: How many were read; up to the illegal one, if there is one.
        steps: How many of them were steps.
        rows: How often each row has fired.
        alive: Machines that had not ended where the trace ends.
        illegal: The first line that cannot be; None if all of them can.
    """

    path: Path
    lines: int
    steps: int
    rows: dict[str, int]
    alive: int
    illegal: IllegalLine | None


def check_trace(path: Path) -> TraceReport:
    """Run a trace again, up to the first line that the tables do not allow. Blocks on the disk.

    A line that its writer was killed in, or is still writing, is left out.

    Raises:
        ConfigurationError: `path` cannot be read.
    """
    replay = _Replay()
    number = 0
    illegal = None
    try:
        for data in trace_lines(path):
            number += 1
            replay.line(data)
    except _IllegalError as error:
        illegal = IllegalLine(
            number, replay.machine, replay.key, replay.row, error.what, error.expected, error.seen
        )
    rows = dict(sorted(replay.rows.items()))
    return TraceReport(path, number, sum(rows.values()), rows, len(replay.states), illegal)


# -- inside


class _IllegalError(Exception):
    def __init__(self, what: str, expected: object, seen: object) -> None:
        super().__init__(what)
        self.what = what
        self.expected = _shown(expected)
        self.seen = _shown(seen)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


T = TypeVar("T")


def _convert(value: object, kind: type[T], what: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, ConfigurationError) as error:
        raise _IllegalError(f"{what} cannot be read", str(error), value) from error


def _same(what: str, expected: object, seen: object) -> None:
    """Compare as JSON, and name the first difference alone."""
    expected = msgspec.json.decode(msgspec.json.encode(expected))
    while expected != seen:
        if isinstance(expected, list) and isinstance(seen, list):
            pairs = zip_longest(expected, seen, fillvalue="nothing")
            expected, seen = next(pair for pair in pairs if pair[0] != pair[1])
        elif (
            isinstance(expected, dict) and isinstance(seen, dict) and expected.keys() == seen.keys()
        ):
            name = next(name for name, value in expected.items() if value != seen[name])
            what, expected, seen = f"{what}: {name}", expected[name], seen[name]
        else:
            raise _IllegalError(what, expected, seen)


class _Line(msgspec.Struct, tag_field="kind", tag=True, forbid_unknown_fields=True):
    pass


class _Start(_Line, tag="start"):
    worker: Worker
    pid: int
    rules: Rules
    cache: list[dict[str, Any]]
    clock: str = ""


class _Life(_Line, tag="begin"):
    machine: str
    key: object
    state: dict[str, Any]


class _Death(_Line, tag="end"):
    machine: str
    key: object


class _Step(_Line, tag="step", rename={"before": "from"}):
    t: int
    machine: str
    key: object
    event: dict[str, Any]
    row: str
    before: str
    to: str
    effects: list[dict[str, Any]]


class _Write(_Line, tag="write"):
    t: int
    attempt: AttemptId
    part: int
    outcome: str
    length_bytes: int
    cause: str
    source_idle: bool


class _Counted(_Line, tag="counted"):
    t: int
    cause: str
    detail: str


_decode = msgspec.json.Decoder(_Start | _Life | _Death | _Step | _Write | _Counted).decode


@define
class _Replay:
    """One process life at a time: a trace is appended to by the next."""

    rules: Rules | None = None
    incarnation: int = 0
    now: int = 0
    states: dict[tuple[str, object], Any] = field(factory=dict)
    rows: Counter[str] = field(factory=Counter)
    reports: set[object] = field(factory=set)
    ended_links: set[LinkDown] = field(factory=set)
    permitted: set[Epoch] = field(factory=set)
    ordered: set[tuple[AttemptId, int]] = field(factory=set)
    finished: set[tuple[AttemptId, int]] = field(factory=set)
    machine: str = ""
    key: str = ""
    row: str = ""

    def line(self, data: bytes) -> None:
        self.machine = self.key = self.row = ""
        try:
            line = _decode(data)
        except (msgspec.MsgspecError, ConfigurationError) as error:
            shown = data.decode(errors="replace").rstrip("\n")
            raise _IllegalError("not a line of a trace", str(error), shown) from error
        if isinstance(line, _Start):
            self.__init__(line.rules, line.worker.incarnation, rows=self.rows)  # type: ignore[misc]
            return
        if self.rules is None:
            raise _IllegalError("it does not begin as a trace does", "a line of kind start", line)
        if isinstance(line, _Life | _Death | _Step):
            self._of_machine(line, self.rules)
        elif isinstance(line, _Write):
            self._later(line.t)
            self._written(line)
        else:
            self._later(line.t)

    def _later(self, at: int) -> None:
        if at < self.now:
            raise _IllegalError("time runs backwards", f"{self.now} or later", at)
        self.now = at

    def _written(self, line: _Write) -> None:
        name = (line.attempt, line.part)
        if name not in self.ordered:
            raise _IllegalError("a WRITE has ended that nobody ordered", "a PostWrite", line)
        self.ordered.discard(name)
        if line.outcome == "done":
            self.finished.add(name)

    def _of_machine(self, line: _Life | _Death | _Step, rules: Rules) -> None:
        self.machine, self.key = line.machine, _shown(line.key)
        if line.machine not in TABLES:
            raise _IllegalError("no such machine", sorted(TABLES), line.machine)
        name = (line.machine, _key(line.machine, line.key))
        if isinstance(line, _Life):
            self._begin(name, line.state, rules)
            return
        if name not in self.states:
            raise _IllegalError("a machine acts that has not begun", "a line of kind begin", "none")
        if isinstance(line, _Death):
            self._end(name)
        else:
            self._step(name, line, rules)

    # -- a machine's beginning and end

    def _begin(self, name: tuple[str, object], seen: dict[str, Any], rules: Rules) -> None:
        if name in self.states:
            raise _IllegalError("a machine begins that is there", "an end before it", "none")
        state, effects = _first_state(name, seen, self.incarnation, rules)
        _same("no machine begins like this", state, seen)
        self.states[name] = state
        self._heard(effects)

    def _end(self, name: tuple[str, object]) -> None:
        state = self.states[name]
        may_end: dict[str, Callable[[Any], bool]] = {
            CONSUMER.name: consumer.is_terminal,
            REQUEST.name: request.is_terminal,
            PRODUCER.name: lambda state: state.idle or producer.is_over(state),
            LINK.name: lambda state: state.status is link.LinkStatus.ENDED and not state.wanted,
        }
        if not may_end[name[0]](state):
            raise _IllegalError("a machine is forgotten that is needed", "a final status", state)
        del self.states[name]

    # -- a step

    def _step(self, name: tuple[str, object], line: _Step, rules: Rules) -> None:
        self.row = line.row
        table, state = TABLES[line.machine], self.states[name]
        _same("it was in another status", str(state.status), line.before)
        kinds = {each.__name__: each for each in table.events}
        fields = dict(line.event)
        kind = fields.pop("type", None)
        if kind not in kinds:
            raise _IllegalError("no event of this machine", sorted(kinds), kind)
        row = table.rows[state.status, kinds[kind]]
        _same("another row answers this event", row.name, line.row)
        if line.to not in row.targets:
            raise _IllegalError("the row does not end there", sorted(row.targets), line.to)
        event: object = _convert(fields, kinds[kind], "the event")
        _same("the event has other fields", tagged(event), line.event)
        if not isinstance(event, EARLIER):
            self._later(line.t)
        self._caused(event)
        try:
            step = table.step(state, event, Instant(line.t), rules)
        except (LocalProtocolError, AssertionError) as error:
            raise _IllegalError("the row cannot fire", str(error), line.event) from error
        _same("it ends in another status", str(step.state.status), line.to)
        _same("it has other effects", [tagged(each) for each in step.effects], line.effects)
        self.states[name] = step.state
        self.rows[row.name] += 1
        self._heard(step.effects)

    def _heard(self, effects: tuple[object, ...]) -> None:
        """What a step tells the other machines and the transport."""
        for effect in effects:
            if isinstance(effect, MemberTold | MemberFreed):
                self.reports.add(effect)
            elif isinstance(effect, LinkDown):
                self.ended_links.add(effect)
            elif isinstance(effect, PermitGranted):
                self.permitted.add(effect.epoch)
            elif isinstance(effect, PostWrite):
                self.ordered.add((effect.attempt, effect.part.number))

    def _caused(self, event: object) -> None:
        """An event of another machine's making must have been made."""
        cause = True
        if isinstance(event, MemberTold | MemberFreed):
            cause = event in self.reports
            self.reports.discard(event)
        elif isinstance(event, LinkDown):
            cause = event in self.ended_links
        elif isinstance(event, LinkUp):
            cause = any(
                name[0] == LINK.name
                and state.status is link.LinkStatus.UP
                and (state.epoch, state.peer) == (event.epoch, event.peer)
                for name, state in self.states.items()
            )
        elif isinstance(event, Permitted):
            cause = event.epoch in self.permitted
        elif isinstance(event, WriteDone):
            cause = (event.attempt, event.part) in self.finished
            self.finished.discard((event.attempt, event.part))
        if not cause:
            raise _IllegalError("nothing has caused this event", "its cause before it", event)


def _key(machine: str, key: object) -> object:
    if machine == CONSUMER.name:
        return _convert(key, AttemptId, "the key")
    if machine in (REQUEST.name, PRODUCER.name):
        return _convert(key, tuple[TransferId, int], "the key")
    if isinstance(key, dict) and "host" in key:
        return _convert(key, ProducerAddress, "the key")
    return _convert(key, Worker, "the key")


def _first_state(
    name: tuple[str, Any], seen: dict[str, Any], incarnation: int, rules: Rules
) -> tuple[Any, tuple[object, ...]]:
    """How this machine begins, made anew from what the trace says that it was made of."""
    machine, key = name
    if machine == CONSUMER.name:
        register = _convert(seen.get("register"), Register, "the registration")
        _same("the registration is another's", key, seen["register"]["attempt"])
        offered_at = _convert(seen.get("deadline_at"), int, "the deadline") - rules.policy.connect
        state: tuple[Consumer, tuple[object, ...]] = consumer_actions.offer(
            register, Instant(offered_at), rules
        )
        return state
    if machine == REQUEST.name:
        members = _convert(seen.get("members"), tuple[Member, ...], "the members")
        failures = _convert(seen.get("failures"), int, "the failures")
        return request.gather(key[0], key[1], members, failures), ()
    if machine == PRODUCER.name:
        return producer.produce(key[0], key[1]), ()
    dials = isinstance(key, ProducerAddress)
    begun = link.dialing if dials else link.accepting
    return begun(Incarnation(incarnation)), ()
