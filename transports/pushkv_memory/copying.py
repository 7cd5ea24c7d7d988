"""Copying between addresses of this process, in pieces."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence

from pushkv.transport import Region, Write

__all__ = ["Run", "copy", "covers", "problem", "snapshot", "split"]

Run = tuple[int, int, int]
"""Source address, destination address and length in bytes of one contiguous copy."""


def problem(write: Write) -> str:
    """Why this WRITE cannot be made of copies, or "" if it can."""
    for name in ("source", "destination"):
        shape = getattr(write, name).shape
        if len(shape) != 2 or shape[1] != 2:
            return f"{name} has shape {shape}, expected (n, 2)"
    if len(write.source) != len(write.destination):
        return f"{len(write.source)} source and {len(write.destination)} destination segments"
    if (write.source[:, 1] != write.destination[:, 1]).any():
        return "source and destination segments differ in length"
    return ""


def split(write: Write, pieces_max: int) -> tuple[tuple[Run, ...], ...]:
    """The WRITE as at most `pieces_max` pieces of about equal size, each of one or more runs.

    A piece may end in the middle of a segment: a WRITE that breaks off tears blocks, too.
    """
    runs = [
        (source, destination, length)
        for (source, length), (destination, _) in zip(
            write.source.tolist(), write.destination.tolist(), strict=True
        )
        if length
    ]
    total = sum(length for _, _, length in runs)
    count = min(pieces_max, total)
    pieces: list[tuple[Run, ...]] = []
    done, index, offset = 0, 0, 0
    for number in range(count):
        until = total * (number + 1) // count
        piece: list[Run] = []
        while done < until:
            source, destination, length = runs[index]
            taken = min(length - offset, until - done)
            piece.append((source + offset, destination + offset, taken))
            done += taken
            offset += taken
            if offset == length:
                index, offset = index + 1, 0
        pieces.append(tuple(piece))
    return tuple(pieces)


def copy(runs: Sequence[Run], saved: Sequence[bytes] | None) -> None:
    """Copy each run, from `saved` instead of its source where that is given."""
    if saved is None:
        for source, destination, length in runs:
            ctypes.memmove(destination, source, length)
    else:
        for (_, destination, length), content in zip(runs, saved, strict=True):
            ctypes.memmove(destination, content, length)


def snapshot(runs: Sequence[Run]) -> tuple[bytes, ...]:
    """The source bytes of each run, as they are now."""
    return tuple(ctypes.string_at(source, length) for source, _, length in runs)


def covers(regions: Sequence[Region], address: int, length_bytes: int) -> bool:
    """Whether one of `regions`, ascending by address, holds all of that range."""
    index = bisect_right(regions, address, key=lambda region: region.address) - 1
    if index < 0:
        return False
    region = regions[index]
    return address + length_bytes <= region.address + region.length_bytes
