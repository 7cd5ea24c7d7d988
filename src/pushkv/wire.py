"""The control messages as bytes: framed, versioned, bounded, strictly decoded.

A frame is a length (4 bytes, big-endian, of what follows it), the protocol number (1 byte), the
message's tag (1 byte), and a MessagePack array of the message's fields in the order of its class,
the fields of its `AttemptId` first and flat. Nothing may be missing and nothing extra.

A body that is well framed and wrong is reported as `Malformed` and harms nothing but itself (I5). A
length that cannot be right leaves no next frame to find, so it ends the connection.

A change of any field's meaning or bounds is a new protocol number; an end of protocol N also reads
and writes N - 1, and both then speak the lower. HELLO, which says the number, and REFUSED never
change, and go out under the first number for ever: else nobody could say what he does not speak.
There is one protocol so far.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec
from attrs import fields, frozen

from pushkv._strict import Kind, Record, binary, integer, many, record, shown, text
from pushkv.core import messages
from pushkv.core.errors import ConfigurationError, RemoteProtocolError
from pushkv.core.ids import AttemptId, Part
from pushkv.core.messages import Message, RankAddress, Reason

__all__ = [
    "BLOCKS_MOST",
    "BLOCK_ID_MOST",
    "DIGEST_BYTES_MOST",
    "FRAME_BYTES_MOST",
    "GROUPS_MOST",
    "MEMORY_BYTES_MOST",
    "NAME_LENGTH_MOST",
    "PAIRS_MOST",
    "PAIR_KEY_LENGTH_MOST",
    "PAIR_VALUE_LENGTH_MOST",
    "PARTS_MOST",
    "PROCESS_LENGTH_MOST",
    "PROTOCOL",
    "RANKS_MOST",
    "TOKENS_MOST",
    "Decoder",
    "Malformed",
    "frame",
]

PROTOCOL = 1
"""The newest protocol that is spoken here."""
GREETING = 1
"""The protocol number of HELLO and REFUSED, for ever."""

FRAME_BYTES_MOST = 8 * 1024 * 1024
"""Longest frame without its length. A message with every field at its bound is shorter."""
NAME_LENGTH_MOST = 512
"""Characters of an engine's name or a transfer id."""
DIGEST_BYTES_MOST = 64
PARTS_MOST = 4_096
"""Parts of one verdict."""
GROUPS_MOST = 64
"""KV cache groups of one registration."""
BLOCKS_MOST = 1_000_000
"""Blocks of one registration, all groups together."""
BLOCK_ID_MOST = 2**32 - 1
TOKENS_MOST = 2**32 - 1
RANKS_MOST = 1_024
"""Ranks of one engine."""
PAIRS_MOST = 256
"""Key and value pairs that describe a model or a layout."""
PAIR_KEY_LENGTH_MOST = 128
PAIR_VALUE_LENGTH_MOST = 1_024
MEMORY_BYTES_MOST = 4 * 1024 * 1024
PROCESS_LENGTH_MOST = 128

_LENGTH_BYTES = 4
_HEAD_BYTES = 2

_U64 = integer(0, None)
_DURATION = integer(0, 2**63 - 1)
_RANK = integer(0, RANKS_MOST - 1)
_TOKENS = integer(0, TOKENS_MOST)
_NAME = text(NAME_LENGTH_MOST, least=1)
_WORD = text(256, least=1)
_DIGEST = binary(DIGEST_BYTES_MOST)
_REASON = Kind(Reason)
_RANKS = many(_RANK, RANKS_MOST, least=1)
_BLOCKS = many(many(integer(0, BLOCK_ID_MOST), BLOCKS_MOST), GROUPS_MOST)
_PARTS = many(
    record((("number", integer(0, 2**32 - 1)), ("start", _TOKENS), ("end", _TOKENS))), PARTS_MOST
)
_PAIRS = many(
    record((("key", text(PAIR_KEY_LENGTH_MOST, least=1)), ("value", text(PAIR_VALUE_LENGTH_MOST)))),
    PAIRS_MOST,
)
_DIRECTORY = many(
    record((("rank", _RANK), ("host", text(255, least=1)), ("port", integer(1, 65_535)))),
    RANKS_MOST,
)
_ATTEMPT: dict[str, Kind] = {
    "consumer": _NAME,
    "consumer_incarnation": _U64,
    "consumer_rank": _RANK,
    "producer_rank": _RANK,
    "transfer": _NAME,
    "attempt": integer(0, 2**63 - 1),
}

