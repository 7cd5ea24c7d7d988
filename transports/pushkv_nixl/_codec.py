"""The two byte strings of this transport: what HELLO carries, and what rides on a WRITE.

Both are versioned and decoded strictly. The first carries a digest, because NIXL itself aborts the
process on some damaged metadata.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec
from attrs import frozen

from pushkv.core.errors import ConfigurationError, RemoteProtocolError
from pushkv.core.ids import AttemptId, EngineId, Incarnation, TransferId, Worker
from pushkv.transport import Region, Write

from ._regions import RegionTable

__all__ = [
    "MEMORY_BYTES_MAX",
    "NOTICE_BYTES_MAX",
    "Memory",
    "Notice",
    "agent_name",
    "decode_memory",
    "decode_notice",
    "encode_memory",
    "encode_notice",
]

MEMORY_BYTES_MAX = 16 * 1024 * 1024
"""Longest memory description that is looked at: 65,536 regions take about 3 MB."""

NOTICE_BYTES_MAX = 4096
"""Longest notice that is sent or looked at."""

_MEMORY = b"pushkv-nixl-memory\x01"
_NOTICE = b"pkn\x01"
_DIGEST_BYTES = 16
_UINT64 = 2**64

_Form = TypeVar("_Form", bound=msgspec.Struct)


class _MemoryForm(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    library: str
    backend: str
    agent: str
    regions: list[tuple[int, int, int]]
    metadata: bytes


class _NoticeForm(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    consumer: str
    consumer_incarnation: int
    consumer_rank: int
    producer_rank: int
    transfer: str
    attempt: int
    part: int
    token: int
    length_bytes: int
    piece: int
    pieces: int


_MEMORY_DECODER = msgspec.msgpack.Decoder(_MemoryForm)
_NOTICE_DECODER = msgspec.msgpack.Decoder(_NoticeForm)


@frozen(eq=False)
class Memory:
    """A peer's memory: what its NIXL needs to be addressed, and what may be written."""

    library: str
    backend: str
    agent: str
    regions: RegionTable
    metadata: bytes


@frozen
class Notice:
    """One piece of one part is in place. The part is, when all `pieces` are."""

    attempt: AttemptId
    part: int
    token: int
    length_bytes: int
    piece: int
    pieces: int


def agent_name(worker: Worker) -> str:
    """The name of a worker's NIXL agent, unique per incarnation.

    NIXL refuses a peer that came back under a name it knows, and mixes up two that share one.
    """
    return f"pushkv/{worker.engine}/{worker.incarnation:016x}/{worker.rank}"


def encode_memory(
    library: str, backend: str, agent: str, regions: RegionTable, metadata: bytes
) -> bytes:
    """The bytes that `decode_memory` reads."""
    rows = zip(
        regions.starts.tolist(), regions.lengths.tolist(), regions.devices.tolist(), strict=True
    )
    body = msgspec.msgpack.encode(_MemoryForm(library, backend, agent, list(rows), metadata))
    return _MEMORY + _digest(body) + body


def decode_memory(data: bytes) -> Memory:
    """A peer's memory.

    Raises:
        RemoteProtocolError: The bytes are not such a description, or are damaged.
    """
    if len(data) > MEMORY_BYTES_MAX:
        raise RemoteProtocolError("memory", f"{len(data)} bytes", f"at most {MEMORY_BYTES_MAX}")
    if not data.startswith(_MEMORY):
        raise RemoteProtocolError("memory", data[: len(_MEMORY)], f"{_MEMORY!r} first")
    digest = data[len(_MEMORY) :][:_DIGEST_BYTES]
    body = data[len(_MEMORY) + _DIGEST_BYTES :]
    if digest != _digest(body):
        raise RemoteProtocolError("memory", digest.hex(), f"digest {_digest(body).hex()}")
    form = _decode(_MEMORY_DECODER, "memory", body)
    try:
        regions = RegionTable.of(Region(*row) for row in form.regions)
    except ConfigurationError as error:
        raise RemoteProtocolError("memory.regions", error.value, error.expected) from error
    return Memory(form.library, form.backend, form.agent, regions, form.metadata)


def encode_notice(write: Write, piece: int, pieces: int) -> bytes:
    """What rides on piece number `piece` of `pieces` of `write`.

    Raises:
        ValueError: The names in it are too long for a notice.
    """
    attempt = write.attempt
    form = _NoticeForm(
        attempt.consumer,
        attempt.consumer_incarnation,
        attempt.consumer_rank,
        attempt.producer_rank,
        attempt.transfer,
        attempt.attempt,
        write.part,
        write.arrival_token,
        write.length_bytes,
        piece,
        pieces,
    )
    data = _NOTICE + msgspec.msgpack.encode(form)
    if len(data) > NOTICE_BYTES_MAX:
        raise ValueError(f"notice of {len(data)} bytes: transfer and engine names are too long")
    return data


def decode_notice(data: bytes) -> Notice:
    """The notice that rode on a WRITE.

    Raises:
        RemoteProtocolError: The bytes are not a notice.
    """
    if len(data) > NOTICE_BYTES_MAX:
        raise RemoteProtocolError("notice", f"{len(data)} bytes", f"at most {NOTICE_BYTES_MAX}")
    if not data.startswith(_NOTICE):
        raise RemoteProtocolError("notice", data[: len(_NOTICE)], f"{_NOTICE!r} first")
    form = _decode(_NOTICE_DECODER, "notice", data[len(_NOTICE) :])
    for name in form.__struct_fields__:
        value = getattr(form, name)
        if isinstance(value, int) and not 0 <= value < _UINT64:
            raise RemoteProtocolError(f"notice.{name}", value, "an unsigned 64-bit integer")
    if form.piece >= form.pieces:
        raise RemoteProtocolError("notice.piece", form.piece, f"less than pieces = {form.pieces}")
    attempt = AttemptId(
        EngineId(form.consumer),
        Incarnation(form.consumer_incarnation),
        form.consumer_rank,
        form.producer_rank,
        TransferId(form.transfer),
        form.attempt,
    )
    return Notice(attempt, form.part, form.token, form.length_bytes, form.piece, form.pieces)


def _decode(decoder: msgspec.msgpack.Decoder[_Form], field: str, body: bytes) -> _Form:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(field, body[:64], str(error)) from error


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
