"""What every engine of some traces saw, moment by moment, as its own clock tells it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from attrs import define, field, frozen
from msgspec import Struct

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import AttemptId, Blocks, Part, TransferId, Worker, block_count

from .trace import numbered_lines

__all__ = ["EngineLife", "Item", "MessageName", "Moment", "read_engines"]

MessageName = tuple[str, object]
"""Type, and attempt or stamp: what tells a message from all others."""


class Registration(Struct):
    """What a consumer offers, as far as it is read here."""

    attempt: AttemptId
    blocks: Blocks = ()


class Item(Struct):
    """An event, an effect or a message, as far as it is read here."""

    type: str
    attempt: AttemptId | int | None = None
    blocks: Blocks = ()
    consumer_rank: int | None = None
    final: bool = False
    message: Item | None = None
    outcome: str = ""
    part: Part | int | None = None
    reason: str | None = None
    register: Registration | None = None
    retry: bool = False
    stamp: int | None = None
    tokens: int = 0


class _Policy(Struct):
    connect: int


class _Rules(Struct):
    policy: _Policy


class _Start(Struct, tag_field="kind", tag="start"):
    worker: Worker
    rules: _Rules
    clock: str = ""


class _Consumer(Struct):
    register: Registration | None = None
    deadline_at: int = 0


class _Life(Struct, tag_field="kind", tag="begin"):
    machine: str
    key: Any
    state: _Consumer


class _Death(Struct, tag_field="kind", tag="end"):
    machine: str
    key: Any


class _Step(Struct, tag_field="kind", tag="step", rename={"before": "from"}):
    t: int
    machine: str
    key: Any
    event: Item
    row: str
    before: str
    to: str
    effects: list[Item]


class _Write(Struct, tag_field="kind", tag="write"):
    t: int
    attempt: AttemptId
    part: int
    outcome: str
    length_bytes: int
    cause: str


class _Counted(Struct, tag_field="kind", tag="counted"):
    t: int
    cause: str


_Line = _Start | _Life | _Death | _Step | _Write | _Counted
_decode = msgspec.json.Decoder(_Line).decode


@frozen
class Moment:
    """One step of one transfer's machine, or the end of one of its WRITEs.

    Attributes:
        at: Nanoseconds of the engine's own clock.
        machine: Which kind: consumer, request or producer; "transport" for a WRITE's end.
        track: The machine, among all of its engine.
        attempt: The attempt's number, where one is known.
        row: The row that fired; "" where none did.
        before: The machine's status; "" where none has one.
        length_bytes: What a WRITE has moved.
        cause: Why a WRITE failed.
    """

    at: int
    transfer: TransferId
    machine: str
    track: tuple[str, str]
    attempt: int | None
    row: str
    before: str
    after: str
    event: Item
    effects: tuple[Item, ...] = ()
    length_bytes: int = 0
    cause: str = ""

    @property
    def received(self) -> MessageName | None:
        """The message that this step answers to."""
        event = self.event
        if event.type == "RegistrationReceived" and event.register is not None:
            return "Register", event.register.attempt
        return (event.type, event.attempt) if event.type in MESSAGES else None

    @property
    def sent(self) -> Iterator[MessageName]:
        """The messages that this step sends."""
        for effect in self.effects:
            if effect.type == "Send" and effect.message is not None:
                yield effect.message.type, effect.message.attempt


MESSAGES = frozenset(
    {
        "Complete",
        "Failed",
        "Progress",
        "Query",
        "Received",
        "Registered",
        "Revoke",
        "Revoked",
        "Unproven",
    }
)


@define
class EngineLife:
    """One rank of one process life, as its trace has it.

    Attributes:
        clock: Which clock its times are of; "" where the trace does not say.
        sent: When each message was first sent; the permits' PINGs and GRANTs among them.
        received: When each was first received.
        exposed: Each change of the number of blocks that are exposed, and when.
    """

    path: Path
    worker: Worker
    clock: str
    connect: int
    moments: list[Moment] = field(factory=list)
    sent: dict[MessageName, int] = field(factory=dict)
    received: dict[MessageName, int] = field(factory=dict)
    exposed: list[tuple[int, int]] = field(factory=list)
    last_at: int = 0
    _blocks: dict[tuple[str, int], int] = field(factory=dict)
    _attempts: dict[str, int] = field(factory=dict)

    @property
    def name(self) -> str:
        """The engine's, with its rank."""
        return f"{self.worker.engine}:{self.worker.rank}"

    def began(self, line: _Life) -> None:
        """A machine begins; a consumer's says when its blocks were offered."""
        register = line.state.register
        if line.machine != "consumer" or register is None:
            return
        attempt = msgspec.convert(line.key, AttemptId)
        at = line.state.deadline_at - self.connect
        track = ("consumer", str(line.key))
        event = Item("Offered", attempt=attempt, blocks=register.blocks)
        status = "consumer.registering"
        self.moments.append(
            Moment(
                at, attempt.transfer, "consumer", track, attempt.attempt, "", status, status, event
            )
        )
        key = (attempt.transfer, attempt.attempt)
        if key not in self._blocks:
            self._blocks[key] = block_count(register.blocks)
            self.exposed.append((at, self._blocks[key]))

    def stepped(self, line: _Step) -> None:
        """A machine's step."""
        self.last_at = max(self.last_at, line.t)
        if line.machine == "link":
            self._permits(line)
            return
        transfer, attempt = self._whose(line)
        moment = Moment(
            line.t,
            transfer,
            line.machine,
            (line.machine, str(line.key)),
            attempt,
            line.row,
            line.before,
            line.to,
            line.event,
            tuple(line.effects),
        )
        self.moments.append(moment)
        if moment.received is not None:
            self.received.setdefault(moment.received, line.t)
        for name in moment.sent:
            self.sent.setdefault(name, line.t)
        for effect in line.effects:
            if effect.type == "BlocksReleased" and isinstance(effect.attempt, int):
                count = self._blocks.pop((transfer, effect.attempt), 0)
                self.exposed.append((line.t, -count))

    def wrote(self, line: _Write) -> None:
        """A WRITE's end."""
        self.last_at = max(self.last_at, line.t)
        attempt = line.attempt
        event = Item("WriteEnded", attempt=attempt, part=line.part, outcome=line.outcome)
        self.moments.append(
            Moment(
                line.t,
                attempt.transfer,
                "transport",
                ("producer", str([attempt.transfer, attempt.consumer_rank])),
                attempt.attempt,
                "",
                "",
                "",
                event,
                length_bytes=line.length_bytes,
                cause=line.cause,
            )
        )

    def _permits(self, line: _Step) -> None:
        event = line.event
        if event.type in ("Ping", "Grant") and event.stamp is not None:
            self.received.setdefault((event.type, event.stamp), line.t)
        for effect in line.effects:
            message = effect.message
            if effect.type == "SendLink" and message is not None and message.stamp is not None:
                self.sent.setdefault((message.type, message.stamp), line.t)

    def _whose(self, line: _Step) -> tuple[TransferId, int | None]:
        if line.machine == "consumer":
            attempt = msgspec.convert(line.key, AttemptId)
            return attempt.transfer, attempt.attempt
        transfer, number = msgspec.convert(line.key, tuple[TransferId, int])
        if line.machine == "request":
            return transfer, number
        track = str(line.key)
        named: Registration | Item = line.event.register or line.event
        if isinstance(named.attempt, AttemptId):
            self._attempts[track] = named.attempt.attempt
        return transfer, self._attempts.get(track)


