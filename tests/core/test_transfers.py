"""Transfers from end to end: streaming, retries, giving back, time, proofs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from pushkv.core.effects import (
    BlocksReleased,
    Dial,
    NotDelivered,
    RetryDue,
)
from pushkv.core.events import (
    ArrivalSeen,
    Cancelled,
    Computed,
    MessageReceived,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
    Proven,
    Readmitted,
    TakenBack,
    WriterGone,
)
from pushkv.core.ids import (
    AttemptId,
    Part,
    TransferId,
    seconds,
)
from pushkv.core.link import LinkStatus
from pushkv.core.messages import (
    Complete,
    Failed,
    Query,
    Reason,
    Received,
    Register,
    Registered,
    Revoke,
    Revoked,
    Unproven,
)
from pushkv.core.producer import ProducerStatus
from pushkv.testing.world import (
    POLICY,
    STRONG,
    STRONG_UNBOUNDED,
    WEAK,
    WEAK_UNBOUNDED,
    Node,
    World,
    pair,
)

from .stage import (
    A,
    attempt_of,
    consumer_state,
    fail,
    finish,
    flying,
    link_status,
    offered,
    producer_state,
    registered,
    sent,
    worker,
)

# -- what is transferred


def test_nothing_to_transfer_is_delivered_at_once_and_frees_the_producer() -> None:
    world, consumer, producer = pair()
    world.offer(consumer, "a", [producer], tokens=8, start=8)
    assert world.delivered(consumer, "a")
    assert not world.released(consumer, "a")
    world.prefill(producer, "a")
    world.settle()
    assert world.released(consumer, "a")
    assert sent(producer, Complete) == [Complete(attempt_of(consumer, producer), ())]
    assert len(producer.released_sources) == 1
    assert not world.writes


@pytest.mark.parametrize("capabilities", [WEAK_UNBOUNDED, STRONG_UNBOUNDED])
def test_with_nothing_to_transfer_there_is_nothing_to_prove(capabilities: Any) -> None:
    world, consumer, producer = pair(capabilities)
    world.offer(consumer, "a", [producer], tokens=8, start=8)
    world.settle()
    world.send(
        world.wire(consumer, producer), consumer, Unproven(attempt_of(consumer, producer), ())
    )
    world.settle()
    assert world.released(consumer, "a")


def test_the_part_that_is_cached_is_not_written() -> None:
    world, consumer, producer = pair()
    world.prefill(producer, "a", 12)
    world.offer(consumer, "a", [producer], 12, start=4)
    world.settle()
    assert world.delivered(consumer, "a")
    assert [write.effect.part for write in world.writes] == [Part(0, 4, 12)]


@pytest.mark.parametrize("said", [True, False], ids=["resumed", "computed at once"])
def test_chunks_are_written_as_prefill_makes_them(said: bool) -> None:
    world, consumer, producer = pair()
    world.offer(consumer, "a", [producer], 12)
    world.settle()
    assert producer_state(producer).status is ProducerStatus.EXPECTED
    world.request(producer, "a", 12)
    for tokens in (4, 8):
        world.compute(producer, "a", tokens, final=False)
        world.settle()
        assert world.writes[-1].effect.part.end == tokens
        assert world.writes[-1].landed
    world.happen(producer, PrefillPreempted(A))
    assert producer_state(producer).status is ProducerStatus.PREEMPTED
    if said:
        world.happen(producer, PrefillResumed(A))
        assert producer_state(producer).status is ProducerStatus.PREFILLING
    world.compute(producer, "a", 4, final=False)
    assert len(world.writes) == 2, "what is written stays written for the same attempt"
    world.compute(producer, "a", 12)
    world.settle()
    assert world.delivered(consumer, "a")
    assert [write.effect.part for write in world.writes] == [
        Part(0, 0, 4),
        Part(1, 4, 8),
        Part(2, 8, 12),
    ]


@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_name_may_be_used_again(acknowledged: bool) -> None:
    world, consumer, producer = pair()
    world.prefill(producer, "a")
    world.offer(consumer, "a", [producer])
    if not acknowledged:
        while not sent(producer, Complete):
            world._once()
        world.cut(consumer, producer)
    world.settle()
    assert world.delivered(consumer, "a", 0)
    done = ProducerStatus.DONE if acknowledged else ProducerStatus.NOTIFYING
    assert producer_state(producer).status is done
    world.prefill(producer, "a")
    world.heal()
    world.offer(consumer, "a", [producer])
    world.settle()
    assert world.delivered(consumer, "a", 1)
    assert len(producer.released_sources) == 2


def test_too_short_a_prompt_is_told() -> None:
    world, consumer, producer = pair()
    world.prefill(producer, "a", 4)
    world.offer(consumer, "a", [producer], 8)
    world.settle()
    assert world.reason(consumer, "a") == "too_few_tokens"
    assert world.released(consumer, "a")


@pytest.mark.parametrize("request_first", [True, False])
def test_another_prompt_under_the_same_name_is_refused(request_first: bool) -> None:
    world, consumer, producer = pair()
    if request_first:
        world.prefill(producer, "a")
    world.offer(consumer, "a", [producer], digest=b"other")
    world.settle()
    if not request_first:
        world.prefill(producer, "a")
        world.settle()
    assert world.reason(consumer, "a") == "prompt_mismatch"
    assert not world.writes
    assert not producer.released_sources, "the right one may still come"


def test_another_layout_is_refused() -> None:
    world, consumer, producer = registered(computed=False)
    register = consumer_state(consumer).register
    name = attempt_of(consumer, producer, 9, "b")
    foreign = evolve(register, attempt=name, layout_digest=b"other")
    world.send(world.wire(consumer, producer), producer, foreign)
    world.settle()
    assert sent(producer, Failed) == [Failed(name, (), Reason.LAYOUT)]


# -- WRITEs that do not go well


def test_a_failed_write_is_ordered_again_under_a_new_number() -> None:
    world, consumer, producer = registered()
    for number in range(2):
        write = flying(world)
        assert write.effect.part.number == number
        world.close(write, "failed")
        assert not world.ordered(), "not before its backoff"
        world.advance(POLICY.write_backoff)
    world.finish(world.ordered()[0])
    world.settle()
    assert world.delivered(consumer, "a")
    assert sent(producer, Complete)[0].parts == (Part(2, 0, 8),)


def test_a_write_that_keeps_failing_fails_the_attempt() -> None:
    world, consumer, producer = registered()
    for _ in range(POLICY.write_retries + 1):
        world.close(flying(world), "failed")
        world.advance(POLICY.write_backoff)
    assert world.reason(consumer, "a") == "write_failed"
    assert world.released(consumer, "a")
    assert producer_state(producer).status is ProducerStatus.HOLDING


def test_a_retry_waits_for_the_other_handles() -> None:
    world, consumer, producer = pair(auto=False)
    world.offer(consumer, "a", [producer])
    world.request(producer, "a")
    world.settle()
    world.compute(producer, "a", 4, final=False)
    world.compute(producer, "a", 8)
    first, second = world.ordered()
    assert world.post(first)
    assert world.post(second)
    world.close(first, "failed")
    world.advance(seconds(0.2))
    assert not world.ordered()
    world.land(second)
    world.close(second, "done")
    (again,) = world.ordered()
    assert again.effect.part == Part(2, 0, 4)
    world.finish(again)
    world.settle()
    assert world.delivered(consumer, "a")


def test_a_refused_write_waits_for_the_next_permit() -> None:
    world, consumer, producer = registered()
    producer.permits.clear()
    for number in range(2):
        # The first was ordered before the first permit came, the second under it.
        (write,) = world.ordered()
        assert write.effect.part.number == number
        world.finish(write)
    assert not world.ordered()
    world.advance(POLICY.ping - 1)
    assert not world.ordered()
    world.advance(1)
    world.finish(world.ordered()[0])
    world.settle()
    assert world.delivered(consumer, "a")


def test_a_permit_that_overtakes_the_refusal_is_not_waited_for_again() -> None:
    world, _, producer = registered()
    first = world.ordered()[0]
    permits = dict(producer.permits)
    producer.permits.clear()
    world.advance(POLICY.ping)
    assert producer.permits != permits
    world.close(first, "refused")
    (again,) = world.ordered()
    assert again.effect.part == Part(1, 0, 8)
    world.close(again, "refused")
    assert not world.ordered(), "but only once for each permit"


def test_an_unknown_write_is_over_after_its_bound() -> None:
    world, consumer, _ = registered()
    world.close(flying(world), "unknown")
    world.settle()
    assert world.outcome(consumer, "a", 0) is None
    world.advance(seconds(1))
    assert not world.released(consumer, "a"), "strictly after it"
    world.advance(seconds(0.01))
    assert world.reason(consumer, "a") == "write_failed"
    assert world.released(consumer, "a")


def test_an_unknown_write_without_a_bound_is_never_over() -> None:
    world, consumer, producer = registered(STRONG_UNBOUNDED)
    write = flying(world)
    world.close(write, "unknown")
    world.settle()
    assert world.reason(consumer, "a") == "unproven"
    world.advance(seconds(100))
    world.land(write)
    assert not world.released(consumer, "a")
    assert not producer.released_sources
    assert producer.endpoint.sending.transfers() == ("a",)
    world.happen(consumer, Proven(A))
    assert world.released(consumer, "a")
    world.happen(producer, Proven(A))
    world.advance(seconds(100))
    assert len(producer.released_sources) == 1


def test_a_source_that_nothing_reads_is_free_whatever_may_still_land() -> None:
    """I7: over NIXL every decode engine that dies mid-WRITE would else cost its prompt's blocks."""
    world, consumer, producer = registered(STRONG_UNBOUNDED)
    write = flying(world)
    world.close(write, "unknown", source_idle=True)
    world.settle()
    assert world.reason(consumer, "a") == "unproven"
    assert not world.released(consumer, "a")
    assert not producer.released_sources, "a new attempt may still be served from it"
    count = len(sent(producer, Unproven))
    world.reset(world.wire(consumer, producer))
    world.advance(seconds(1))
    assert len(sent(producer, Unproven)) == count + 1, "a REVOKE over the next link is answered"
    world.advance(POLICY.hold)
    assert [report.reason for report in producer.released_sources] == ["expired"]
    world.land(write)
    assert not world.released(consumer, "a")


