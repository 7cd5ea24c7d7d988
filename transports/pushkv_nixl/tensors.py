"""Regions out of tensors, without importing what made them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from pushkv.core.errors import ConfigurationError
from pushkv.transport import Region

__all__ = ["Tensor", "regions_of"]


class Tensor(Protocol):
    """What is needed of a tensor; torch's fits, and so does anything with the same names."""

    @property
    def nbytes(self) -> int:
        """Length of the elements in bytes."""

    @property
    def shape(self) -> Sequence[int]:
        """Number of elements in each dimension."""

    def stride(self) -> Sequence[int]:
        """Distance of neighbours in each dimension, in elements."""

    def data_ptr(self) -> int:
        """Address of the first element."""

    def get_device(self) -> int:
        """-1 for host memory, else the accelerator's index."""


def regions_of(tensors: Iterable[Tensor]) -> list[Region]:
    """The memory of `tensors`, one region each, equal ones once.

    The caller keeps the tensors alive until the transport is closed. Dimensions may be permuted, as
    KV caches often are, as long as the elements fill one range of memory.

    Raises:
        ConfigurationError: A tensor is empty or has gaps.
    """
    regions: dict[Region, None] = {}
    for number, tensor in enumerate(tensors):
        if tensor.nbytes == 0:
            raise ConfigurationError(f"tensors[{number}].nbytes", 0, "a tensor with elements")
        if not _dense(tensor):
            raise ConfigurationError(
                f"tensors[{number}].stride()", tuple(tensor.stride()), "elements without gaps"
            )
        regions[Region(tensor.data_ptr(), tensor.nbytes, tensor.get_device())] = None
    return list(regions)


def _dense(tensor: Tensor) -> bool:
    distance = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != distance:
                return False
            distance *= size
    return True
