"""The outer form of NIXL's own metadata, walked before NIXL sees it.

NIXL decodes what a peer sends with little doubt, and ends the process on some of what is damaged.
Its form is a run of (tag, length, bytes, ``|``); the tags, their order and every count are checked
here, and so is that each descriptor lies in a region that the peer declared. What UCX packs inside
(an endpoint's address, the keys of memory) stays opaque: a peer that is authenticated and means
harm can still send nonsense there.

The form is no promise of NIXL's. An agent whose own metadata does not have it checks nobody's.
"""

from __future__ import annotations

from pushkv.core.errors import RemoteProtocolError

from ._regions import RegionTable

__all__ = ["check_metadata", "has_known_form"]

_MAGIC = b"nixlSerDes|"
_CONNECTIONS_MOST = 8
_SECTIONS_MOST = 16
_DESCRIPTOR_BYTES_LEAST = 24


class _Walk:
    """A place in the bytes, that only moves forward."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self.literal(_MAGIC, "its magic")

    def literal(self, expected: bytes, what: str) -> None:
        end = self._at + len(expected)
        if self._data[self._at : end] != expected:
            raise self.wrong(what, self._data[self._at : end], f"{expected!r}")
        self._at = end

    def field(self, tag: bytes) -> bytes:
        """The bytes under `tag`, which must come next."""
        name = tag.decode() or "element"
        self.literal(tag, f"tag {name}")
        length = int.from_bytes(self._data[self._at : self._at + 8], "little")
        start = self._at + 8
        if start + length >= len(self._data):
            raise self.wrong(name, f"{length} bytes", "no more bytes than there are")
        self._at = start + length
        self.literal(b"|", f"end of {name}")
        return self._data[start : start + length]

    def count(self, tag: bytes, most: int) -> int:
        found = self.field(tag)
        number = int.from_bytes(found, "little")
        if len(found) != 8 or not 0 <= number <= most:
            raise self.wrong(tag.decode(), found[:16].hex(), f"a count of at most {most}")
        return number

    def text(self, tag: bytes, expected: str) -> None:
        found = self.field(tag)
        if found != expected.encode():
            raise self.wrong(tag.decode() or "element", found[:80], repr(expected))

    def end(self) -> None:
        if self._at != len(self._data):
            raise self.wrong("length", len(self._data), f"{self._at} bytes")

    def wrong(self, what: str, found: object, expected: str) -> RemoteProtocolError:
        return RemoteProtocolError(f"NIXL metadata: {what} at byte {self._at}", found, expected)


def check_metadata(data: bytes, agent: str, backend: str, regions: RegionTable) -> None:
    """Refuse metadata that is not of the known form, or names another agent, backend or memory.

    Raises:
        RemoteProtocolError: Names the place, what is there, and what was expected.
    """
    walk = _Walk(data)
    walk.text(b"Agent", agent)
    for _ in range(walk.count(b"Conns", _CONNECTIONS_MOST)):
        walk.text(b"t", backend)
        walk.field(b"c")
    walk.text(b"", "MemSection")
    for _ in range(walk.count(b"nixlSecElms", _SECTIONS_MOST)):
        walk.text(b"bknd", backend)
        walk.text(b"nixlDList", "nixlSDList")
        walk.field(b"t")
        # No count is believed: each element moves the walk forward, or ends it.
        for _ in range(walk.count(b"n", len(data))):
            _check_descriptor(walk, walk.field(b""), regions)
    walk.end()


def _check_descriptor(walk: _Walk, descriptor: bytes, regions: RegionTable) -> None:
    if len(descriptor) < _DESCRIPTOR_BYTES_LEAST:
        raise walk.wrong("descriptor", f"{len(descriptor)} bytes", f"{_DESCRIPTOR_BYTES_LEAST}")
    address = int.from_bytes(descriptor[:8], "little")
    length = int.from_bytes(descriptor[8:16], "little")
    if not regions.holds(address, length):
        raise walk.wrong(
            "descriptor", f"{length} bytes at {address:#x}", "a part of the memory it declared"
        )


def has_known_form(data: bytes, agent: str, backend: str, regions: RegionTable) -> bool:
    """Whether our own metadata passes: then that of a peer of our version must."""
    try:
        check_metadata(data, agent, backend, regions)
    except RemoteProtocolError:
        return False
    return True
