"""The bridge: order, bounds, waiting, and an answer for every request after the runtime's end."""

from __future__ import annotations

import threading
import time

import pytest

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    ProducerAddress,
    RetryDue,
    SourceReleased,
)
from pushkv.core.errors import ConfigurationError, LocalProtocolError
from pushkv.core.events import Arrived, Cancelled, Computed, Offered, PrefillAborted
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason
from pushkv.runtime import Bridge
from pushkv.runtime import bridge as module


def make_bridge() -> Bridge:
    return Bridge(lambda: None)


def offer(name: str, attempt: int) -> Offered:
    address = ProducerAddress("127.0.0.1", 1)
    return Offered(TransferId(name), attempt, (address,), ((0,),), 0, 16, b"digest")


def failed(name: str, attempt: int, retry: bool = False) -> NotDelivered:
    return NotDelivered(TransferId(name), attempt, Reason.LINK_LOST, retry)


CLOSED = Reason.CLOSED


def test_events_and_reports_keep_their_order() -> None:
    bridge = make_bridge()
    sent = [Cancelled(TransferId(str(index))) for index in range(100)]
    for event in sent:
        bridge.submit(event)
    assert bridge.events() == sent
    assert bridge.events() == []
    told = [Delivered(TransferId(str(index)), index) for index in range(100)]
    for report in told:
        bridge.report(report)
    assert bridge.take() == told


def test_take_gives_no_more_than_asked_for_and_the_rest_later() -> None:
    bridge = make_bridge()
    told = [Delivered(TransferId("t"), index) for index in range(5)]
    for report in told:
        bridge.report(report)
    assert bridge.take(2) == told[:2]
    assert bridge.wait(0), "what is left still counts as there"
    assert bridge.take(2) == told[2:4]
    assert bridge.take(2) == told[4:]
    assert not bridge.wait(0)


def test_wait_ends_with_a_report_with_interrupt_and_with_its_bound() -> None:
    bridge = make_bridge()
    assert not bridge.wait(0.01)
    threading.Timer(0.02, bridge.report, [Delivered(TransferId("t"), 0)]).start()
    assert bridge.wait(10)
    bridge.take()
    threading.Timer(0.02, bridge.interrupt).start()
    before = time.monotonic()
    assert not bridge.wait(10), "an interrupt is no report"
    assert time.monotonic() - before < 5
    bridge.take()
    assert not bridge.wait(0.01), "an interrupt ends one wait"


def test_many_threads_submit_and_nothing_is_lost_or_swapped() -> None:
    bridge = make_bridge()
    taken: list[Cancelled] = []
    done = threading.Event()

    def drain() -> None:
        while not done.is_set():
            taken.extend(bridge.events())  # type: ignore[arg-type]
        taken.extend(bridge.events())  # type: ignore[arg-type]

    def submit(thread: int) -> None:
        for index in range(500):
            bridge.submit(Cancelled(TransferId(f"{thread}-{index}")))

    reader = threading.Thread(target=drain)
    reader.start()
    writers = [threading.Thread(target=submit, args=(each,)) for each in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    done.set()
    reader.join()
    assert len(taken) == 8 * 500
    for thread in range(8):
        mine = [each.transfer for each in taken if each.transfer.startswith(f"{thread}-")]
        assert mine == [f"{thread}-{index}" for index in range(500)]


def test_a_wedged_runtime_makes_submit_raise_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SUBMITTED_MOST", 3)
    bridge = make_bridge()
    for _ in range(3):
        bridge.submit(Cancelled(TransferId("t")))
    with pytest.raises(LocalProtocolError, match="3 events wait"):
        bridge.submit(Cancelled(TransferId("t")))


@pytest.mark.parametrize("name", ["", "x" * 513, "line\nbreak", "\ud800"])
def test_a_name_that_fits_in_no_message_is_refused_by_name_and_value(name: str) -> None:
    bridge = make_bridge()
    with pytest.raises(ConfigurationError, match="transfer = "):
        bridge.submit(offer(name, 0))
    with pytest.raises(ConfigurationError, match="transfer = "):
        bridge.submit(Arrived(TransferId(name), b"digest"))
    with pytest.raises(ConfigurationError, match="prompt_digest = "):
        bridge.submit(Arrived(TransferId("t"), b"x" * 65))
    assert bridge.events() == []


def test_the_end_tells_every_attempt_without_an_outcome_and_releases_no_block() -> None:
    bridge = make_bridge()
    for attempt in range(4):
        bridge.submit(offer(str(attempt), attempt))
    bridge.events()
    bridge.report(Delivered(TransferId("1"), 1))
    bridge.report(failed("2", 2))
    bridge.take()
    outcomes = bridge.end()
    assert outcomes == [
        NotDelivered(TransferId("0"), 0, CLOSED, False),
        NotDelivered(TransferId("3"), 3, CLOSED, False),
    ]
    assert bridge.take() == outcomes
    assert bridge.end() == []
    assert bridge.take() == []


def test_the_end_frees_who_waits_for_a_retry_that_will_never_be_due() -> None:
    bridge = make_bridge()
    for attempt, name in enumerate(["waits", "was due", "was cancelled", "went on"]):
        bridge.submit(offer(name, attempt))
        bridge.events()
        bridge.report(failed(name, attempt, retry=True))
    bridge.report(RetryDue(TransferId("was due"), 1))
    bridge.submit(Cancelled(TransferId("was cancelled")))
    bridge.submit(offer("went on", 4))
    bridge.events()
    bridge.take()
    bridge.end()
    assert bridge.take() == [
        NotDelivered(TransferId("went on"), 4, CLOSED, False),
        RetryDue(TransferId("waits"), 0),
    ]


def test_after_the_end_offers_are_answered_and_their_blocks_given_back() -> None:
    bridge = make_bridge()
    bridge.submit(offer("seen by nobody", 0))
    bridge.close()
    bridge.submit(offer("late", 1))
    assert bridge.take() == [
        NotDelivered(TransferId("seen by nobody"), 0, CLOSED, False),
        BlocksReleased(TransferId("seen by nobody"), 0),
        NotDelivered(TransferId("late"), 1, CLOSED, False),
        BlocksReleased(TransferId("late"), 1),
    ]
    assert bridge.events() == []


def test_after_the_end_only_sources_that_no_runtime_knew_are_released() -> None:
    bridge = make_bridge()
    bridge.submit(Arrived(TransferId("known"), b""))
    bridge.events()
    bridge.close()
    for name in ("late", "aborted"):
        bridge.submit(Arrived(TransferId(name), b""))
    for final in (False, True):
        for name in ("known", "late"):
            bridge.submit(Computed(TransferId(name), 16, ((0,),), final))
    bridge.submit(PrefillAborted(TransferId("aborted")))
    bridge.submit(PrefillAborted(TransferId("known")))
    assert bridge.take() == [
        SourceReleased(TransferId("late"), CLOSED),
        SourceReleased(TransferId("aborted"), CLOSED),
    ]


def test_no_offer_is_lost_between_the_last_look_and_the_end() -> None:
    for _ in range(20):
        bridge = make_bridge()
        go = threading.Barrier(2)

        def submit(bridge: Bridge = bridge, go: threading.Barrier = go) -> None:
            go.wait()
            for attempt in range(200):
                bridge.submit(offer("t", attempt))

        writer = threading.Thread(target=submit)
        writer.start()
        go.wait()
        bridge.events()
        bridge.end()
        writer.join()
        told = [each for each in bridge.take(1_000) if isinstance(each, NotDelivered)]
        assert sorted(each.attempt for each in told) == list(range(200))
