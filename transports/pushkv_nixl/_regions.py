"""Registered memory as a sorted table, so that thousands of segments are checked in one pass."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from pushkv.core.errors import ConfigurationError
from pushkv.transport import Region, Segments

__all__ = ["RegionTable"]

_HOST = -1
_DEVICE_MOST = 2**31 - 1
_ADDRESS_SPACE = 2**64


@frozen(eq=False)
class RegionTable:
    """Disjoint regions, sorted by address.

    Attributes:
        starts: First address of each region, shape (n,), uint64.
        lengths: Length in bytes of each region, shape (n,), uint64.
        devices: -1 for host memory, else the accelerator's index, shape (n,), int64.
    """

    starts: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    devices: NDArray[np.int64]

    @classmethod
    def of(cls, regions: Iterable[Region]) -> RegionTable:
        """The table of `regions`; overlapping ones become one, touching ones only in host memory.

        Accelerator allocations that merely touch stay apart, because no single registration may
        span two of them.

        Raises:
            ConfigurationError: A region is empty, beyond the address space, or shares addresses
                with one of another device.
        """
        merged: list[tuple[int, int, int]] = []
        for region in sorted(regions, key=lambda each: (each.address, each.length_bytes)):
            start, end, device = region.address, region.address + region.length_bytes, region.device
            if start <= 0 or region.length_bytes <= 0 or end > _ADDRESS_SPACE:
                raise ConfigurationError("region", region, "memory: address > 0, length > 0")
            if not _HOST <= device <= _DEVICE_MOST:
                raise ConfigurationError("region", region, f"a device of -1 to {_DEVICE_MOST}")
            if merged and (start < merged[-1][1] or (start == merged[-1][1] and device == _HOST)):
                first, last, owner = merged[-1]
                if owner == device:
                    merged[-1] = (first, max(last, end), device)
                    continue
                if start < last:
                    raise ConfigurationError("region", region, f"no overlap with device {owner}")
            merged.append((start, end, device))
        return cls(
            np.array([start for start, _, _ in merged], dtype=np.uint64),
            np.array([end - start for start, end, _ in merged], dtype=np.uint64),
            np.array([device for _, _, device in merged], dtype=np.int64),
        )

    def descriptors(self, device_memory: bool) -> NDArray[np.uint64]:
        """Rows (address, length, device) for NIXL of the host's or the accelerators' regions."""
        chosen = (self.devices != _HOST) == device_memory
        return _descriptors(self.starts[chosen], self.lengths[chosen], self.devices[chosen])

    def holds(self, address: int, length_bytes: int) -> bool:
        """Whether `length_bytes` from `address` on lie within one region."""
        if not 0 <= address < _ADDRESS_SPACE or not 0 <= length_bytes < _ADDRESS_SPACE:
            return False
        index = int(np.searchsorted(self.starts, np.uint64(address), side="right")) - 1
        if index < 0:
            return False
        return address + length_bytes <= int(self.starts[index]) + int(self.lengths[index])

    def locate(self, segments: Segments) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Descriptors of `segments`, shape (n, 3), and whether each lies in accelerator memory.

        Raises:
            ValueError: A segment does not lie within one region; the message names the first.
        """
        addresses, lengths = segments[:, 0], segments[:, 1]
        if not len(self.starts):
            raise ValueError("no memory is registered")
        # Differences only, never address + length: that may wrap around.
        index = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        held = np.maximum(index, 0)
        offsets = addresses - self.starts[held]
        inside = (index >= 0) & (offsets <= self.lengths[held])
        inside &= lengths <= np.where(inside, self.lengths[held] - offsets, 0)
        if not inside.all():
            row = int(np.argmin(inside))
            raise ValueError(
                f"segment {row} at {int(addresses[row]):#x}, {int(lengths[row])} bytes, "
                "is not within one registered region"
            )
        devices = self.devices[held]
        return _descriptors(addresses, lengths, devices), devices != _HOST


def _descriptors(
    addresses: NDArray[np.uint64], lengths: NDArray[np.uint64], devices: NDArray[np.int64]
) -> NDArray[np.uint64]:
    # NIXL numbers host memory 0, and tells it from an accelerator's by the list's memory type.
    return np.stack([addresses, lengths, np.maximum(devices, 0).astype(np.uint64)], axis=1)
