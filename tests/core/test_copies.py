"""Copies with changes: what they hold, and that they are as immutable as what they were made of."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve, exceptions, fields, frozen
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.copies import copier, replace
from pushkv.core.link import Link, dialing
from pushkv.core.producer import Producer, produce

STATES: list[Any] = [dialing(1), produce("a", 0)]  # type: ignore[arg-type]
CHANGES = st.sampled_from(STATES).flatmap(
    lambda state: st.tuples(
        st.just(state),
        st.dictionaries(
            st.sampled_from([field.name for field in fields(type(state))]),
            st.none() | st.integers(),
        ),
    )
)


@given(CHANGES)
def test_a_copy_is_what_evolve_makes_and_leaves_the_original(
    drawn: tuple[Any, dict[str, object]],
) -> None:
    state, changes = drawn
    before = evolve(state)
    expected = evolve(state, **changes)
    for copy in (replace(state, **changes), copier(type(state))(state, **changes)):
        assert copy == expected
        assert hash(copy) == hash(expected)
        assert copy is not state
    assert state == before


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_a_copy_is_of_the_same_class_and_immutable(state: Producer | Link) -> None:
    copy = replace(state)
    assert type(copy) is type(state)
    assert repr(copy) == repr(state)
    with pytest.raises(exceptions.FrozenInstanceError):
        copy.status = state.status  # type: ignore[misc]
    with pytest.raises(exceptions.FrozenInstanceError):
        del copy.status
    assert not hasattr(copy, "__dict__")


def test_a_field_that_is_not_there_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        replace(STATES[0], colour=1)


def test_inherited_fields_are_copied_and_each_class_has_its_own_copier() -> None:
    @frozen
    class One:
        first: int

    @frozen
    class Two(One):
        second: int

    assert replace(Two(1, 2), second=3) == Two(1, 3)
    assert replace(One(1), first=4) == One(4)
