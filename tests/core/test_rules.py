"""R1 to R14: each scenario passes, and breaks an invariant once its rule is taken out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
from attrs import evolve

from pushkv.core.events import Cancelled
from pushkv.core.ids import Instant, TransferId, seconds
from pushkv.core.messages import Complete, Message, Register, Revoked
from pushkv.testing.world import (
    POLICY,
    STRONG,
    WEAK,
    Node,
    ViolationError,
    Wire,
    World,
    Write,
    pair,
)

from .taken_out import TAKEN_OUT, without

A = TransferId("a")
DRIFTING = evolve(POLICY, drift_ppm=50_000)
SLOW, FAST = -50_000, 50_000

M = TypeVar("M", bound=Message)
used: set[str] = set()


def is_needed(*mutants: tuple[str, str]) -> Callable[[Callable[[], None]], Callable[[str], None]]:
    """Run the scenario as it is; and without its rule, in each of these ways, to break it."""
    broken = dict(mutants)
    used.update(broken)

    def decorate(scenario: Callable[[], None]) -> Callable[[str], None]:
        @pytest.mark.parametrize("mutant", ["holds", *broken])
        def test(mutant: str) -> None:
            if mutant == "holds":
                scenario()
                return
            with without(mutant), pytest.raises(ViolationError, match=broken[mutant]):
                scenario()

        test.__doc__ = scenario.__doc__
        return test

    return decorate


def ready(
    *, policy: object = POLICY, weak: bool = False, computed: bool = True, d: int = 0, p: int = 0
) -> tuple[World, Node, Node, Wire]:
    """One registered attempt of "a", a fresh permit, and the transport in the test's hands."""
    assert isinstance(policy, type(POLICY))
    world = World(WEAK if weak else STRONG, policy, auto=False)
    consumer, producer = world.node("d", ppm=d), world.node("p", ppm=p)
    world.request(producer, "a")
    if computed:
        world.compute(producer, "a")
    world.offer(consumer, "a", [producer])
    world.settle()
    return world, consumer, producer, world.wire(consumer, producer)


def the_write(world: World) -> Write:
    (write,) = world.ordered()
    return write


def posted(world: World) -> Write:
    write = the_write(world)
    assert world.post(write)
    return write


def fence_off(world: World, consumer: Node, wire: Wire) -> None:
    """The consumer loses the link now, and nothing goes between the two any more."""
    world.part(*wire.nodes)
    world.lose(wire, consumer)


def latest(node: Node, kind: type[M]) -> M:
    return next(message for message in reversed(node.sent) if isinstance(message, kind))


@is_needed(("cancel frees", "I1"))
def test_r01_blocks_of_a_cancelled_attempt_stay_until_the_verdict() -> None:
    world, consumer, _, _ = ready()
    write = posted(world)
    world.happen(consumer, Cancelled(A))
    world.settle()
    assert world.reason(consumer, "a") == "cancelled"
    world.land(write)
    assert not world.released(consumer, "a")
    world.close(write, "done")
    world.settle()
    assert world.released(consumer, "a")


@is_needed(("link end frees", "I1"))
def test_r02_an_unreachable_producer_means_quarantine() -> None:
    world, consumer, _, wire = ready()
    write = posted(world)
    fence_off(world, consumer, wire)
    world.land(write)
    assert world.reason(consumer, "a") == "link_lost"
    assert not world.released(consumer, "a")
    world.advance(seconds(4))
    assert world.released(consumer, "a")


def late_grant() -> tuple[World, Node, Node]:
    """A GRANT is under way for two seconds; meanwhile the consumer fences the producer off."""
    world, consumer, producer, wire = ready(computed=False)
    world.cut(consumer, producer)
    world.advance(seconds(1))
    fence_off(world, consumer, wire)
    world.advance(seconds(1.9))
    while wire.queues["p"]:
        world.deliver(wire, producer)
    world.advance(seconds(1.5))
    assert world.released(consumer, "a")
    return world, consumer, producer


@is_needed(("no permit", "I1"))
def test_r03_no_write_without_a_permit() -> None:
    world, _, producer = late_grant()
    world.compute(producer, "a")
    world.finish(the_write(world))
    assert producer.endpoint.sending.producers.states[A, 0].missing == ((0, 8),)


@is_needed(("permit from the grant", "I1"))
def test_r04_a_slow_grant_makes_no_longer_permit() -> None:
    world, _, producer = late_grant()
    world.compute(producer, "a")
    world.finish(the_write(world))
    assert producer.endpoint.sending.producers.states[A, 0].missing == ((0, 8),)


