"""What the logs and the counters of engines are held against each other for."""

from __future__ import annotations

import io
import json
import logging
import logging.config
from collections import Counter
from pathlib import Path

import pytest
from tests.matrix.causes import logging_config, read_counters, read_lines, silent, untold

from pushkv.core.effects import NotDelivered
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason
from pushkv.runtime.failures import Failures

LOST = ("not_delivered", "link_lost")
FELL = "WARNING vllm.pushkv: pushkv: request cmpl-{}-0-1a2b: transfer failed (gone; transfer x)\n"
LOG = Path("decode.log")


@pytest.fixture
def line(tmp_path: Path) -> str:
    """The line of one failure as an engine of the matrix writes it, by the real code."""
    config = json.loads(logging_config(tmp_path).read_text())["formatters"]["fields"]
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setFormatter(logging.Formatter(config["format"]))
    logger = logging.getLogger("pushkv.transfers")
    logger.addHandler(handler)
    try:
        report = NotDelivered(TransferId("t1"), 7, Reason.LINK_LOST, retry=False)
        Failures(0, Counter()).report(report, None)
    finally:
        logger.removeHandler(handler)
    return said.getvalue()


def test_a_failure_told_once_and_counted_once_is_well(line: str) -> None:
    lines = read_lines(line + FELL.format("one"))
    assert lines.attempts == (("delivered", "t1", "7"),)
    assert lines.requests == ("cmpl-one-0-1a2b",)
    assert untold("decode", lines, Counter({LOST: 1, ("delivered", ""): 4})) == []


@pytest.mark.parametrize(("times", "counted"), [(0, 1), (1, 0), (1, 2), (2, 1), (2, 2)])
def test_a_line_or_a_count_too_many_or_too_few_is_found(
    line: str, times: int, counted: int
) -> None:
    assert untold("decode", read_lines(line * times), Counter({LOST: counted}))


def test_a_request_told_twice_is_found() -> None:
    assert untold("decode", read_lines(FELL.format("one") * 2), Counter())


def test_an_answer_needs_a_transfer_or_a_line() -> None:
    legs = [(LOG, "one", 1), (LOG, "two", 2)]
    delivered = Counter({("delivered", ""): 2})
    told = read_lines(FELL.format("one"))
    assert silent("decode", told, delivered, legs) == []
    assert silent("decode", read_lines(""), delivered, legs)
    assert silent("decode", read_lines(FELL.format("other")), delivered, legs)


def test_counters_are_read_by_outcome_and_cause() -> None:
    text = (
        "# TYPE pushkv_transfers counter\n"
        'pushkv_transfers_total{engine="d",role="consumer",outcome="delivered",cause=""} 3.0\n'
        'pushkv_transfers_total{engine="d",role="consumer",outcome="not_delivered",'
        'cause="link_lost"} 2.0\n'
    )
    assert read_counters(text) == {("delivered", ""): 3, LOST: 2}