def test_a_handle_that_never_closes_is_unproven_until_it_does() -> None:
    world, consumer, producer = registered()
    write = flying(world)
    world.happen(consumer, Cancelled(A))
    world.advance(POLICY.transfer)
    assert len(sent(producer, Unproven)) == 1
    assert not world.released(consumer, "a")
    world.close(write, "failed")
    world.settle()
    assert world.released(consumer, "a")


def test_unproven_over_a_live_link_gets_its_fence_when_that_ends() -> None:
    world, consumer, producer = registered()
    flying(world)
    world.happen(consumer, Cancelled(A))
    world.advance(POLICY.transfer + seconds(1))
    assert sent(producer, Unproven)
    assert not world.released(consumer, "a")
    world.crash(producer, silently=True)
    world.advance(POLICY.lease + seconds(1))
    assert world.released(consumer, "a")


def test_writes_that_take_too_long_are_given_up() -> None:
    world, consumer, producer = registered()
    write = flying(world)
    world.advance(POLICY.transfer)
    assert producer_state(producer).status is ProducerStatus.DRAINING
    assert world.outcome(consumer, "a", 0) is None
    world.close(write, "failed")
    world.settle()
    assert world.reason(consumer, "a") == "transfer_deadline"


def test_a_verdict_waits_for_the_arrivals_it_names() -> None:
    world, consumer, _ = registered(WEAK)
    write = flying(world)
    world.close(write, "done")
    world.settle()
    assert consumer.looking
    world.land(write)
    world.arrive(write, token=1)
    world.settle()
    assert world.outcome(consumer, "a", 0) is None
    for _ in range(2):
        world.arrive(write)
    world.settle()
    assert world.delivered(consumer, "a")
    assert not consumer.looking


