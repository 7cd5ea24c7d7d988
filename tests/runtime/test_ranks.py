"""Engines of unequal ranks: real sockets, real bytes, tokens that any wrong byte would change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import pytest
from attrs import evolve
from tests.runtime.node import QUICK, until

from pushkv.core.effects import ProducerAddress
from pushkv.core.errors import ConfigurationError, LocalProtocolError
from pushkv.core.events import Offered
from pushkv.core.ids import EngineId, TransferId, seconds
from pushkv.core.messages import Reason
from pushkv.fold import RankFold
from pushkv.rank_plan import Ranks
from pushkv.runtime import RankBridges, Runtime, RuntimeConfig, new_incarnation
from pushkv.testing.ranked_cache import RankedCache
from pushkv.testing.reference_engine import ReferenceCache, ReferenceEngine, Role, generate
from pushkv.transport import Transport, load_transport
from pushkv_memory import MemoryFabric, MemoryTransport

PROMPT = tuple(range(150))
LAYERS = 4
STEADY = evolve(
    QUICK,
    lease=seconds(10),
    waiting=seconds(30),
    expected=seconds(20),
    transfer=seconds(60),
    connect=seconds(5),
)
"""No fault is made here, so none may come of a busy machine that runs neither end for a second."""
PATIENT = {"hold": seconds(60)}
"""A source that only the end of its hold time freed would come back too late for the test."""


def right(prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """What a lone engine of one rank answers."""
    return generate(ReferenceCache(LAYERS, 64), prompt, 4)


class RankedNode:
    """An engine with a runtime for each of its ranks."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Transport],
        ranks: Ranks,
        changes: dict[str, Any] | None = None,
        **shape: Any,
    ) -> None:
        self.cache = RankedCache(ranks, layers=LAYERS, **shape)
        layouts = [self.cache.layout_of(rank) for rank in range(ranks.count)]
        incarnation = new_incarnation()
        self.runtimes = [
            Runtime(
                RuntimeConfig(
                    EngineId(name),
                    layout,
                    incarnation=incarnation,
                    rank=rank,
                    policy=evolve(STEADY, **(changes or {})),
                ),
                make(),
            )
            for rank, layout in enumerate(layouts)
        ]
        self.bridges = RankBridges(
            RankFold(layouts[0].heads, ranks), [each.bridge for each in self.runtimes]
        )
        self.engine = ReferenceEngine(self.cache, self.bridges, chunk_tokens=40)

    def __enter__(self) -> Self:
        for runtime in self.runtimes:
            runtime.start()
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        for runtime in self.runtimes:
            runtime.stop(0.5)
        self.engine.stop()

    @property
    def addresses(self) -> tuple[ProducerAddress, ...]:
        return tuple(
            ProducerAddress(*runtime.address, rank) for rank, runtime in enumerate(self.runtimes)
        )

    @property
    def idle(self) -> bool:
        return len(self.cache.free) == self.cache.block_count


def transfer(producer: RankedNode, consumer: RankedNode, first: str, name: str) -> None:
    """One request over both; all blocks must come back, before any hold time is over."""
    consumer.bridges.meet(producer.cache.ranks, producer.addresses)
    transfer = TransferId(name)
    if first == "producer":
        producer.engine.submit(transfer, PROMPT, Role.PRODUCE).result(20)
    result = consumer.engine.submit(transfer, PROMPT, Role.CONSUME, 4, producer.addresses[0])
    if first == "consumer":
        producer.engine.submit(transfer, PROMPT, Role.PRODUCE)
    generation = result.result(20)
    assert generation.reason is None
    assert generation.tokens == right()
    assert not generation.prefilled
    until(lambda: producer.idle and consumer.idle)


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1 to 2": ({"ranks": Ranks(1)}, {"ranks": Ranks(2)}),
    "2 to 1": ({"ranks": Ranks(2)}, {"ranks": Ranks(1)}),
    "2 to 4": ({"ranks": Ranks(2)}, {"ranks": Ranks(4)}),
    "2 to 2": ({"ranks": Ranks(2)}, {"ranks": Ranks(2)}),
    "4 to 2, of 2 heads": ({"ranks": Ranks(4), "heads": 2}, {"ranks": Ranks(2), "heads": 2}),
    "latent, 1 to 2": ({"ranks": Ranks(1), "heads": 1}, {"ranks": Ranks(2), "heads": 1}),
    "latent, 2 to 1": ({"ranks": Ranks(2), "heads": 1}, {"ranks": Ranks(1), "heads": 1}),
    "2 stages to 1": ({"ranks": Ranks(1, 2)}, {"ranks": Ranks(1)}),
    "2 stages of 2 to 2": ({"ranks": Ranks(2, 2)}, {"ranks": Ranks(2)}),
    "blocks 16 to 32": ({"ranks": Ranks(1)}, {"ranks": Ranks(1), "block_tokens": 32}),
    "blocks 32 to 16": ({"ranks": Ranks(1), "block_tokens": 32}, {"ranks": Ranks(1)}),
    "blocks 24 to 16, 2 to 1": ({"ranks": Ranks(2), "block_tokens": 24}, {"ranks": Ranks(1)}),
    "heads first to last": ({"ranks": Ranks(1)}, {"ranks": Ranks(2), "axes": "NH"}),
}


