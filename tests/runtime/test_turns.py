"""Whose WRITE is posted next: what waits, what for, and what is forgotten."""

from __future__ import annotations

from collections import Counter
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.effects import PostWrite
from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import AttemptId, EngineId, Epoch, Incarnation, Part, TransferId, Worker
from pushkv.layout import CacheGroup, CacheLayout, CacheRegion
from pushkv.runtime import RuntimeConfig
from pushkv.runtime.turns import Turns, part_tokens

BUDGET = 400
PART = 100


def worker(name: str) -> Worker:
    return Worker(EngineId(name), Incarnation(1), 0)


def write(consumer: str, transfer: str, number: int = 0) -> PostWrite:
    attempt = AttemptId(EngineId(consumer), Incarnation(1), 0, 0, TransferId(transfer), 0)
    return PostWrite(attempt, Epoch(1, 1), Part(number, 0, 16), ((0,),), 16, ((0,),), 0, 1)


class Wire:
    """Posts what is due, and keeps what is under way to each consumer, oldest first."""

    def __init__(self) -> None:
        self.turns = Turns(BUDGET)
        self.order: list[PostWrite] = []
        self.under_way: dict[Worker, list[PostWrite]] = {}

    def wait(self, consumer: str, transfer: str, parts: int = 1) -> None:
        for number in range(parts):
            self.turns.wait(worker(consumer), write(consumer, transfer, number))
        self.post()

    def post(self) -> None:
        for consumer, each in self.turns.due():
            self.turns.posted(consumer, PART)
            self.order.append(each)
            self.under_way.setdefault(consumer, []).append(each)
            assert len(self.under_way[consumer]) * PART <= BUDGET

    def end(self, consumer: str) -> None:
        del self.under_way[worker(consumer)][0]
        self.turns.ended(worker(consumer), PART)
        self.post()

    def posted(self, transfer: str) -> int:
        return sum(each.attempt.transfer == transfer for each in self.order)


def test_a_short_one_waits_for_the_budget_and_a_part_of_each_other() -> None:
    wire = Wire()
    wire.wait("d", "long", 64)
    wire.wait("d", "longer", 64)
    wire.wait("d", "short")
    assert wire.posted("long") == BUDGET // PART
    while not wire.posted("short"):
        wire.end("d")
    assert (wire.posted("long"), wire.posted("longer")) == (BUDGET // PART + 1, 1)


def test_what_is_never_reported_keeps_no_other_consumer_waiting() -> None:
    wire = Wire()
    wire.wait("dead", "a", 64)
    wire.wait("d", "b", 64)
    for _ in range(60):
        wire.end("d")
    assert wire.posted("b") == 64
    assert wire.posted("a") == BUDGET // PART


def test_what_waits_is_withdrawn_and_the_next_one_takes_its_turn() -> None:
    wire = Wire()
    wire.wait("d", "a", 64)
    wire.wait("d", "b", 2)
    withdrawn = wire.turns.withdraw(worker("d"), write("d", "a").attempt)
    assert [each.part.number for each in withdrawn] == list(range(4, 64))
    assert wire.turns.withdraw(worker("d"), write("d", "a").attempt) == ()
    wire.end("d")
    wire.end("d")
    assert [each.attempt.transfer for each in wire.order[4:]] == ["b", "b"]


def test_a_write_of_more_than_the_budget_goes_alone() -> None:
    turns = Turns(BUDGET)
    turns.wait(worker("d"), write("d", "a"))
    turns.wait(worker("d"), write("d", "b"))
    posted = []
    for consumer, each in turns.due():
        turns.posted(consumer, 3 * BUDGET)
        posted.append(each.attempt.transfer)
    assert posted == ["a"]


names = st.sampled_from(("d", "e"))
moves = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), names, st.sampled_from("abc"), st.integers(1, 6)),
        st.tuples(st.just("end"), names, st.just("a"), st.just(0)),
        st.tuples(st.just("withdraw"), names, st.sampled_from("abc"), st.just(0)),
    ),
    max_size=40,
)


@given(moves)
def test_everything_is_posted_once_or_withdrawn(story: list[tuple[str, str, str, int]]) -> None:
    wire, asked, withdrawn = Wire(), Counter[str](), 0
    for kind, consumer, letter, parts in story:
        name = f"{consumer}-{letter}"
        if kind == "wait":
            wire.wait(consumer, name, parts)
            asked[name] += parts
        elif kind == "withdraw":
            attempt = write(consumer, name).attempt
            withdrawn += len(wire.turns.withdraw(worker(consumer), attempt))
        elif wire.under_way.get(worker(consumer)):
            wire.end(consumer)
    for consumer in ("d", "e"):
        while wire.under_way.get(worker(consumer)):
            wire.end(consumer)
    assert len(wire.order) + withdrawn == asked.total()
    assert all(wire.posted(name) <= count for name, count in asked.items())


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.sampled_from((1, 16, 24))), min_size=1, max_size=3),
    st.integers(1, 1 << 24),
)
def test_a_part_is_of_whole_blocks_and_no_more_than_a_quarter_of_the_budget(
    sizes: list[tuple[int, int]], budget_bytes: int
) -> None:
    groups = tuple(
        CacheGroup(tokens, (CacheRegion(1 << 20, token_bytes * tokens, 4),))
        for token_bytes, tokens in sizes
    )
    tokens = part_tokens(CacheLayout(groups, "uint8", "NHD"), budget_bytes)
    assert all(tokens % group.block_tokens == 0 for group in groups)
    token_bytes = sum(each for each, _ in sizes)
    block = lcm(*(group.block_tokens for group in groups))
    assert tokens == block or tokens * token_bytes <= budget_bytes / 4
    assert (tokens + block) * token_bytes > budget_bytes / 4


def test_a_budget_is_a_number_of_bytes() -> None:
    region = CacheRegion(1 << 20, 64, 4)
    layout = CacheLayout((CacheGroup(16, (region,)),), "uint8", "NHD")
    with pytest.raises(ConfigurationError, match="write_budget_bytes = 0"):
        RuntimeConfig(EngineId("P"), layout, write_budget_bytes=0)