_Values = tuple[Any, ...]
"""A decoded record: msgspec has checked each value against its `Kind`."""


@frozen
class Malformed:
    """A well-framed body that is not a message of this protocol. Count it and go on (I5).

    Attributes:
        field: Message and field, such as ``register.attempt.transfer``.
        value: The value refused, shortened.
        expected: What was expected there.
    """

    field: str
    value: object
    expected: str


@frozen
class _Codec:
    """How one message class becomes values and comes back."""

    tag: int
    record: Record
    values: Callable[[Message], _Values]
    build: Callable[[_Values], Message]


def _in_order(name: str, start: int, end: int) -> None:
    if start > end:
        raise RemoteProtocolError(f"{name}.end", end, f"at least start = {start}")


def _parts_of(name: str, values: _Values) -> tuple[Part, ...]:
    for index, (_, start, end) in enumerate(values):
        _in_order(f"{name}.parts[{index}]", start, end)
    return tuple(Part(*each) for each in values)


def _plain_parts(parts: tuple[Part, ...]) -> _Values:
    return tuple((part.number, part.start, part.end) for part in parts)


def _check_register(values: _Values) -> None:
    blocks, start, end = values[6:9]
    _in_order("register", start, end)
    total = sum(map(len, blocks))
    if total > BLOCKS_MOST:
        raise RemoteProtocolError(
            "register.blocks", f"{total} blocks", f"at most {BLOCKS_MOST} in all"
        )


def _check_pairs(name: str, pairs: tuple[tuple[str, str], ...]) -> None:
    if len(dict(pairs)) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise RemoteProtocolError(name, twice, "each key once")


def _attempt_message(tag: int, cls: type[Any], **rest: Kind) -> tuple[type[Any], _Codec]:
    """The codec of a message whose first field is an attempt, and whose second may be parts."""
    name = cls.__name__.lower()
    flat = [f"attempt.{each}" for each in _ATTEMPT] + list(rest)
    kinds = [*_ATTEMPT.values(), *rest.values()]
    get = attrgetter(*flat)
    first = len(_ATTEMPT)
    make: Callable[..., Message] = cls

    def build(values: _Values) -> Message:
        return make(AttemptId(*values[:first]), *values[first:])

    def build_register(values: _Values) -> Message:
        _check_register(values)
        return build(values)

    def build_verdict(values: _Values) -> Message:
        parts = _parts_of(name, values[first])
        return make(AttemptId(*values[:first]), parts, *values[first + 1 :])

    def verdict_values(message: Message) -> _Values:
        values: _Values = get(message)
        return (*values[:first], _plain_parts(values[first]), *values[first + 1 :])

    if [each.name for each in fields(cls)] != ["attempt", *rest]:
        raise AssertionError(f"the wire names other fields of {cls.__name__} than the class has")
    codec = _Codec(
        tag,
        Record(name, record(tuple(zip(flat, kinds, strict=True)))),
        verdict_values if "parts" in rest else get,
        build_verdict if "parts" in rest else build_register if cls is messages.Register else build,
    )
    return cls, codec


