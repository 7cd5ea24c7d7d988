"""Which producer rank writes which heads to which consumer rank.

Both ends compute the same plan from the same few numbers, so that a consumer rank knows how many
producer ranks owe it a verdict, a producer rank knows how many consumer ranks it serves, and each
byte has exactly one writer:

* KV heads are split evenly over tensor-parallel ranks, in order. Where there are more ranks than
  heads, each head is held by as many neighbours as there are ranks per head. An MLA latent is one
  head, held by all.
* Of the producer ranks that hold a head, consumer rank d is served by number d modulo their count:
  equal sizes pair off, and replicas share the work.
* A group without heads (opaque blocks) goes from rank to the same rank.
* A producer rank that writes to nobody still serves the consumer rank beside it, with nothing: so
  it hears when its source is free.
* Every consumer rank is served by every pipeline stage of the producer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from attrs import frozen

from pushkv.core.errors import ConfigurationError

__all__ = ["NO_HEADS", "RankPlan", "Ranks", "heads_held", "heads_written"]

NO_HEADS = 0
"""Stands for the number of heads of a group of opaque blocks."""


@frozen
class Ranks:
    """The sizes of an engine's parallel groups; rank r is tensor rank r % tensor of its stage."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def count(self) -> int:
        """All ranks."""
        return self.tensor * self.pipeline


def heads_held(heads_total: int, size: int, rank: int) -> range:
    """The KV heads that tensor-parallel rank `rank` of `size` holds.

    Raises:
        ConfigurationError: Neither number divides the other.
    """
    if heads_total % size == 0:
        count = heads_total // size
        return range(rank * count, (rank + 1) * count)
    if size % heads_total == 0:
        head = rank // (size // heads_total)
        return range(head, head + 1)
    raise ConfigurationError(
        "heads_total", heads_total, f"a multiple or a divisor of tensor_parallel_size = {size}"
    )


def heads_written(
    heads_total: int, producer_size: int, producer_rank: int, consumer_size: int, consumer_rank: int
) -> range:
    """The heads that one tensor-parallel rank writes to another; empty for none.

    Raises:
        ConfigurationError: The heads cannot be split over one of the two sizes.
    """
    held = heads_held(heads_total, producer_size, producer_rank)
    wanted = heads_held(heads_total, consumer_size, consumer_rank)
    replicas = max(producer_size // heads_total, 1)
    if producer_rank % replicas != consumer_rank % replicas:
        return range(0)
    return range(max(held.start, wanted.start), min(held.stop, wanted.stop))


@frozen
class RankPlan:
    """Who serves whom.

    Args:
        heads: Per KV cache group, the heads of the whole model, or `NO_HEADS`.
        producer: The producer's ranks.
        consumer: The consumer's ranks.
    """

    heads: tuple[int, ...]
    producer: Ranks
    consumer: Ranks

    def producers_of(self, consumer_rank: int) -> tuple[int, ...]:
        """The producer ranks that serve a consumer rank, ascending; each owes it a verdict.

        Raises:
            ConfigurationError: These engines cannot be mapped; names why.
        """
        tensor_rank = consumer_rank % self.consumer.tensor
        stage = range(self.producer.tensor)
        serving = [rank for rank in stage if tensor_rank in _served(self, rank)]
        return tuple(
            first + rank
            for first in range(0, self.producer.count, self.producer.tensor)
            for rank in serving
        )

    def consumers_of(self, producer_rank: int) -> tuple[int, ...]:
        """The consumer ranks that a producer rank serves, ascending.

        Raises:
            ConfigurationError: These engines cannot be mapped; names why.
        """
        served = _served(self, producer_rank % self.producer.tensor)
        return tuple(
            first + rank
            for first in range(0, self.consumer.count, self.consumer.tensor)
            for rank in served
        )

    def served(self, rank: int) -> Sequence[int]:
        """The tensor-parallel ranks of the consumer that one of the producer's serves.

        Raises:
            ConfigurationError: These engines cannot be mapped; names why.
        """
        sizes = self.producer.tensor, self.consumer.tensor
        if NO_HEADS in self.heads and sizes[0] != sizes[1]:
            raise ConfigurationError(
                "tensor_parallel_size", sizes[0], f"{sizes[1]}, for opaque blocks cannot be split"
            )
        served = [other for other in range(sizes[1]) if self._writes(rank, other)]
        return served or [rank * sizes[1] // sizes[0]]

    def _writes(self, rank: int, other: int) -> bool:
        sizes = self.producer.tensor, self.consumer.tensor
        return any(
            rank == other
            if total == NO_HEADS
            else len(heads_written(total, sizes[0], rank, sizes[1], other)) > 0
            for total in self.heads
        )


@lru_cache(maxsize=4_096)
def _served(plan: RankPlan, rank: int) -> Sequence[int]:
    return plan.served(rank)