@is_needed(("permit without drift", "I1"))
def test_r04_drift_makes_no_longer_permit() -> None:
    world, consumer, producer, wire = ready(policy=DRIFTING, d=FAST, p=SLOW)
    fence_off(world, consumer, wire)
    write = the_write(world)
    (until,) = producer.permits.values()
    last = Instant(until - seconds(1))
    world.advance(world.real(producer, last) - world.now)
    assert world.post(write)
    world.advance(world.real(producer, until) - world.now)
    world.land(write)
    assert not world.released(consumer, "a")
    world.advance(seconds(0.01))
    assert world.released(consumer, "a"), "the bound is tight"


@is_needed(("write bound not counted", "I1"))
def test_r05_a_write_is_over_before_its_permit() -> None:
    world, consumer, producer, wire = ready()
    fence_off(world, consumer, wire)
    write = the_write(world)
    (until,) = producer.permits.values()
    world.advance(world.real(producer, until) - world.now)
    was_posted = world.post(write)
    world.advance(seconds(1))
    if was_posted:
        world.land(write)
    assert not was_posted
    assert world.released(consumer, "a")


@is_needed(("fence at the last grant", "I1"))
def test_r06_the_fence_is_the_last_grant_and_the_lease() -> None:
    world, consumer, _, wire = ready()
    write = posted(world)
    fence_off(world, consumer, wire)
    world.advance(seconds(0.9))
    world.land(write)
    world.advance(seconds(2.1))
    assert not world.released(consumer, "a"), "the fence is passed strictly"
    world.advance(1)
    assert world.released(consumer, "a")


@is_needed(("grant on an ended link", "I1"))
def test_r06_no_grant_on_an_ended_link() -> None:
    world, consumer, producer, _ = ready(policy=DRIFTING, d=FAST, p=SLOW)
    world.cut(producer, consumer)
    world.advance(seconds(2.9))
    assert world.released(consumer, "a")
    world.heal()
    world.settle()
    write = the_write(world)
    world.finish(write)
    assert write.posted_at is None


@is_needed(("nothing remembered", "I1"))
def test_r07_a_repeated_register_meets_the_verdict() -> None:
    world, consumer, producer, wire = ready(computed=False)
    world.happen(consumer, Cancelled(A))
    world.send(wire, producer, latest(consumer, Register))
    world.settle()
    assert world.released(consumer, "a")
    world.compute(producer, "a")
    for write in world.ordered():
        world.finish(write)
    assert not world.ordered()
    assert sum(isinstance(message, Revoked) for message in producer.sent) == 2


@is_needed(("verdict before the handles close", "I1"))
def test_r08_the_verdict_waits_for_writes_that_are_only_ordered() -> None:
    world, consumer, _, _ = ready()
    write = the_write(world)
    world.happen(consumer, Cancelled(A))
    world.settle()
    assert world.post(write)
    world.land(write)
    assert not world.released(consumer, "a")
    world.close(write, "failed")
    world.settle()
    assert world.released(consumer, "a")


@is_needed(("any attempt will do", "I1"))
def test_r09_a_verdict_is_for_its_own_attempt() -> None:
    world, consumer, producer, wire = ready()
    world.happen(consumer, Cancelled(A))
    world.settle()
    world.close(the_write(world), "failed")
    world.settle()
    assert world.released(consumer, "a", 0)
    world.offer(consumer, "a", [producer])
    world.settle()
    write = posted(world)
    world.send(wire, consumer, latest(producer, Revoked))
    world.settle()
    world.land(write)
    world.close(write, "done")
    world.settle()
    assert world.delivered(consumer, "a", 1)
    assert consumer.counted["late"] >= 1


@is_needed(("coverage unchecked", "I2"))
def test_r10_complete_covers_exactly() -> None:
    world, consumer, _, wire = ready()
    write = the_write(world)
    world.send(wire, consumer, Complete(write.effect.attempt, ()))
    world.settle()
    assert world.reason(consumer, "a") == "coverage"


@is_needed(("done is taken for visible", "I2"))
def test_r10_every_part_is_proven_in_place() -> None:
    world, consumer, _, _ = ready(weak=True)
    write = posted(world)
    world.close(write, "done")
    world.settle()
    assert world.outcome(consumer, "a", 0) is None
    world.land(write)
    world.arrive(write)
    world.settle()
    assert world.delivered(consumer, "a")


@is_needed(("new permit covers old registrations", "I1"))
def test_r11_a_new_link_covers_no_old_registration() -> None:
    world, consumer, producer, wire = ready(computed=False)
    fence_off(world, consumer, wire)
    world.advance(seconds(5))
    assert world.released(consumer, "a")
    world.heal()
    world.offer(consumer, "b", [producer])
    world.settle()
    assert producer.permits, "the new link has its permit"
    world.compute(producer, "a")
    for write in world.ordered():
        world.finish(write)
    assert not world.writes