def _link_message(tag: int, cls: type[Any], **kinds: Kind) -> tuple[type[Any], _Codec]:
    """The codec of a message that concerns the link."""
    name = cls.__name__.lower()
    names = [each.name for each in fields(cls)]
    make: Callable[..., Message] = cls
    place = names.index("directory") if "directory" in names else None

    def values(message: Message) -> _Values:
        found = tuple(getattr(message, each) for each in names)
        if place is None:
            return found
        directory = tuple((each.rank, each.host, each.port) for each in found[place])
        return (*found[:place], directory, *found[place + 1 :])

    def build(values: _Values) -> Message:
        if place is None:
            return make(*values)
        hello: messages.Hello = cls(
            *values[:place],
            tuple(RankAddress(*each) for each in values[place]),
            *values[place + 1 :],
        )
        _check_pairs("hello.model", hello.model)
        _check_pairs("hello.layout", hello.layout)
        return hello

    if names != list(kinds):
        raise AssertionError(f"the wire names other fields of {cls.__name__} than the class has")
    return cls, _Codec(tag, Record(name, record(tuple(kinds.items()))), values, build)


_CODECS: dict[type[Any], _Codec] = dict(
    (
        _attempt_message(
            1,
            messages.Register,
            blocks=_BLOCKS,
            start=_TOKENS,
            end=_TOKENS,
            prompt_digest=_DIGEST,
            layout_digest=_DIGEST,
            producer_ranks=_RANKS,
            consumer_ranks=_RANKS,
            arrival_token=_U64,
            deadline=_DURATION,
        ),
        _attempt_message(2, messages.Registered),
        _attempt_message(3, messages.Progress, tokens=_TOKENS),
        _attempt_message(4, messages.Complete, parts=_PARTS),
        _attempt_message(5, messages.Failed, parts=_PARTS, reason=_REASON),
        _attempt_message(6, messages.Revoked, parts=_PARTS),
        _attempt_message(7, messages.Unproven, parts=_PARTS),
        _attempt_message(8, messages.Revoke, final=Kind(bool)),
        _attempt_message(9, messages.Query),
        _attempt_message(10, messages.Received),
        _link_message(11, messages.Ping, stamp=_U64),
        _link_message(
            12,
            messages.Grant,
            stamp=_U64,
            lease=_DURATION,
            consumer_incarnation=_U64,
            producer_incarnation=_U64,
        ),
        _link_message(
            13,
            messages.Hello,
            protocol=integer(0, 65_535),
            nonce=_U64,
            engine=_NAME,
            incarnation=_U64,
            rank=_RANK,
            model=_PAIRS,
            layout=_PAIRS,
            transport=_WORD,
            transport_version=_WORD,
            lease=_DURATION,
            directory=_DIRECTORY,
            memory=binary(MEMORY_BYTES_MOST),
            process=text(PROCESS_LENGTH_MOST),
        ),
        _link_message(
            14,
            messages.Refused,
            field=_WORD,
            ours=text(PAIR_VALUE_LENGTH_MOST),
            theirs=text(PAIR_VALUE_LENGTH_MOST),
        ),
    )
)


@frozen
class _Words:
    """How one protocol writes its messages."""

    by_class: dict[type[Any], _Codec]
    by_tag: dict[int, _Codec]


def _words(codecs: dict[type[Any], _Codec]) -> _Words:
    return _Words(codecs, {codec.tag: codec for codec in codecs.values()})


_GREETINGS = _words({each: _CODECS[each] for each in (messages.Hello, messages.Refused)})
_SPOKEN = {1: _words(_CODECS)}
"""By protocol: the newest, and the one before where there is one."""
_encode = msgspec.msgpack.Encoder().encode


