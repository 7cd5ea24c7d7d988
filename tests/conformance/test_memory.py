"""The memory transport conforms, without and with faults, whatever it declares."""

from __future__ import annotations

from attrs import evolve

from pushkv.testing import CHECKS, LocalEnds, check_transport
from pushkv.testing.conformance.end import LARGE_BYTES
from pushkv_memory import MemoryTransport

from .memory_ends import HASTY, LATE, STRONG, memory_ends

# What late bytes have no part in, and takes long.
INDIFFERENT = {"many_small_writes", "idle_costs_nothing", "transfers_leak_nothing"}


def test_every_check_passes_at_once() -> None:
    report = check_transport(memory_ends, limits=HASTY)
    assert report.passed == tuple(CHECKS)
    assert report.skipped == {}
    assert report.transport == "memory"
    assert report.version == "1"


def test_a_large_segment_is_large_unless_told_otherwise() -> None:
    names = ["large_segment"]
    ends = memory_ends(large_bytes=LARGE_BYTES)
    assert check_transport(lambda: ends, names, HASTY).passed == ("large_segment",)
    assert LARGE_BYTES > 64 << 20
    assert LocalEnds(MemoryTransport).large_bytes == LARGE_BYTES


def test_checks_pass_late_and_in_any_order() -> None:
    names = [name for name in CHECKS if name not in INDIFFERENT][::-1]
    assert check_transport(lambda: memory_ends(LATE), names, HASTY).passed == tuple(names)


def test_what_is_not_declared_is_not_demanded() -> None:
    weak = evolve(STRONG, done_means_visible=False, reaches_successor=True)
    names = [name for name in CHECKS if name not in INDIFFERENT]
    report = check_transport(lambda: memory_ends(LATE, weak), names, HASTY)
    assert report.skipped == {
        "done_means_visible": "DONE is not declared to mean visible",
        "predecessor_stays_dead": "WRITEs are declared to reach a successor",
    }
    assert len(report.passed) == len(names) - 2
    assert "done_means_visible" in str(report)
    assert "skipped: DONE is not declared to mean visible" in str(report)


def test_without_means_to_crash_or_pause_that_is_left_out_and_said() -> None:
    names = ["bytes_arrive", "consumer_crashes", "close_is_honest"]
    report = check_transport(lambda: LocalEnds(MemoryTransport), names)
    assert report.passed == ("bytes_arrive",)
    assert report.skipped == {
        "consumer_crashes": "these ends cannot crash",
        "close_is_honest": "these ends cannot be stopped",
    }