@pytest.mark.parametrize("capabilities", [WEAK, WEAK_UNBOUNDED])
def test_a_lost_arrival_never_delivers(capabilities: Any) -> None:
    world, consumer, _ = registered(capabilities)
    write = flying(world)
    world.land(write)
    world.close(write, "done")
    world.advance(POLICY.settle + seconds(0.1))
    assert world.reason(consumer, "a") == "unproven"
    bounded = capabilities.write_bound is not None
    assert world.released(consumer, "a") == bounded
    if not bounded:
        world.advance(seconds(60))
        assert not world.released(consumer, "a")
        world.arrive(write)
        world.settle()
        assert world.released(consumer, "a"), "late, but a proof"


def test_a_cancel_while_the_arrivals_are_waited_for_is_remembered() -> None:
    world, consumer, _ = registered(WEAK)
    write = flying(world)
    world.close(write, "done")
    world.settle()
    world.happen(consumer, Cancelled(A))
    assert world.reason(consumer, "a") == "cancelled"
    assert not world.released(consumer, "a")
    world.land(write)
    world.arrive(write)
    world.settle()
    assert world.released(consumer, "a")


# -- giving back


def in_status(status: ProducerStatus) -> tuple[World, Node, Node]:
    """The producer is there, serving attempt 0 where it serves any."""
    world, consumer, producer = pair(auto=False)
    world.offer(consumer, "a", [producer])
    world.settle()
    steps: dict[ProducerStatus, list[Callable[[], object]]] = {
        ProducerStatus.QUEUED: [lambda: world.request(producer, "a")],
        ProducerStatus.PREFILLING: [lambda: world.compute(producer, "a", 4, final=False)],
        ProducerStatus.WRITING: [lambda: world.compute(producer, "a")],
        ProducerStatus.PREEMPTED: [lambda: world.happen(producer, PrefillPreempted(A))],
        ProducerStatus.DRAINING: [lambda: world.happen(producer, PrefillAborted(A))],
        ProducerStatus.RETRYING: [lambda: world.close(world.ordered()[1], "failed")],
        ProducerStatus.NOTIFYING: [lambda: world.cut(producer, consumer), lambda: finish(world)],
        ProducerStatus.DONE: [world.heal, world.settle],
        ProducerStatus.FAILED: [lambda: fail(world)],
        ProducerStatus.HOLDING: [
            lambda: world.happen(consumer, Cancelled(A)),
            world.settle,
            lambda: fail(world),
            world.settle,
        ],
        ProducerStatus.EXPIRED: [lambda: world.advance(POLICY.hold)],
    }
    for each in WAY_TO[status]:
        for step in steps[each]:
            step()
    return world, consumer, producer


