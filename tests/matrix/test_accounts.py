"""What makes the accounts of an engine add up, and that nothing else does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.matrix.accounts import disagreement
from tests.matrix.moments import shows_partial_bytes
from tests.matrix.soak_plot import early_and_late, lines, rates
from tests.runtime.nixl_node import Failure

LOST: Failure = ("delivered", "t", 0, "link_lost")
AGAIN: Failure = ("delivered", "t", 1, "unreachable")
SERVED: Failure = ("served", "t", None, "expired")
COUNTS = {"not_delivered_link_lost": 1, "not_delivered_unreachable": 1, "not_served_expired": 1}


def test_every_attempt_and_every_source_is_one_line_and_counts_one() -> None:
    logged: list[Failure] = [AGAIN, ("served", "t", 4, "expired"), LOST]
    assert disagreement([LOST, AGAIN, SERVED], logged, COUNTS) == ""


@pytest.mark.parametrize(
    ("told", "logged", "counts", "says"),
    [
        ([LOST, AGAIN, SERVED], [LOST, AGAIN], COUNTS, "not both"),
        ([LOST, AGAIN], [LOST, AGAIN, SERVED], COUNTS, "not both"),
        ([LOST, AGAIN, SERVED], [LOST, LOST, AGAIN, SERVED], COUNTS, "logged 2 times"),
        ([LOST, LOST, AGAIN, SERVED], [LOST, AGAIN, SERVED], COUNTS, "told 2 times"),
        ([LOST], [("delivered", "t", 0, "expired")], {"not_delivered_expired": 1}, "not both"),
        ([LOST], [LOST], {"not_delivered_link_lost": 2}, "in the counters"),
        ([LOST], [LOST], {"not_delivered_unreachable": 1}, "in the counters"),
        ([], [], {"not_served_expired": 1}, "in the counters"),
    ],
)
def test_what_does_not_add_up(
    told: list[Failure], logged: list[Failure], counts: dict[str, int], says: str
) -> None:
    assert says in disagreement(told, logged, counts)


def _trace(path: Path, transfer: str, posted: int, done: int) -> Path:
    attempt = {"transfer": transfer}
    post = {"kind": "step", "effects": [{"type": "PostWrite", "attempt": attempt}]}
    write = {"kind": "write", "attempt": attempt, "outcome": "done", "length_bytes": 1}
    found = [{"kind": "start"}, *[post] * posted, *[write] * done, {"kind": "counted"}]
    path.write_text("".join(json.dumps(each, separators=(",", ":")) + "\n" for each in found))
    return path


@pytest.mark.parametrize(
    ("posted", "done", "inside", "between"),
    [(2, 1, True, True), (2, 2, False, True), (1, 0, False, False), (0, 0, False, False)],
)
def test_a_trace_shows_whether_some_bytes_are_there_and_others_not(
    tmp_path: Path, posted: int, done: int, inside: bool, between: bool
) -> None:
    trace = _trace(tmp_path / "trace", "t", posted, done)
    assert shows_partial_bytes(trace, "t", must_be_open=True) is inside
    assert shows_partial_bytes(trace, "t", must_be_open=False) is between
    assert not shows_partial_bytes(trace, "another", must_be_open=False)


def test_a_plot_counts_transfers_over_all_lives() -> None:
    def sample(at_s: float, end: str, pid: int, **more: int) -> dict[str, object]:
        held = {"rss_mib": at_s, "native_threads": 4, "descriptors": 9}
        return {"at_s": at_s, "end": end, "pid": pid, **held, **more}

    samples = [
        sample(0, "consumer", 1, begun=0),
        sample(20, "consumer", 2, begun=50),  # a second life
        sample(10, "consumer", 1, begun=100),
        sample(20.5, "producer", 3),
    ]
    first, second, producer = lines(samples)
    assert (first.transfers, second.transfers, producer.transfers) == ([0, 100], [150], [150])
    assert first.held["rss_mib"] == [0, 10]
    assert rates(samples) == [(150, 7.5)]
    assert early_and_late(first)["descriptors"] == (9, 9)
