"""A WRITE cut into pieces that are posted one by one.

A post blocks the posting thread for its whole length over some UCX transports, about 4 µs a
descriptor of 4 KiB and as long as a copy takes. Pieces bound that, so that a permit is checked
often enough (R5) and other WRITEs and arrivals are not kept waiting.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from pushkv.transport import Segments

from ._regions import RegionTable

__all__ = ["PIECE_BYTES", "PIECE_DESCRIPTORS", "Piece", "cut"]

PIECE_DESCRIPTORS = 1024
"""Most descriptors in one piece."""

PIECE_BYTES = 64 * 1024 * 1024
"""Most bytes in one piece, unless one segment alone has more."""


@frozen(eq=False)
class Piece:
    """One post: descriptors of shape (n, 3), uint64: address, length in bytes, device."""

    source: NDArray[np.uint64]
    destination: NDArray[np.uint64]
    from_device: bool
    to_device: bool


def cut(
    source: Segments, destination: Segments, ours: RegionTable, theirs: RegionTable
) -> list[Piece]:
    """The pieces of a WRITE from `source`, within `ours`, to `destination`, within `theirs`.

    Empty segments are left out; a WRITE of no bytes has no pieces.

    Raises:
        ValueError: The two do not match segment by segment, or a segment lies outside the memory.
    """
    _check(source, destination)
    filled = source[:, 1] > 0
    if not filled.all():
        source, destination = source[filled], destination[filled]
    if not len(source):
        return []
    try:
        local, local_device = ours.locate(source)
    except ValueError as error:
        raise ValueError(f"source: {error}") from None
    try:
        remote, remote_device = theirs.locate(destination)
    except ValueError as error:
        raise ValueError(f"destination: {error}") from None
    kinds = local_device.astype(np.int8) * 2 + remote_device
    return [
        Piece(local[at:end], remote[at:end], bool(local_device[at]), bool(remote_device[at]))
        for at, end in _spans(local[:, 1], kinds)
    ]


def _check(source: Segments, destination: Segments) -> None:
    for name, segments in (("source", source), ("destination", destination)):
        if segments.ndim != 2 or segments.shape[1] != 2 or segments.dtype != np.uint64:
            raise ValueError(
                f"{name} has shape {segments.shape} and dtype {segments.dtype}: "
                "expected (n, 2) and uint64"
            )
    if len(source) != len(destination):
        raise ValueError(f"{len(source)} source and {len(destination)} destination segments")
    unequal = np.flatnonzero(source[:, 1] != destination[:, 1])
    if len(unequal):
        row = int(unequal[0])
        raise ValueError(
            f"segment {row}: {int(source[row, 1])} bytes to {int(destination[row, 1])} bytes"
        )


def _spans(lengths: NDArray[np.uint64], kinds: NDArray[np.int8]) -> Iterator[tuple[int, int]]:
    """[at, end) of each piece: within both limits, of one pair of memory types (NIXL's rule)."""
    totals = np.cumsum(lengths, dtype=np.uint64)
    changes = np.flatnonzero(np.diff(kinds)) + 1
    at = 0
    while at < len(lengths):
        written = int(totals[at - 1]) if at else 0
        fits = int(np.searchsorted(totals, np.uint64(written + PIECE_BYTES), side="right"))
        end = min(max(fits, at + 1), at + PIECE_DESCRIPTORS, len(lengths))
        later = changes[np.searchsorted(changes, at, side="right") :]
        if len(later):
            end = min(end, int(later[0]))
        yield at, end
        at = end