S = ProducerStatus
TO_WRITING = (S.QUEUED, S.PREFILLING, S.WRITING)
WAY_TO: dict[ProducerStatus, tuple[ProducerStatus, ...]] = {
    S.EXPECTED: (),
    S.QUEUED: (S.QUEUED,),
    S.PREFILLING: (S.QUEUED, S.PREFILLING),
    S.PREEMPTED: (S.QUEUED, S.PREFILLING, S.PREEMPTED),
    S.DRAINING: (S.QUEUED, S.PREFILLING, S.DRAINING),
    S.WRITING: TO_WRITING,
    S.RETRYING: (*TO_WRITING, S.RETRYING),
    S.NOTIFYING: (*TO_WRITING, S.NOTIFYING),
    S.DONE: (*TO_WRITING, S.NOTIFYING, S.DONE),
    S.FAILED: (S.QUEUED, S.PREFILLING, S.DRAINING, S.FAILED),
    S.HOLDING: (*TO_WRITING, S.HOLDING),
    S.EXPIRED: (*TO_WRITING, S.HOLDING, S.EXPIRED),
}


@pytest.mark.parametrize("number", [0, 99], ids=["the attempt", "an unknown one"])
@pytest.mark.parametrize("status", ProducerStatus)
def test_revoke_is_answered_in_every_status(status: ProducerStatus, number: int) -> None:
    world, consumer, producer = in_status(status)
    assert producer_state(producer).status is status
    name = attempt_of(consumer, producer, number)
    world.heal()
    producer.sent.clear()
    wire = world.wire(consumer, producer)
    world.happen(producer, MessageReceived(wire.number, Revoke(name)))
    answers = (Revoked, Failed, Complete, Unproven, Registered)
    fail(world)
    found = [m for m in producer.sent if isinstance(m, answers) and m.attempt == name]
    assert found
    assert not isinstance(found[-1], Registered)
    assert producer_state(producer).registration is None or number == 99


@pytest.mark.parametrize("status", sorted({*S} - {S.HOLDING, S.EXPIRED}))
def test_a_repeated_register_is_answered_and_never_served_twice(status: ProducerStatus) -> None:
    world, consumer, producer = in_status(status)
    name = attempt_of(consumer, producer)
    register = next(message for message in sent(consumer, Register) if message.attempt == name)
    ordered, verdict = len(world.writes), status in OVER
    producer.sent.clear()
    before = producer_state(producer)
    world.happen(producer, MessageReceived(world.wire(consumer, producer).number, register))
    kinds = (Failed, Revoked, Complete) if verdict else (Registered,)
    assert isinstance(producer.sent[-1], kinds)
    assert len(world.writes) == ordered
    # Of an attempt that was acknowledged nothing is left; it is not named again.
    assert producer_state(producer) is before or status is ProducerStatus.DONE


@pytest.mark.parametrize("status", ProducerStatus)
def test_query_leaves_a_tombstone_and_received_takes_it_in_every_status(
    status: ProducerStatus,
) -> None:
    world, consumer, producer = in_status(status)
    wire = world.wire(consumer, producer)
    name = attempt_of(consumer, producer, 99)
    world.happen(producer, MessageReceived(wire.number, Query(name)))
    assert producer.sent[-1] == Failed(name, (), Reason.UNKNOWN)
    assert name in [verdict.attempt for verdict in producer_state(producer).ended]
    world.happen(producer, MessageReceived(wire.number, Received(name)))
    assert name not in [verdict.attempt for verdict in producer_state(producer).ended]
    assert producer_state(producer).status is status


