"""The ledger alone: whatever is reported, each attempt makes its request due exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.effects import Delivered, NotDelivered, ProducerAddress, RetryDue
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason
from pushkv_vllm.ledger import Entry, Ledger, Parting, Phase

T = TransferId("t")


def entry(name: str = "r", transfer: str = "t") -> Entry:
    return Entry(name, TransferId(transfer), ProducerAddress("p", 1), b"digest", 100)


def offered() -> tuple[Ledger, int]:
    ledger, one = Ledger(), entry()
    ledger.add(one)
    return ledger, ledger.offer(one)


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
    ledger.retry_due(RetryDue(T, first))
    one = ledger.get("r")
    assert one is not None
    second = ledger.offer(one)
    ledger.drain()
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


def test_abort_between_failure_and_report_is_due_once_and_not_failed() -> None:
    ledger, attempt = offered()
    ledger.not_delivered(failed(attempt, retry=True))
    assert ledger.finished("r")[1] is Parting.CANCEL
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


REPORTS = st.sampled_from(["delivered", "failed", "retriable", "retry", "finish", "offer", "drain"])


@given(st.lists(st.tuples(REPORTS, st.integers(1, 4)), max_size=40))
def test_one_due_per_attempt_whatever_comes(script: list[tuple[str, int]]) -> None:
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
                ledger.retry_due(RetryDue(T, attempt))
            case "finish":
                ledger.finished("r")
                alive = False
            case "offer" if alive and one.phase is Phase.WANTED:
                # vLLM asks again only after it was told.
                dues += len(ledger.drain().finished)
                assert dues == waits
                ledger.offer(one)
                waits += 1
            case "drain":
                dues += len(ledger.drain().finished)
        assert dues <= waits
    ledger.finished("r")
    dues += len(ledger.drain().finished)
    assert dues == waits
