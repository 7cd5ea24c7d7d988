"""The memory transport conforms, without and with faults, whatever it declares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve

from pushkv.testing.conformance import CHECKS, LocalEnds, check_transport
from pushkv_memory import MemoryTransport

from .memory_ends import HASTY, LATE, STRONG, memory_ends

NOT_VISIBLE = "DONE is not declared to mean visible"
REACHES = "WRITEs are declared to reach a successor"


@pytest.mark.parametrize(
    ("ends", "skipped"),
    [
        pytest.param(memory_ends, {}, id="at once"),
        pytest.param(lambda: memory_ends(LATE), {}, id="late"),
        pytest.param(
            lambda: memory_ends(
                LATE, evolve(STRONG, done_means_visible=False, reaches_successor=True)
            ),
            {"done_means_visible": NOT_VISIBLE, "predecessor_stays_dead": REACHES},
            id="weak",
        ),
    ],
)
def test_every_check_passes(ends: Callable[[], LocalEnds], skipped: dict[str, str]) -> None:
    report = check_transport(ends, limits=HASTY)
    assert report.skipped == skipped
    assert report.passed == tuple(name for name in CHECKS if name not in skipped)


def test_without_means_to_crash_or_pause_that_is_left_out_and_said() -> None:
    names = ["bytes_arrive", "consumer_crashes", "close_is_honest"]
    report = check_transport(lambda: LocalEnds(MemoryTransport), names)
    assert report.passed == ("bytes_arrive",)
    assert report.skipped == {
        "consumer_crashes": "these ends cannot crash",
        "close_is_honest": "these ends cannot be stopped",
    }