OVER = (S.NOTIFYING, S.DONE, S.FAILED)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ([PrefillPreempted], S.PREEMPTED),
        ([PrefillPreempted, PrefillResumed], S.PREFILLING),
        ([PrefillAborted], S.FAILED),
        ([], S.PREFILLING),
        ([None], S.HOLDING),
    ],
)
def test_prefill_goes_on_while_it_drains(said: list[Any], status: ProducerStatus) -> None:
    world, consumer, producer = in_status(S.PREFILLING)
    world.happen(consumer, Cancelled(A))
    world.settle()
    for kind in said:
        if kind is None:
            world.compute(producer, "a")
        else:
            world.happen(producer, kind(A))
        assert producer_state(producer).status is S.DRAINING
    fail(world)
    assert producer_state(producer).status is status


@pytest.mark.parametrize("status", [S.QUEUED, S.PREFILLING, S.PREEMPTED, S.WRITING, S.RETRYING])
def test_an_abort_is_told_in_every_status(status: ProducerStatus) -> None:
    world, consumer, producer = in_status(status)
    world.happen(producer, PrefillAborted(A))
    fail(world)
    world.settle()
    assert world.reason(consumer, "a") == "aborted"
    assert world.released(consumer, "a")
    assert [report.reason for report in producer.released_sources] == ["aborted"]


def test_revoke_unanswered_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    world, consumer, producer = registered()
    # PING and GRANT go on, so it is not silence that ends the link.
    monkeypatch.setattr(producer.endpoint.sending, "message", lambda peer, news, now: [])
    world.happen(consumer, Cancelled(A))
    world.advance(POLICY.lease + seconds(1) - 1)
    assert link_status(consumer) is LinkStatus.UP
    world.advance(1)
    assert link_status(consumer) is not LinkStatus.UP
    assert len(sent(consumer, Revoke)) == 4
    assert not world.released(consumer, "a")


def test_an_abort_is_told_when_the_last_handle_has_closed() -> None:
    world, consumer, producer = registered()
    write = flying(world)
    world.happen(producer, PrefillAborted(A))
    world.settle()
    assert world.outcome(consumer, "a", 0) is None
    assert not producer.released_sources
    world.land(write)
    world.close(write, "done")
    world.settle()
    assert world.reason(consumer, "a") == "aborted"
    assert sent(producer, Failed)[0].parts == (Part(0, 0, 8),)
    assert [report.reason for report in producer.released_sources] == ["aborted"]


def test_a_new_attempt_is_written_from_its_beginning() -> None:
    world, consumer, producer = pair()
    world.request(producer, "a")
    world.offer(consumer, "a", [producer])
    world.settle()
    world.compute(producer, "a", 4, final=False)
    world.settle()
    world.happen(consumer, Cancelled(A))
    world.settle()
    assert world.released(consumer, "a", 0)
    world.offer(consumer, "a", [producer])
    world.compute(producer, "a")
    world.settle()
    assert world.delivered(consumer, "a", 1)
    assert sent(producer, Complete)[0].parts == (Part(0, 0, 8),)


def test_an_arrival_outlives_its_link() -> None:
    world, consumer, producer = registered(WEAK_UNBOUNDED)
    write = flying(world)
    world.close(write, "done")
    world.settle()
    world.part(consumer, producer)
    world.lose(world.wire(consumer, producer), consumer)
    assert world.reason(consumer, "a") == "link_lost"
    world.advance(seconds(60))
    assert not world.released(consumer, "a")
    assert consumer.looking
    world.land(write)
    world.arrive(write)
    world.settle()
    assert world.released(consumer, "a"), "with the verdict that was kept it is a proof"
    assert not consumer.looking


def test_the_end_of_another_link_moves_no_fence() -> None:
    world, consumer, producer = registered()
    flying(world)
    began = world.now
    world.reset(world.wire(consumer, producer))
    world.advance(seconds(1))
    second = world.wire(consumer, producer)
    assert producer.permits, "a new permit on a new link"
    world.part(consumer, producer)
    world.lose(second, consumer)
    world.advance(began + POLICY.lease - world.now)
    assert not world.released(consumer, "a")
    world.advance(1)
    assert world.released(consumer, "a")