def frame(message: Message, protocol: int = PROTOCOL) -> bytes:
    """`message` as one frame, length included. Thread-safe; never blocks.

    What a peer would refuse is refused here, before it is sent and resent in vain.

    Args:
        message: What to send.
        protocol: The one that both ends speak; HELLO and REFUSED are the same in all.

    Raises:
        ConfigurationError: A field is out of its bounds; names it.
    """
    greeting = _GREETINGS.by_class.get(type(message))
    codec = greeting or _SPOKEN[protocol].by_class[type(message)]
    try:
        body = _encode(codec.values(message))
        codec.build(codec.record.decode(body))
    except RemoteProtocolError as refusal:
        raise ConfigurationError(refusal.field, refusal.value, refusal.expected) from None
    except (OverflowError, TypeError, UnicodeEncodeError) as refusal:
        raise ConfigurationError(
            codec.record.name, shown(repr(message)), f"values that MessagePack can hold ({refusal})"
        ) from None
    head = (len(body) + _HEAD_BYTES).to_bytes(_LENGTH_BYTES, "big")
    return head + bytes((GREETING if greeting else protocol, codec.tag)) + body


def _message(content: bytes) -> Message:
    protocol, tag = content[0], content[1]
    words = _GREETINGS if protocol == GREETING and tag in _GREETINGS.by_tag else None
    words = words or _SPOKEN.get(protocol)
    if words is None:
        known = " or ".join(str(each) for each in sorted(_SPOKEN))
        raise RemoteProtocolError("protocol", protocol, known)
    codec = words.by_tag.get(tag)
    if codec is None:
        least, most = min(words.by_tag), max(words.by_tag)
        raise RemoteProtocolError("message", tag, f"a tag of {least} to {most}")
    body = content[_HEAD_BYTES:]
    try:
        return codec.build(codec.record.decode(body))
    except RemoteProtocolError:
        if codec is _CODECS[messages.Hello]:
            _check_newer(body)
        raise


def _check_newer(hello: bytes) -> None:
    """A HELLO that we do not understand may say that it is not meant for us: then that is why."""
    try:
        protocol = msgspec.msgpack.decode(hello)[0]
    except (msgspec.MsgspecError, LookupError, TypeError):
        return
    if type(protocol) is int and protocol > PROTOCOL + 1:
        raise RemoteProtocolError("hello.protocol", protocol, f"{PROTOCOL} or {PROTOCOL + 1}")


class Decoder:
    """Cuts one connection's bytes into messages. Does no I/O; not thread-safe.

    Args:
        first_bytes_most: The longest first frame, which comes from somebody not known yet.
    """

    __slots__ = ("_buffer", "_bytes_most", "_fatal")

    def __init__(self, first_bytes_most: int = FRAME_BYTES_MOST) -> None:
        self._buffer = bytearray()
        self._bytes_most = min(first_bytes_most, FRAME_BYTES_MOST)
        self._fatal: RemoteProtocolError | None = None

    def feed(self, data: bytes) -> list[Message | Malformed]:
        """What became complete with `data`, in order.

        Holds at most one frame's bytes beyond `data`.

        Raises:
            RemoteProtocolError: A length is out of bounds, now or in an earlier call: nothing after
                it can be read, so the connection must end. What came before it in the same call is
                lost with the connection.
        """
        if self._fatal is not None:
            raise self._fatal
        buffer = self._buffer
        buffer += data
        found: list[Message | Malformed] = []
        start = 0
        while len(buffer) - start >= _LENGTH_BYTES:
            length = int.from_bytes(buffer[start : start + _LENGTH_BYTES], "big")
            if not _HEAD_BYTES <= length <= self._bytes_most:
                buffer.clear()
                self._fatal = RemoteProtocolError(
                    "frame length", length, f"{_HEAD_BYTES} to {self._bytes_most} bytes"
                )
                raise self._fatal
            end = start + _LENGTH_BYTES + length
            if len(buffer) < end:
                break
            try:
                found.append(_message(bytes(buffer[start + _LENGTH_BYTES : end])))
            except RemoteProtocolError as refusal:
                found.append(Malformed(refusal.field, refusal.value, refusal.expected))
            start = end
            self._bytes_most = FRAME_BYTES_MOST
        del buffer[:start]
        return found
