"""Schedules are read or refused, and goodput is told by when requests arrived."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.bench.faults import Fault, Outcome, parse_schedule, run_faults, summarise
from pushkv.bench.replay import Load, Settings
from pushkv.bench.workload import parse_cell, parse_lengths
from pushkv.core.errors import ConfigurationError


def test_a_schedule_is_read() -> None:
    assert parse_schedule("20:kill:prefill,25.5:start:prefill,30:freeze:decode") == (
        Fault(20, "kill", "prefill"),
        Fault(25.5, "start", "prefill"),
        Fault(30, "freeze", "decode"),
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", ""),
        ("20:kill", "20:kill"),
        ("x:kill:prefill", "x:kill:prefill"),
        ("20:hit:prefill", "20:hit:prefill"),
        ("20:kill:proxy", "20:kill:proxy"),
        ("-1:kill:prefill", "-1:kill:prefill"),
        ("nan:kill:prefill", "nan:kill:prefill"),
        ("20:kill:prefill,10:start:prefill", "10:start:prefill"),
        ("20:start:prefill", "20:start:prefill"),
        ("20:kill:prefill,21:kill:prefill", "21:kill:prefill"),
        ("20:freeze:prefill,21:start:prefill", "21:start:prefill"),
    ],
)
def test_what_cannot_be_is_refused(text: str, part: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_schedule(text)
    assert (caught.value.field, caught.value.value) == ("fault_schedule", part)


def test_what_comes_of_requests_is_told_by_their_arrival() -> None:
    bad = "prefill answered 500"
    result = summarise(
        [
            Outcome(1, 2, True, 4),
            Outcome(5, 12, False, 4),  # too slow, and ends after the fault: before, not failed
            Outcome(11, 13, False, 4, bad),
            Outcome(19, 20, False, 2, bad),
            Outcome(20, 21, False, 2),
            Outcome(22, 23, True, 2),
            Outcome(23, 24, False, 2),
            Outcome(24, 25, True, 2),
            Outcome(25, 26, True, 2),
            Outcome(26, 27, True, 2),
        ],
        first_s=10,
        last_s=20,
        end_s=30,
    )
    windows = [(w.n, w.good, w.failed, w.goodput_qps) for w in (result.before, result.during)]
    assert windows == [(2, 1, 0, 0.1), (2, 0, 2, 0.0)]
    assert (result.after.n, result.after.good, result.after.goodput_qps) == (6, 4, 0.4)
    assert result.recovery_s == 4
    assert result.wasted_block_s == 4 * 2 + 2 * 1
    assert result.failures == {bad: 2}


OUTCOMES = st.lists(
    st.builds(
        Outcome,
        st.floats(0, 29),
        st.just(30.0),
        st.booleans(),
        st.integers(1, 9),
        st.just(""),
    ),
    max_size=20,
)


@given(OUTCOMES)
def test_every_request_is_in_one_window_and_recovery_needs_three(outcomes: list[Outcome]) -> None:
    result = summarise(outcomes, 10, 20, 30)
    assert result.before.n + result.during.n + result.after.n == len(outcomes)
    if result.recovery_s is not None:
        assert result.after.good >= 3
    assert result.wasted_block_s == 0


@pytest.mark.parametrize(("cell", "mode"), [("128", "pushkv"), ("128@1", "mono")])
def test_a_run_that_makes_no_sense_is_refused(cell: str, mode: str) -> None:
    settings = Settings([Load(parse_cell(cell, parse_lengths("4")))], modes=(mode,))
    with pytest.raises(ConfigurationError):
        run_faults(settings, parse_schedule("1:kill:prefill"), lambda text: None)
