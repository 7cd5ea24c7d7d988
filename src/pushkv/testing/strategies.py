"""Hypothesis strategies for pushkv's data: whatever the wire carries, bounds included."""

from __future__ import annotations

from hypothesis import strategies as st

from pushkv import wire
from pushkv.core.ids import AttemptId, Blocks, Duration, EngineId, Incarnation, Part, TransferId
from pushkv.core.messages import (
    Complete,
    Failed,
    Grant,
    Hello,
    Message,
    Ping,
    Progress,
    Query,
    RankAddress,
    Reason,
    Received,
    Refused,
    Register,
    Registered,
    Revoke,
    Revoked,
    Unproven,
)
from pushkv.layout import CacheGroup, CacheLayout, CacheRegion

__all__ = [
    "attempts",
    "blocks",
    "cache_layouts",
    "durations",
    "hellos",
    "messages",
    "names",
    "pairs",
    "parts",
    "registers",
    "unsigned",
]


def unsigned(bits: int = 64) -> st.SearchStrategy[int]:
    """Integers of `bits` bits without a sign; the bounds come up often."""
    return st.integers(0, 2**bits - 1) | st.sampled_from((0, 2**bits - 1))


def names(most: int = wire.NAME_LENGTH_MOST) -> st.SearchStrategy[str]:
    """What an engine or a transfer may be called: any text of 1 to `most` characters."""
    return st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=most)


def durations() -> st.SearchStrategy[Duration]:
    """Durations in nanoseconds."""
    return unsigned(63).map(Duration)


def attempts() -> st.SearchStrategy[AttemptId]:
    """Full names of registrations."""
    ranks = st.integers(0, wire.RANKS_MOST - 1)
    return st.builds(
        AttemptId,
        names().map(EngineId),
        unsigned().map(Incarnation),
        ranks,
        ranks,
        names().map(TransferId),
        unsigned(63),
    )


def blocks(groups: int = 4, length: int = 20) -> st.SearchStrategy[Blocks]:
    """Block ids of up to `groups` KV cache groups of up to `length` blocks each."""
    ids = st.integers(0, wire.BLOCK_ID_MOST)
    group = st.lists(ids, max_size=length).map(tuple)
    return st.lists(group, max_size=groups).map(tuple)


def _ranges() -> st.SearchStrategy[tuple[int, int]]:
    tokens = st.integers(0, wire.TOKENS_MOST)
    return st.tuples(tokens, tokens).map(lambda pair: (min(pair), max(pair)))


def parts(length: int = 5) -> st.SearchStrategy[tuple[Part, ...]]:
    """Up to `length` parts, as a verdict names them."""
    part = st.builds(lambda number, span: Part(number, *span), unsigned(32), _ranges())
    return st.lists(part, max_size=length).map(tuple)


def pairs(length: int = 5) -> st.SearchStrategy[tuple[tuple[str, str], ...]]:
    """Up to `length` pairs that describe a model or a layout, each key once."""
    value = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    return st.dictionaries(names(wire.PAIR_KEY_LENGTH_MOST), value, max_size=length).map(
        lambda found: tuple(found.items())
    )


def registers() -> st.SearchStrategy[Register]:
    """REGISTER messages."""
    digests = st.binary(max_size=wire.DIGEST_BYTES_MOST)
    ranks = st.lists(st.integers(0, wire.RANKS_MOST - 1), min_size=1, max_size=4).map(tuple)
    return _ranges().flatmap(
        lambda span: st.builds(
            Register,
            attempt=attempts(),
            blocks=blocks(),
            start=st.just(span[0]),
            end=st.just(span[1]),
            prompt_digest=digests,
            layout_digest=digests,
            producer_ranks=ranks,
            consumer_ranks=ranks,
            arrival_token=unsigned(),
            deadline=durations(),
        )
    )


def hellos() -> st.SearchStrategy[Hello]:
    """HELLO messages."""
    address = st.builds(
        RankAddress,
        st.integers(0, wire.RANKS_MOST - 1),
        names(255),
        st.integers(1, 65_535),
    )
    return st.builds(
        Hello,
        protocol=unsigned(16),
        nonce=unsigned(),
        engine=names().map(EngineId),
        incarnation=unsigned().map(Incarnation),
        rank=st.integers(0, wire.RANKS_MOST - 1),
        model=pairs(),
        layout=pairs(),
        transport=names(256),
        transport_version=names(256),
        lease=durations(),
        directory=st.lists(address, max_size=4).map(tuple),
        memory=st.binary(max_size=200),
        process=st.text(max_size=20),
    )


def messages() -> st.SearchStrategy[Message]:
    """Every control message, each class as often as any other."""
    attempt = attempts()
    tokens = st.integers(0, wire.TOKENS_MOST)
    incarnations = unsigned().map(Incarnation)
    words = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
    return st.one_of(
        registers(),
        st.builds(Registered, attempt),
        st.builds(Progress, attempt, tokens),
        st.builds(Complete, attempt, parts()),
        st.builds(Failed, attempt, parts(), st.sampled_from(Reason)),
        st.builds(Revoked, attempt, parts()),
        st.builds(Unproven, attempt, parts()),
        st.builds(Revoke, attempt, st.booleans()),
        st.builds(Query, attempt),
        st.builds(Received, attempt),
        st.builds(Ping, unsigned()),
        st.builds(Grant, unsigned(), durations(), incarnations, incarnations),
        hellos(),
        st.builds(Refused, names(256), words, words),
    )


def cache_layouts(groups: int = 3, regions: int = 4) -> st.SearchStrategy[CacheLayout]:
    """Layouts of up to `groups` groups of up to `regions` regions each, at made-up addresses."""
    region = st.integers(1, 2**20).flatmap(
        lambda block_bytes: st.builds(
            CacheRegion,
            address=st.integers(0, 2**48),
            block_bytes=st.just(block_bytes),
            block_count=st.integers(1, 2**20),
            device=st.integers(-1, 8),
            block_stride_bytes=st.just(block_bytes) | st.integers(block_bytes, 2**21),
        )
    )
    group = st.builds(
        CacheGroup,
        block_tokens=st.integers(1, 1_024),
        regions=st.lists(region, min_size=1, max_size=regions).map(tuple),
    )
    return st.integers(1, 8).flatmap(
        lambda size: st.builds(
            CacheLayout,
            groups=st.lists(group, min_size=1, max_size=groups).map(tuple),
            dtype=names(64),
            kv_layout=names(64),
            tensor_parallel_size=st.just(size),
            tensor_parallel_rank=st.integers(0, size - 1),
            pipeline_parallel_size=st.just(size),
            pipeline_parallel_rank=st.integers(0, size - 1),
        )
    )