@pytest.mark.parametrize("when", ["registering", "registered", "revoking"])
def test_an_arrival_may_come_before_the_verdict(when: str) -> None:
    world, consumer, producer = pair(WEAK_UNBOUNDED, auto=False)
    world.prefill(producer, "z")
    world.offer(consumer, "z", [producer])
    world.settle()
    world.close(world.ordered()[0], "failed")
    world.prefill(producer, "a")
    world.cut(producer, consumer)
    world.offer(consumer, "a", [producer])
    world.settle()
    write = flying(world)
    if when != "registering":
        world.heal()
        world.settle()
    if when == "revoking":
        world.happen(consumer, Cancelled(A))
    state = consumer.endpoint.receiving.consumers.states[write.effect.attempt]
    assert state.status == f"consumer.{when}"
    world.land(write)
    world.happen(consumer, ArrivalSeen(write.effect.attempt, 0, write.effect.arrival_token))
    world.close(write, "done")
    world.heal()
    world.settle()
    assert world.delivered(consumer, "a", 1) == (when != "revoking")
    assert world.released(consumer, "a", 1)


def test_a_revoke_may_find_that_nothing_can_be_proven() -> None:
    world, consumer, _ = registered(STRONG_UNBOUNDED)
    world.close(flying(world), "unknown")
    world.happen(consumer, Cancelled(A))
    world.settle()
    assert world.reason(consumer, "a") == "cancelled"
    assert consumer_state(consumer).status == "consumer.quarantined"
    count = len(sent(consumer, Revoke))
    world.advance(seconds(20))
    assert len(sent(consumer, Revoke)) == count, "nothing more is asked"
    assert not world.released(consumer, "a")


WHOLE = (Part(0, 0, 8),)


@pytest.mark.parametrize(
    ("verdict", "reason", "released"),
    [
        (lambda name: Complete(name, WHOLE), "", True),
        (lambda name: Failed(name, (), Reason.GONE), "gone", True),
        (lambda name: Revoked(name, ()), "unknown_attempt", True),
        (lambda name: Unproven(name, ()), "unproven", False),
    ],
    ids=["complete", "failed", "revoked", "unproven"],
)
def test_a_verdict_may_come_first_of_all(
    verdict: Callable[[AttemptId], Any], reason: str, released: bool
) -> None:
    world, consumer, producer = pair(STRONG_UNBOUNDED, auto=False)
    world.prefill(producer, "z")
    world.offer(consumer, "z", [producer])
    world.settle()
    world.request(producer, "a")
    world.offer(consumer, "a", [producer])
    wire = world.wire(consumer, producer)
    wire.queues["p"].clear()
    world.land_all(consumer, "a", 1)
    world.send(wire, consumer, verdict(attempt_of(consumer, producer, 1)))
    world.settle()
    assert world.reason(consumer, "a", 1) == reason
    assert world.delivered(consumer, "a", 1) == (not reason)
    assert world.released(consumer, "a", 1) == released


@pytest.mark.parametrize(
    "verdict",
    [
        lambda name: Complete(name, WHOLE),
        lambda name: Failed(name, (), Reason.ABORTED),
        lambda name: Revoked(name, ()),
    ],
    ids=["complete", "failed", "revoked"],
)
def test_a_late_verdict_ends_the_quarantine(verdict: Callable[[AttemptId], Any]) -> None:
    world, consumer, producer = registered(STRONG_UNBOUNDED)
    name = attempt_of(consumer, producer)
    wire = world.wire(consumer, producer)
    world.send(wire, consumer, Unproven(name, ()))
    world.settle()
    assert world.reason(consumer, "a") == "unproven"
    assert not world.released(consumer, "a")
    world.send(wire, consumer, verdict(name))
    world.settle()
    assert world.released(consumer, "a")


def test_complete_that_crosses_a_revoke_frees_and_never_delivers() -> None:
    world, consumer, producer = registered()
    world.cut(producer, consumer)
    world.finish(world.ordered()[0])
    world.happen(consumer, Cancelled(A))
    world.heal()
    world.settle()
    assert world.reason(consumer, "a") == "cancelled"
    assert world.released(consumer, "a")


def test_query_of_an_unknown_attempt_leaves_a_tombstone() -> None:
    world, consumer, producer = registered(computed=False)
    name = attempt_of(consumer, producer, 9)
    register = evolve(consumer_state(consumer).register, attempt=name)
    world.cut(producer, consumer)
    world.send(world.wire(consumer, producer), producer, Query(name), register)
    world.settle()
    assert sent(producer, Failed) == [Failed(name, (), Reason.UNKNOWN)] * 2


