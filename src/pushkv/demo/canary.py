"""Flips one byte in another process's memory, to see whether a comparison would notice."""

from __future__ import annotations

from pathlib import Path

from pushkv.core.errors import PushKVError
from pushkv.core.ids import Blocks
from pushkv.observe.timeline import TracedCache

__all__ = ["flip_first_block"]

FLIPPED_BITS = 0x40
"""In the highest byte of a float32 this is the exponent's top bit."""


def flip_first_block(cache: TracedCache, blocks: Blocks, offset_bytes: int) -> None:
    """Flip a bit in the first block of `blocks`, in the last region, `offset_bytes` in.

    Raises:
        PushKVError: The system does not let us write into that process.
    """
    address = cache.address(len(cache.regions) - 1, blocks[0][0]) + offset_bytes
    path = Path(f"/proc/{cache.pid}/mem")
    try:
        with path.open("r+b", buffering=0) as memory:
            memory.seek(address)
            value = memory.read(1)[0]
            memory.seek(address)
            memory.write(bytes([value ^ FLIPPED_BITS]))
    except OSError as error:
        raise PushKVError(
            f"cannot write to {path} ({error}); where /proc/sys/kernel/yama/ptrace_scope is 2 or "
            "more, run the demo as root"
        ) from error
