"""One transfer's life, read from the traces of both engines.

The instants are of the system-wide monotonic clock, so both engines must have run on one host.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from attrs import define, frozen
from msgspec import Struct

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import Blocks, TransferId

from .trace import trace_lines

__all__ = ["Timeline", "TracedCache", "read_cache", "read_source_blocks", "read_timelines"]


@define
class Timeline:
    """When what happened to a transfer, in nanoseconds; None for what did not.

    Attributes:
        registered_at: The producer took the registration.
        prefilled_at: The producer's prefill was over.
        write_began_at: The first WRITE was ordered.
        written_at: The last WRITE was done.
        delivered_at: The consumer had the verdict and every byte.
        bytes_written: By WRITEs that were DONE.
    """

    registered_at: int | None = None
    prefilled_at: int | None = None
    write_began_at: int | None = None
    written_at: int | None = None
    delivered_at: int | None = None
    bytes_written: int = 0

    @property
    def early(self) -> bool:
        """Whether the registration was there, by the producer's clock, before prefill was over."""
        if self.registered_at is None or self.prefilled_at is None:
            return False
        return self.registered_at < self.prefilled_at


@frozen
class TracedCache:
    """Where the first KV cache group of a traced engine lies in its memory.

    Attributes:
        pid: The process whose memory it is.
        block_tokens: Tokens per block.
        regions: Address, bytes per block and stride of each region.
    """

    pid: int
    block_tokens: int
    regions: tuple[tuple[int, int, int], ...]

    def address(self, region: int, block: int) -> int:
        """The first byte of a block in a region."""
        address, _, stride = self.regions[region]
        return address + block * stride

    def bytes_of(self, tokens: int) -> int:
        """Bytes of the whole blocks that hold the first `tokens` tokens."""
        return -(-tokens // self.block_tokens) * self.block_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return sum(each[1] for each in self.regions)


# -- the lines, as far as they are read here


class _Attempt(Struct):
    transfer: str


class _Region(Struct):
    address: int
    block_bytes: int
    block_stride_bytes: int


class _Group(Struct):
    block_tokens: int
    regions: list[_Region]


class _Item(Struct):
    type: str
    final: bool = False
    blocks: Blocks = ()
    outcome: str = ""
    attempt: _Attempt | int | None = None


class _Start(Struct, tag_field="kind", tag="start"):
    pid: int
    cache: list[_Group]


class _Step(Struct, tag_field="kind", tag="step"):
    t: int
    machine: str
    key: object
    event: _Item
    effects: list[_Item]


class _Write(Struct, tag_field="kind", tag="write"):
    t: int
    attempt: _Attempt
    outcome: str
    length_bytes: int


class _Counted(Struct, tag_field="kind", tag="counted"):
    cause: str


class _Life(Struct, tag_field="kind", tag="begin"):
    machine: str


class _Death(Struct, tag_field="kind", tag="end"):
    machine: str


_Line = _Start | _Step | _Write | _Counted | _Life | _Death
_decode = msgspec.json.Decoder(_Line).decode


def _lines(trace: Path) -> Iterator[_Line]:
    for number, line in enumerate(trace_lines(trace), start=1):
        try:
            yield _decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigurationError(
                f"{trace}:{number}", line[:80].decode(errors="replace"), f"a trace ({error})"
            ) from error


def read_cache(trace: Path) -> TracedCache:
    """The KV cache of the engine that wrote `trace`.

    Raises:
        ConfigurationError: `trace` does not begin as a trace does.
    """
    first = next(_lines(trace), None)
    if not isinstance(first, _Start):
        raise ConfigurationError("trace", str(trace), "a line of kind start at its beginning")
    group = first.cache[0]
    regions = tuple(
        (each.address, each.block_bytes, each.block_stride_bytes) for each in group.regions
    )
    return TracedCache(first.pid, group.block_tokens, regions)


def read_source_blocks(producer: Path) -> dict[TransferId, Blocks]:
    """The source blocks of every transfer whose prefill is over."""
    found: dict[TransferId, Blocks] = {}
    for line in _lines(producer):
        if isinstance(line, _Step) and line.machine == "producer" and line.event.final:
            found[_transfer(line.key)] = line.event.blocks
    return found


def read_timelines(producer: Path, consumer: Path) -> dict[TransferId, Timeline]:
    """The transfers that either engine's trace knows."""
    found: dict[TransferId, Timeline] = {}
    for line in _lines(producer):
        if isinstance(line, _Step) and line.machine == "producer":
            _produced(found.setdefault(_transfer(line.key), Timeline()), line)
        elif isinstance(line, _Write) and line.outcome == "done":
            one = found.setdefault(TransferId(line.attempt.transfer), Timeline())
            one.bytes_written += line.length_bytes
            one.written_at = line.t
    for line in _lines(consumer):
        if not isinstance(line, _Step) or line.machine != "consumer":
            continue
        for effect in line.effects:
            if effect.outcome == "delivered" and isinstance(effect.attempt, _Attempt):
                transfer = TransferId(effect.attempt.transfer)
                found.setdefault(transfer, Timeline()).delivered_at = line.t
    return found


def _produced(one: Timeline, line: _Step) -> None:
    if line.event.type == "RegistrationReceived" and one.registered_at is None:
        one.registered_at = line.t
    if line.event.type == "Computed" and line.event.final and one.prefilled_at is None:
        one.prefilled_at = line.t
    if one.write_began_at is None and any(each.type == "PostWrite" for each in line.effects):
        one.write_began_at = line.t


def _transfer(key: object) -> TransferId:
    assert isinstance(key, list), "a producer's key is a transfer and a rank"
    return TransferId(key[0])