def test_an_unknown_cancel_is_counted() -> None:
    world, consumer, producer = pair()
    world.happen(consumer, Cancelled(A))
    world.happen(producer, Computed(A, 4, ((0,),), False))
    assert consumer.counted["unknown_transfer"] == 1
    assert producer.counted["unknown_transfer"] == 1


# -- time


def test_nobody_holds_finished_kv_for_ever() -> None:
    world, consumer, producer = pair()
    world.prefill(producer, "a")
    world.advance(POLICY.hold - 1)
    assert not producer.released_sources
    world.advance(1)
    assert [report.reason for report in producer.released_sources] == ["expired"]
    world.offer(consumer, "a", [producer])
    world.settle()
    assert world.reason(consumer, "a") == "expired"
    world.prefill(producer, "a")
    world.offer(consumer, "a", [producer])
    world.settle()
    assert world.delivered(consumer, "a", 1)


def test_the_hold_time_is_not_restarted_by_an_attempt() -> None:
    world, consumer, producer = registered()
    world.advance(POLICY.hold // 2)
    world.happen(consumer, Cancelled(A))
    fail(world)
    world.settle()
    world.advance(POLICY.hold // 2)
    assert [report.reason for report in producer.released_sources] == ["expired"]


def test_an_aborted_request_is_told_to_whoever_registers_late() -> None:
    world, consumer, producer = pair()
    world.request(producer, "a")
    world.happen(producer, PrefillAborted(A))
    world.offer(consumer, "a", [producer])
    world.settle()
    assert world.reason(consumer, "a") == "aborted"
    assert [report.reason for report in producer.released_sources] == ["aborted"]


def test_a_delivered_transfer_is_gone() -> None:
    world, consumer, producer = pair()
    world.prefill(producer, "a")
    for number in range(2):
        world.offer(consumer, "a", [producer])
        world.settle()
        assert (world.reason(consumer, "a", number) == "gone") == (number == 1)


def test_a_request_that_never_comes_is_told() -> None:
    world, consumer, producer = pair()
    world.offer(consumer, "a", [producer])
    world.advance(POLICY.expected - 1)
    assert world.outcome(consumer, "a", 0) is None
    world.advance(1)
    assert world.reason(consumer, "a") == "request_never_arrived"
    assert world.released(consumer, "a")


def test_waiting_is_renewed_by_news_of_the_attempt() -> None:
    world, consumer, _ = registered(computed=False)
    world.advance(POLICY.waiting * 3)
    assert world.outcome(consumer, "a", 0) is None, "queued but alive is not failure"
    assert len(sent(consumer, Query)) > 10


def test_waiting_is_not_renewed_by_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    world, consumer, producer = registered(computed=False)
    monkeypatch.setattr(producer.endpoint.sending, "message", lambda peer, news, now: [])
    world.advance(POLICY.waiting + seconds(0.1))
    assert world.reason(consumer, "a") == "waiting_deadline"
    assert link_status(consumer) is LinkStatus.UP


def test_a_retry_is_due_after_its_backoff_and_delivers() -> None:
    world, consumer, producer = registered()
    world.auto_retry = True
    wire = world.wire(consumer, producer)
    write = flying(world)
    world.reset(wire)
    world.settle()
    assert consumer.reports[-1] == NotDelivered(A, 0, Reason.LINK_LOST, True)
    world.close(write, "failed")
    world.advance(POLICY.retry_backoff - 1)
    assert (A, 1) not in consumer.offers
    world.advance(1)
    assert RetryDue(A, 0) in consumer.reports
    world.auto = True
    world.advance(seconds(2))
    assert world.delivered(consumer, "a", 1)
    assert world.released(consumer, "a", 0)
    assert len(producer.released_sources) == 1


def test_retries_are_spent_in_the_end() -> None:
    world, consumer, producer = pair(auto=False)
    world.auto_retry = True
    world.prefill(producer, "a")
    world.offer(consumer, "a", [producer])
    for _ in range(POLICY.attempts):
        world.advance(seconds(2))
        for write in world.ordered():
            world.close(write, "failed")
        world.reset(world.wire(consumer, producer))
        world.advance(seconds(2))
    told = [report for report in consumer.reports if isinstance(report, NotDelivered)]
    assert [report.retry for report in told] == [True, True, False]
    assert len(consumer.offers) == POLICY.attempts


@pytest.mark.parametrize("again", ["cancel", "offer"])
def test_no_retry_is_due_for_what_is_cancelled_or_offered_again(again: str) -> None:
    world, consumer, producer = registered()
    world.reset(world.wire(consumer, producer))
    world.settle()
    if again == "cancel":
        world.happen(consumer, Cancelled(A))
    else:
        world.offer(consumer, "a", [producer], failures=1)
    world.advance(seconds(5))
    assert RetryDue(A, 0) not in consumer.reports


def test_blocks_are_taken_back_and_a_new_attempt_made() -> None:
    world, consumer, producer = registered()
    write = flying(world)
    world.happen(consumer, TakenBack(A))
    world.settle()
    assert world.reason(consumer, "a") == "preempted"
    assert not world.released(consumer, "a")
    world.close(write, "failed")
    world.settle()
    assert world.released(consumer, "a")
    world.happen(consumer, Readmitted(A))
    assert consumer.reports[-1] == RetryDue(A, 0)
    world.auto = True
    world.offer(consumer, "a", [producer])
    world.settle()
    assert world.delivered(consumer, "a", 1)


def test_a_preempted_request_can_be_cancelled() -> None:
    world, consumer, _ = registered(computed=False)
    world.happen(consumer, TakenBack(A))
    world.happen(consumer, Cancelled(A))
    world.happen(consumer, Readmitted(A))
    world.settle()
    assert RetryDue(A, 0) not in consumer.reports
    assert world.released(consumer, "a")
    assert not consumer.endpoint.receiving.requests.states


def test_a_new_life_offers_nothing_during_the_grace() -> None:
    world, consumer, producer = pair()
    world.crash(consumer)
    world.restart(consumer)
    effects = consumer.endpoint.handle(offered(producer), world.local(consumer))
    assert effects == [NotDelivered(A, 7, Reason.STARTING, False), BlocksReleased(A, 7)]
    world.advance(POLICY.lease + 1)
    effects = consumer.endpoint.handle(offered(producer, attempt=8), world.local(consumer))
    assert effects == [Dial(producer.address)]


def test_no_grace_where_a_write_cannot_reach_a_successor() -> None:
    world = World(evolve(STRONG, reaches_successor=False))
    consumer = world.node("d")
    assert consumer.endpoint.receiving.ready_at < world.local(consumer)
    world.crash(consumer)
    world.restart(consumer)
    assert consumer.endpoint.receiving.ready_at == world.local(consumer)


# -- proofs


def test_the_certain_death_of_the_writer_frees() -> None:
    world, consumer, producer = registered(STRONG_UNBOUNDED)
    flying(world)
    gone = worker(producer)
    world.crash(producer)
    world.restart(producer)
    world.advance(seconds(20))
    assert world.reason(consumer, "a") == "link_lost"
    world.happen(consumer, WriterGone(worker(producer)))
    assert not world.released(consumer, "a"), "another life"
    world.happen(consumer, WriterGone(gone))
    assert world.released(consumer, "a")


def test_the_operators_word_frees_what_is_quarantined_only() -> None:
    world, consumer, producer = registered(STRONG_UNBOUNDED)
    write = flying(world)
    world.happen(consumer, Proven(A))
    assert not world.released(consumer, "a")
    world.crash(producer)
    world.settle()
    world.happen(consumer, Proven(TransferId("b")))
    assert not world.released(consumer, "a")
    world.happen(consumer, Proven(A))
    assert world.released(consumer, "a")
    assert not write.landed


def test_the_certain_death_of_the_consumer_frees_the_source() -> None:
    world, consumer, producer = registered(STRONG_UNBOUNDED)
    world.close(flying(world), "unknown")
    gone = worker(consumer)
    world.crash(consumer)
    world.advance(seconds(100))
    assert not producer.released_sources
    world.happen(producer, WriterGone(gone))
    world.advance(seconds(1))
    assert [report.reason for report in producer.released_sources] == ["expired"]


def test_the_same_life_back_over_a_new_link_is_asked() -> None:
    world, consumer, producer = registered(STRONG_UNBOUNDED)
    write = flying(world)
    world.reset(world.wire(consumer, producer))
    world.advance(seconds(1))
    assert sent(consumer, Revoke)
    assert not world.released(consumer, "a")
    world.land(write)
    world.close(write, "done")
    world.settle()
    assert world.released(consumer, "a")
    assert world.reason(consumer, "a") == "link_lost"


def test_a_verdict_that_went_nowhere_is_found_again() -> None:
    world, consumer, producer = registered(STRONG_UNBOUNDED)
    write = flying(world)
    world.part(consumer, producer)
    world.land(write)
    world.close(write, "done")
    world.reset(world.wire(consumer, producer))
    world.heal()
    world.advance(seconds(1))
    assert world.reason(consumer, "a") == "link_lost"
    assert world.released(consumer, "a"), "REVOKE was answered with COMPLETE"
