"""Who may be connected, in numbers: strangers make room for strangers, and for nobody else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.errors import ConfigurationError
from pushkv.runtime.admission import Admission, Allowance, Limits

FEW = Limits(
    connections_most=6,
    connections_per_address_most=3,
    strangers_most=4,
    strangers_per_address_most=2,
)


def test_the_oldest_stranger_of_an_address_makes_room_for_its_next() -> None:
    admission = Admission(FEW)
    assert admission.enter(1, "a") == []
    assert admission.enter(2, "b") == []
    assert admission.enter(3, "a") == []
    assert admission.enter(4, "a") == [1]
    admission.greeted(3)
    assert admission.enter(5, "a") == []
    assert admission.enter(6, "a") == [4], "who was greeted stays"
    assert len(admission) == 4


def test_in_all_the_address_with_the_most_strangers_makes_room() -> None:
    admission = Admission(FEW)
    for number, address in enumerate(("a", "b", "b", "c"), 1):
        assert admission.enter(number, address) == []
    assert admission.enter(5, "d") == [2]


def test_who_was_greeted_fills_an_address_and_the_whole() -> None:
    admission = Admission(FEW)
    for number in range(3):
        assert admission.full("a") == ""
        admission.enter(number, "a")
        admission.greeted(number)
    assert "3 connections from a" in admission.full("a")
    for number in range(3, 6):
        assert admission.full(f"b{number}") == ""
        admission.enter(number, f"b{number}")
        admission.greeted(number)
    assert "6 connections" in admission.full("c")
    admission.leave(0)
    admission.leave(0)
    assert admission.full("a") == admission.full("c") == ""


@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "greet", "leave"]), st.integers(0, 20)), max_size=60
    )
)
def test_limits_hold_and_nothing_is_kept_of_who_left(steps: list[tuple[str, int]]) -> None:
    admission = Admission(FEW)
    inside: dict[int, bool] = {}
    for what, number in steps:
        address = "abc"[number % 3]
        if what == "enter" and number not in inside and not admission.full(address):
            for gone in admission.enter(number, address):
                assert inside.pop(gone) is False, "who was greeted was sent away"
            inside[number] = False
        elif what == "greet" and number in inside:
            admission.greeted(number)
            inside[number] = True
        elif what == "leave":
            admission.leave(number)
            inside.pop(number, None)
        assert len(admission) == len(inside)
        strangers = [each for each, known in inside.items() if not known]
        assert len(strangers) <= FEW.strangers_most
        for place in range(3):
            assert sum(each % 3 == place for each in strangers) <= FEW.strangers_per_address_most
    for number in list(inside):
        admission.leave(number)
    assert admission == Admission(FEW)


def test_an_allowance_fills_with_time_up_to_its_most() -> None:
    bucket = Allowance(per_s=10, most=20)
    assert bucket.spend(20, 100.0) == 0
    assert bucket.spend(5, 100.0) == pytest.approx(0.5)
    assert bucket.spend(0, 100.5) == 0
    assert bucket.spend(1, 100.75) == 0
    assert bucket.spend(2, 100.75) == pytest.approx(0.05)
    assert bucket.spend(20, 1_000.0) == 0, "a long silence saves up no more than it holds"
    assert bucket.spend(1, 1_000.0) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "value"), [("connections_most", 0), ("hello_s", -1), ("dial_s", "5")]
)
def test_a_limit_that_is_none_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Limits(**{name: value})  # type: ignore[arg-type]