def two_ranks() -> tuple[World, Node, list[Write]]:
    world = World(auto=False)
    consumer = world.node("d")
    producers = [world.node(f"p{rank}", rank=rank, engine="p") for rank in (0, 1)]
    for producer in producers:
        world.request(producer, "a")
    world.offer(consumer, "a", producers)
    world.settle()
    for producer in producers:
        world.compute(producer, "a")
    return world, consumer, sorted(world.ordered(), key=lambda write: write.node.rank)


@is_needed(("first rank frees", "I1"))
def test_r12_blocks_are_free_when_every_rank_is() -> None:
    world, consumer, (first, second) = two_ranks()
    assert world.post(first)
    assert world.post(second)
    world.happen(consumer, Cancelled(A))
    world.settle()
    world.close(first, "failed")
    world.settle()
    world.land(second)
    world.close(second, "done")
    world.settle()
    assert world.released(consumer, "a")


@is_needed(("first rank delivers", "I2"))
def test_r12_delivered_when_every_rank_is() -> None:
    world, consumer, (first, second) = two_ranks()
    world.finish(first)
    world.settle()
    assert world.outcome(consumer, "a", 0) is None
    world.finish(second)
    world.settle()
    assert world.delivered(consumer, "a")


@is_needed(("no restart grace", "I1"))
def test_r13_a_new_life_hands_out_nothing_for_a_lease() -> None:
    world, consumer, _, _ = ready()
    write = posted(world)
    world.crash(consumer, silently=True)
    world.restart(consumer)
    handed_out = world.hand_out(consumer)
    world.advance(seconds(1))
    world.land(write)
    assert not handed_out
    world.advance(POLICY.lease)
    assert world.hand_out(consumer)


@is_needed(("no restart grace", "I1"))
def test_r13_the_grace_is_passed_strictly() -> None:
    """Died and back in the instant of its last GRANT: the last WRITE lands as the grace ends."""
    world, consumer, producer, _ = ready(policy=evolve(POLICY, drift_ppm=0))
    world.crash(consumer, silently=True)
    world.restart(consumer)
    write = the_write(world)
    (until,) = producer.permits.values()
    world.advance(until - seconds(1) - world.local(producer))
    assert world.post(write)
    world.advance(seconds(1))
    handed_out = world.hand_out(consumer)
    world.land(write)
    assert not handed_out
    world.advance(1)
    assert world.hand_out(consumer)


@is_needed(("a new incarnation proves death", "I1"))
def test_r14_a_new_incarnation_proves_nothing() -> None:
    world, consumer, producer, _ = ready()
    write = posted(world)
    world.crash(producer)
    world.restart(producer)
    world.advance(seconds(0.5))
    world.land(write)
    assert not world.released(consumer, "a")
    world.advance(seconds(3))
    assert world.released(consumer, "a")


@is_needed(("an unknown write is over", "I1"))
def test_r14_an_error_code_proves_nothing() -> None:
    world, consumer, _, _ = ready()
    write = posted(world)
    world.happen(consumer, Cancelled(A))
    world.settle()
    world.close(write, "unknown")
    world.settle()
    world.advance(seconds(0.9))
    world.land(write)
    assert not world.released(consumer, "a")
    world.advance(seconds(0.2))
    assert world.released(consumer, "a")


@is_needed(("settling by the own clock alone", "I1"))
def test_r14_done_proves_nothing_until_the_bound_has_passed_on_either_clock() -> None:
    world = World(
        evolve(WEAK, write_bound=seconds(3)),
        evolve(DRIFTING, lease=seconds(9)),
        auto=False,
    )
    consumer, producer = world.node("d", ppm=FAST), world.node("p", ppm=SLOW)
    world.prefill(producer, "a")
    world.offer(consumer, "a", [producer])
    world.settle()
    write = posted(world)
    last = Instant(world.local(producer) + seconds(3))
    world.close(write, "done")
    world.advance(world.real(producer, last) - world.now)
    world.land(write)
    assert not world.released(consumer, "a")
    world.advance(seconds(0.01))
    assert world.reason(consumer, "a") == "unproven"
    assert world.released(consumer, "a")


def test_every_way_to_take_a_rule_out_is_used() -> None:
    assert used == set(TAKEN_OUT)


def test_a_pair_delivers() -> None:
    world, consumer, producer = pair()
    world.prefill(producer, "a")
    world.offer(consumer, "a", [producer])
    world.settle()
    assert world.delivered(consumer, "a")
    assert world.released(consumer, "a")
    assert [report.reason for report in producer.released_sources] == [None]