def read_engines(paths: list[Path]) -> list[EngineLife]:
    """The lives of all engines in these traces, in the order in which they are written there.

    A line that its writer was killed in, or is still writing, is left out. Blocks on the disk.

    Raises:
        ConfigurationError: A file cannot be read, or a line is none of a trace; names the file, the
            line and the field.
    """
    return [engine for path in paths for engine in _read(path)]


def _read(path: Path) -> Iterator[EngineLife]:
    engine: EngineLife | None = None
    for number, data in numbered_lines(path):
        try:
            line = _decode(data)
            if isinstance(line, _Start):
                if engine is not None:
                    yield engine
                engine = EngineLife(path, line.worker, line.clock, line.rules.policy.connect)
                continue
            if engine is None:
                raise msgspec.ValidationError("a trace begins with a line of kind start - at $")
            match line:
                case _Life():
                    engine.began(line)
                case _Step():
                    engine.stepped(line)
                case _Write():
                    engine.wrote(line)
        except (msgspec.MsgspecError, ConfigurationError, UnicodeDecodeError) as error:
            shown = data[:80].decode(errors="replace").rstrip("\n")
            raise ConfigurationError(
                f"{path}:{number}", shown, f"a line of an engine's trace ({error})"
            ) from error
    if engine is None:
        raise ConfigurationError("trace", str(path), "a line of kind start at its beginning")
    yield engine