@pytest.mark.parametrize("first", ["producer", "consumer"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_a_lone_engine_s(shape: str, first: str) -> None:
    ours, theirs = SHAPES[shape]
    fabric = MemoryFabric()
    with (
        RankedNode("P", lambda: MemoryTransport(fabric), changes=PATIENT, **ours) as p,
        RankedNode("D", lambda: MemoryTransport(fabric), **theirs) as d,
    ):
        transfer(p, d, first, "t")


@pytest.mark.parametrize("shape", ["1 to 2", "2 to 1", "2 to 4", "latent, 2 to 1"])
def test_tokens_are_a_lone_engine_s_over_nixl(shape: str) -> None:
    ours, theirs = SHAPES[shape]

    def make() -> Transport:
        return load_transport("nixl", {})

    with (
        RankedNode("P", make, changes=PATIENT, **ours) as p,
        RankedNode("D", make, **theirs) as d,
    ):
        transfer(p, d, "producer", "t")
        transfer(p, d, "consumer", "u")


def test_a_consumer_that_waits_for_too_few_ranks_is_refused() -> None:
    fabric = MemoryFabric()
    with (
        RankedNode("P", lambda: MemoryTransport(fabric), Ranks(2)) as p,
        RankedNode("D", lambda: MemoryTransport(fabric), Ranks(1)) as d,
    ):
        p.engine.submit(TransferId("t"), PROMPT, Role.PRODUCE).result(20)
        # Nobody told it that there are two.
        generation = d.engine.submit(
            TransferId("t"), PROMPT, Role.CONSUME, 4, p.addresses[0]
        ).result(20)
        assert generation.reason is Reason.LAYOUT
        assert generation.tokens == right()
        assert fabric.history == ()


@pytest.mark.parametrize("lost", [0, 1])
def test_one_rank_that_cannot_be_reached_ends_it_at_all(lost: int) -> None:
    fabric = MemoryFabric()
    with (
        RankedNode("P", lambda: MemoryTransport(fabric), Ranks(2)) as p,
        RankedNode("D", lambda: MemoryTransport(fabric), Ranks(2), {"connect": QUICK.connect}) as d,
    ):
        addresses = list(p.addresses)
        addresses[lost] = evolve(addresses[lost], port=1)
        d.bridges.meet(Ranks(2), addresses)
        p.engine.submit(TransferId("t"), PROMPT, Role.PRODUCE).result(20)
        generation = d.engine.submit(TransferId("t"), PROMPT, Role.CONSUME, 4, addresses[0]).result(
            20
        )
        assert generation.reason is Reason.UNREACHABLE
        assert generation.tokens == right()
        until(lambda: p.idle and d.idle)


def test_a_cancelled_request_gives_its_blocks_back_at_every_rank() -> None:
    fabric = MemoryFabric()
    with (
        RankedNode("P", lambda: MemoryTransport(fabric), Ranks(1)) as p,
        RankedNode("D", lambda: MemoryTransport(fabric), Ranks(2)) as d,
    ):
        d.bridges.meet(Ranks(1), p.addresses)
        result = d.engine.submit(TransferId("t"), PROMPT, Role.CONSUME, 4, p.addresses[0])
        until(lambda: all(each.health and each.health.exposed_blocks for each in d.runtimes))
        d.engine.cancel(TransferId("t"))
        until(lambda: d.idle)
        assert result.cancelled()
        transfer(p, d, "consumer", "u")


def test_a_rank_that_is_not_its_layout_s_is_refused() -> None:
    layout = RankedCache(Ranks(2)).layout_of(1)
    with pytest.raises(ConfigurationError, match="rank = 0: expected 1, as in the layout"):
        RuntimeConfig(EngineId("P"), layout)


def test_an_offer_without_one_address_per_rank_is_refused() -> None:
    fold = RankFold((8,), Ranks(1))
    offer = Offered(TransferId("t"), 1, (ProducerAddress("h", 1),), ((1,),), 0, 4, b"")
    with pytest.raises(LocalProtocolError, match="expected the addresses of ranks 0 to 1"):
        fold.offer(offer, Ranks(2))
