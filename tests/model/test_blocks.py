"""Block memory: each invariant is seen to hold, and seen to break."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.errors import LocalProtocolError
from pushkv.model.blocks import (
    BlockMemory,
    Holding,
    Stamp,
    Use,
    fill,
    free,
    holds_all_of,
    land,
    own,
    quarantine,
    read,
    release,
    reserve,
    violations,
)

from .names import attempt

A, B = attempt(0), attempt(1)


def breaches(memory: BlockMemory) -> list[str]:
    return [each.invariant for each in violations(memory)]


def reserved(pieces_per_block: int = 1) -> tuple[BlockMemory, tuple[int, ...]]:
    return reserve(BlockMemory(4, pieces_per_block), A, 2)


def test_all_blocks_are_free_at_first() -> None:
    assert BlockMemory(3).free == (0, 1, 2)
    assert violations(BlockMemory(3)) == ()
    assert hash(BlockMemory(3)) == hash(BlockMemory(3))


def test_a_delivery_from_reservation_to_the_pool() -> None:
    memory, blocks = reserved()
    assert blocks == (0, 1)
    memory = land(land(memory, 0, A, 0), 1, A, 1)
    assert [each.use for each in memory.holdings] == [Use.WRITING, Use.WRITING]
    assert holds_all_of(memory, blocks, A, frozenset({0, 1}))
    memory = release(memory, A, blocks, "r")
    assert memory.held_by("r") == blocks
    assert memory.held_by(A) == ()
    memory = free(memory, blocks)
    assert memory.free == (0, 1, 2, 3)
    assert violations(memory) == ()


def test_half_a_cache_is_not_all_of_it() -> None:
    memory, blocks = reserved(pieces_per_block=2)
    for piece in (0, 1, 2):
        memory = land(memory, piece, A, 0)
    assert memory.contents[2:4] == (Stamp(A, 0), None)
    assert not holds_all_of(memory, blocks, A, frozenset({0}))
    memory = land(memory, 3, A, 1)
    assert holds_all_of(memory, blocks, A, frozenset({0, 1}))
    assert not holds_all_of(memory, blocks, A, frozenset({0}))
    assert not holds_all_of(memory, blocks, B, frozenset({0, 1}))


def test_bytes_in_a_freed_block_break_i1() -> None:
    memory, blocks = reserved()
    memory = land(release(memory, A, blocks, None), 0, A, 0)
    assert breaches(memory) == ["I1"]
    assert "free" in violations(memory)[0].detail


def test_bytes_in_another_requests_block_break_i1() -> None:
    memory, blocks = reserved()
    memory, taken = own(release(memory, A, blocks, None), "other", 1)
    memory = fill(memory, "other", taken)
    assert violations(memory) == ()
    memory = land(memory, taken[0], A, 0)
    assert breaches(memory) == ["I1"]
    assert "owned by other" in violations(memory)[0].detail
    assert memory.contents[taken[0]] == Stamp(A, 0)


def test_bytes_of_another_attempt_break_i1() -> None:
    memory, blocks = reserved()
    memory, _ = reserve(release(memory, A, blocks, None), B, 2)
    assert breaches(land(memory, 0, B, 0)) == []
    assert breaches(land(memory, 0, A, 0)) == ["I1"]


def test_bytes_in_a_delivered_block_break_i1() -> None:
    memory, blocks = reserved()
    assert breaches(land(release(memory, A, blocks, "r"), 0, A, 0)) == ["I1"]


def test_quarantined_blocks_may_be_written() -> None:
    memory, _ = reserved()
    memory = land(quarantine(memory, A), 0, A, 0)
    assert violations(memory) == ()
    assert {each.use for each in memory.holdings} == {Use.QUARANTINED}


def test_reading_a_reused_source_breaks_i1() -> None:
    memory, blocks = own(BlockMemory(2), "r", 1)
    assert breaches(read(memory, blocks[0], "r", A, 0)) == []
    assert breaches(read(free(memory, blocks), blocks[0], "r", A, 0)) == ["I1"]
    reused, _ = own(free(memory, blocks), "other", 1)
    assert breaches(read(reused, blocks[0], "r", A, 0)) == ["I1"]


def test_a_double_release_breaks_i4() -> None:
    memory, blocks = reserved()
    memory = release(release(memory, A, blocks, None), A, blocks, None)
    assert breaches(memory) == ["I4", "I4"]
    memory, _ = own(memory, "one", 1)
    memory, _ = own(memory, "other", 1)
    assert memory.held_by("one") == memory.held_by("other") == (0,)
    assert "I4" in breaches(memory)
    assert "I1" in breaches(land(memory, 0, A, 0))


def test_a_block_given_to_two_breaks_i1_for_either() -> None:
    memory, blocks = reserved()
    memory = release(release(memory, A, blocks, None), A, blocks, None)
    memory, _ = own(memory, "one", 1)
    memory, _ = reserve(memory, B, 1)
    assert breaches(land(memory, 0, B, 0)).count("I1") == 1


def test_a_lost_block_and_an_invented_one_break_i4() -> None:
    memory, _ = reserved()
    assert breaches(evolve(memory, holdings=memory.holdings[:1])) == ["I4"]
    assert breaches(evolve(memory, free=(*memory.free, 9))) == ["I4"]
    twice = (*memory.holdings, Holding(0, Use.OWNED, "r"))
    assert breaches(evolve(memory, holdings=twice)) == ["I4"]


def test_more_than_is_free_is_refused() -> None:
    with pytest.raises(LocalProtocolError):
        own(BlockMemory(2), "r", 3)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=40))
def test_correct_bookkeeping_never_breaks_an_invariant(steps: list[tuple[int, int]]) -> None:
    """Any order of reserve, write, quarantine, deliver and free, each at its proper time."""
    memory = BlockMemory(6, pieces_per_block=2)
    given_to: dict[int, tuple[int, ...]] = {}
    owned: dict[str, tuple[int, ...]] = {}
    for number, (kind, which) in enumerate(steps):
        live = sorted(given_to)[which : which + 1]
        if kind == 0 and len(memory.free) >= which:
            memory, given_to[number] = reserve(memory, attempt(number), which)
        elif kind == 1 and len(memory.free) >= which:
            memory, owned[f"r{number}"] = own(memory, f"r{number}", which)
        elif kind == 2 and owned:
            memory = free(memory, owned.pop(sorted(owned)[which % len(owned)]))
        for each in live:
            if kind == 3:
                for piece in (piece for block in given_to[each] for piece in memory.pieces(block)):
                    memory = land(memory, piece, attempt(each), 0)
                assert holds_all_of(memory, given_to[each], attempt(each), frozenset({0}))
            elif kind == 4:
                memory = quarantine(memory, attempt(each))
            elif kind == 5:
                owner = f"r{number}" if which % 2 else None
                memory = release(memory, attempt(each), given_to[each], owner)
                blocks = given_to.pop(each)
                if owner is not None:
                    owned[owner] = blocks
        assert violations(memory) == ()
