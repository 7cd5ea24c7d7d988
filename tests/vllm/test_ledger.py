"""The ledger alone: whatever is reported, each attempt makes its request due exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    ProducerAddress,
    RetryDue,
)
from pushkv.core.events import Offered
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason
from pushkv_vllm.ledger import Entry, Ledger, Parting, Phase

T = TransferId("t")


def entry(name: str = "r", transfer: str = "t") -> Entry:
    return Entry(name, TransferId(transfer), ProducerAddress("p", 1), b"digest", 100)


def offer(ledger: Ledger, one: Entry) -> int:
    made = Offered(one.transfer, ledger.number(), (one.producer,), ((1,),), 0, 100, one.digest)
    ledger.offered(one, made)
    return made.attempt


def offered() -> tuple[Ledger, int]:
    ledger, one = Ledger(), entry()
    ledger.add(one)
    return ledger, offer(ledger, one)


def failed(attempt: int, *, retry: bool = False) -> NotDelivered:
    return NotDelivered(T, attempt, Reason.ABORTED, retry)


def test_delivery_is_due_once() -> None:
    ledger, attempt = offered()
    ledger.delivered(Delivered(T, attempt))
    assert ledger.delivered(Delivered(T, attempt)) is None
    assert ledger.drain().finished == {"r"}
    assert ledger.drain().finished == frozenset()


def test_the_first_outcome_counts() -> None:
    ledger, attempt = offered()
    ledger.not_delivered(failed(attempt))
    assert ledger.delivered(Delivered(T, attempt)) is None
    due = ledger.drain()
    assert due.finished == due.failed == {"r"}


def test_an_outcome_of_another_transfer_or_attempt_is_stale() -> None:
    ledger, attempt = offered()
    assert ledger.delivered(Delivered(TransferId("u"), attempt)) is None
    assert ledger.delivered(Delivered(T, attempt + 1)) is None
    assert ledger.drain().finished == frozenset()
    assert ledger.counts["stale outcome"] == 2


@pytest.mark.parametrize("retry", [False, True])
def test_an_outcome_of_an_older_attempt_is_stale(retry: bool) -> None:
    ledger, first = offered()
    ledger.not_delivered(failed(first, retry=True))
    assert ledger.drain().finished == frozenset(), "a retry is not yet a failure"
    one = ledger.retry_due(RetryDue(T, first))
    assert one is not None
    second = offer(ledger, one)
    assert ledger.delivered(Delivered(T, first)) is None
    assert ledger.not_delivered(failed(first, retry=retry)) is None
    assert ledger.retry_due(RetryDue(T, first)) is None
    assert ledger.drain().finished == frozenset()
    assert ledger.delivered(Delivered(T, second)) is one


def test_abort_while_waiting_makes_due_and_cancels() -> None:
    ledger, attempt = offered()
    assert ledger.finished("r")[1] is Parting.CANCEL
    assert ledger.not_delivered(failed(attempt)) is None
    due = ledger.drain()
    assert due.finished == {"r"}
    assert not due.failed
    assert len(ledger) == 0


def test_abort_after_the_outcome_is_not_due_again() -> None:
    ledger, attempt = offered()
    ledger.delivered(Delivered(T, attempt))
    ledger.drain()
    assert ledger.finished("r")[1] is Parting.NOTHING
    assert ledger.drain().finished == frozenset()


def test_only_the_release_of_the_last_attempt_makes_its_blocks_fit_to_offer() -> None:
    ledger, first = offered()
    one = ledger.get("r")
    assert one is not None
    fit = []
    for report in (
        BlocksReleased(T, first + 1),
        BlocksReleased(TransferId("u"), first),
        BlocksReleased(T, first),
    ):
        ledger.released(report)
        fit.append(one.released)
    ledger.not_delivered(failed(first, retry=True))
    assert ledger.retry_due(RetryDue(T, first)) is one
    offer(ledger, one)
    fit.append(one.released)
    assert fit == [False, False, True, False]


def test_the_end_of_an_older_backoff_is_stale() -> None:
    ledger, first = offered()
    ledger.not_delivered(failed(first, retry=True))
    one = ledger.retry_due(RetryDue(T, first))
    assert one is not None
    second = offer(ledger, one)
    ledger.not_delivered(failed(second, retry=True))
    assert ledger.retry_due(RetryDue(T, first)) is None
    assert ledger.counts["stale retry"] == 1
    assert ledger.retry_due(RetryDue(T, second)) is one


def test_a_request_that_needs_other_blocks_is_due_as_failed() -> None:
    ledger, first = offered()
    ledger.not_delivered(failed(first, retry=True))
    one = ledger.retry_due(RetryDue(T, first))
    assert one is not None
    ledger.ask_for_others(one)
    assert one.phase is Phase.WANTED
    due = ledger.drain()
    assert due.finished == due.failed == {"r"}
    assert ledger.finished("r")[1] is Parting.DECLINE
    assert ledger.drain().finished == frozenset()


def test_abort_in_backoff_is_due_once_and_cancels() -> None:
    ledger, attempt = offered()
    ledger.not_delivered(failed(attempt, retry=True))
    assert ledger.finished("r")[1] is Parting.CANCEL
    assert ledger.retry_due(RetryDue(T, attempt)) is None
    due = ledger.drain()
    assert due.finished == {"r"}
    assert not due.failed


def test_abort_between_failure_and_report_is_due_once_and_not_failed() -> None:
    ledger, attempt = offered()
    ledger.not_delivered(failed(attempt))
    assert ledger.finished("r")[1] is Parting.NOTHING
    due = ledger.drain()
    assert due.finished == {"r"}
    assert not due.failed


def test_a_request_that_never_waited_is_never_due() -> None:
    ledger = Ledger()
    ledger.add(entry("a", "ta"))
    ledger.add(entry("b", "tb"))
    here = ledger.get("b")
    assert here is not None
    ledger.prefill_here(here)
    assert ledger.finished("a")[1] is Parting.DECLINE
    assert ledger.finished("b")[1] is Parting.NOTHING
    assert ledger.finished("c") == (None, Parting.NOTHING)
    assert ledger.drain().finished == frozenset()


def test_a_transfer_is_taken_while_its_request_lives() -> None:
    ledger, _ = offered()
    assert not ledger.takes(T)
    with pytest.raises(AssertionError):
        ledger.add(entry("other"))
    ledger.finished("r")
    assert ledger.takes(T)


REPORTS = st.sampled_from(
    ("delivered", "failed", "retriable", "retry", "released", "finish", "offer", "drain")
)


@given(st.lists(st.tuples(REPORTS, st.integers(1, 4)), max_size=40))
def test_one_due_per_wait_whatever_comes(script: list[tuple[str, int]]) -> None:
    ledger, one = Ledger(), entry()
    ledger.add(one)
    alive, waits, dues = True, 0, 0
    for what, attempt in script:
        match what:
            case "delivered":
                ledger.delivered(Delivered(T, attempt))
            case "failed":
                ledger.not_delivered(failed(attempt))
            case "retriable":
                ledger.not_delivered(failed(attempt, retry=True))
            case "retry":
                again = ledger.retry_due(RetryDue(T, attempt))
                if again is not None and again.released:
                    offer(ledger, again)
                elif again is not None:
                    ledger.ask_for_others(again)
            case "released":
                ledger.released(BlocksReleased(T, attempt))
            case "finish":
                ledger.finished("r")
                alive = False
            case "offer" if alive and one.phase is Phase.WANTED:
                # vLLM asks again only after it was told.
                dues += len(ledger.drain().finished)
                assert dues == waits
                offer(ledger, one)
                waits += 1
            case "drain":
                dues += len(ledger.drain().finished)
        assert dues <= waits
    ledger.finished("r")
    dues += len(ledger.drain().finished)
    assert dues == waits
