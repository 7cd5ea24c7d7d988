"""Strict decoding of MessagePack records: every refusal names the field and shows the value.

msgspec checks types and bounds while it decodes and says by position where it stopped. A `Kind` is
a msgspec type that knows the names of its positions, so that a refusal can name the field.
"""

from __future__ import annotations

import re
from types import GenericAlias
from typing import Annotated, Any

import msgspec
from attrs import frozen

from pushkv.core.errors import RemoteProtocolError

__all__ = ["Kind", "Record", "binary", "integer", "many", "record", "shown", "text"]

SHOWN_MOST = 80
"""Characters, bytes or elements of a refused value that an error shows."""
INSPECTED_BYTES_MOST = 65_536
"""Bodies above this are not decoded a second time just to show a value: that could cost far more
memory than the body's size."""

_POSITION = re.compile(r"\[(\d+)\]")
_EXPECTED = re.compile(r"^Expected (.*?)(?:, got .*)?$")


@frozen
class Kind:
    """What one value may be.

    Attributes:
        annotation: The msgspec type, bounds included.
        fields: Name and kind of each position where this is a record.
        each: The kind of every element where this is a sequence.
    """

    annotation: object
    fields: tuple[tuple[str, Kind], ...] = ()
    each: Kind | None = None


def integer(least: int, most: int | None) -> Kind:
    """An integer in [least, most]; with `most` None up to the wire's own 2**64 - 1."""
    return Kind(Annotated[int, msgspec.Meta(ge=least, le=most)])


def text(most: int, least: int = 0) -> Kind:
    """A string of `least` to `most` characters."""
    return Kind(Annotated[str, msgspec.Meta(min_length=least, max_length=most)])


def binary(most: int) -> Kind:
    """At most `most` bytes."""
    return Kind(Annotated[bytes, msgspec.Meta(max_length=most)])


def many(each: Kind, most: int, least: int = 0) -> Kind:
    """A sequence of `least` to `most` elements, decoded to a tuple."""
    elements = GenericAlias(tuple, (each.annotation, ...))
    bounds = msgspec.Meta(min_length=least, max_length=most)
    return Kind(Annotated[elements, bounds], each=each)


def record(fields: tuple[tuple[str, Kind], ...]) -> Kind:
    """A fixed sequence of named fields, none missing and none extra, decoded to a tuple."""
    return Kind(GenericAlias(tuple, tuple(kind.annotation for _, kind in fields)), fields)


class Record:
    """A named record as MessagePack bytes. Stateless once built; usable from any thread."""

    __slots__ = ("_decoder", "_kind", "name")

    def __init__(self, name: str, kind: Kind) -> None:
        self.name = name
        self._kind = kind
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind.annotation)

    def decode(self, body: bytes) -> tuple[Any, ...]:
        """The record's values in order.

        Raises:
            RemoteProtocolError: `body` is anything but exactly one such record.
        """
        try:
            values: tuple[Any, ...] = self._decoder.decode(body)
        except msgspec.ValidationError as refusal:
            raise self._explained(body, str(refusal)) from None
        except msgspec.DecodeError as refusal:
            raise RemoteProtocolError(
                self.name, f"{len(body)} bytes", f"one MessagePack record ({refusal})"
            ) from None
        return values

    def _explained(self, body: bytes, refusal: str) -> RemoteProtocolError:
        complaint, _, path = refusal.partition(" - at `$")
        positions = [int(index) for index in _POSITION.findall(path)]
        known = _EXPECTED.match(complaint)
        expected = known.group(1) if known else complaint
        return RemoteProtocolError(self._named(positions), _value_at(body, positions), expected)

    def _named(self, positions: list[int]) -> str:
        name, kind = self.name, self._kind
        for index in positions:
            if kind.fields:
                field, kind = kind.fields[index]
                name = f"{name}.{field}"
            elif kind.each is not None:
                name, kind = f"{name}[{index}]", kind.each
        return name


def _value_at(body: bytes, positions: list[int]) -> object:
    if len(body) > INSPECTED_BYTES_MOST:
        return f"a value in {len(body)} bytes"
    try:
        value: object = msgspec.msgpack.decode(body)
        for index in positions:
            assert isinstance(value, list)
            value = value[index]
    except (msgspec.DecodeError, RecursionError):
        # The refusal came before the nonsense that stops an untyped decode.
        return f"a value in {len(body)} bytes"
    return shown(value)


def shown(value: object) -> object:
    """`value`, or so much of it as belongs in an error message."""
    if isinstance(value, str | bytes):
        return value if len(value) <= SHOWN_MOST else value[:SHOWN_MOST]
    if isinstance(value, list | tuple | dict):
        return f"{len(value)} elements"
    if value is None or isinstance(value, int | float):
        return value
    return f"a value of type {type(value).__name__}"
