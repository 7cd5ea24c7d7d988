"""What may happen in any phase, made to happen in all of them."""

from __future__ import annotations

from pushkv.core.ids import AttemptId, seconds
from pushkv.core.messages import (
    AttemptMessage,
    Complete,
    Failed,
    Progress,
    Received,
    Register,
    Registered,
    Revoked,
    Unproven,
)
from pushkv.testing.channel_faults import Act, Rule, Toward
from pushkv.testing.transport_faults import Fate, Stage

from .engine import HandEngine, until
from .gallery import EARLY, SERVED, SLOW_RETRY, gallery
from .rig import Pair, Rig, of_attempt, of_transfer

LET_GO = ("writing", "draining")


async def _release(pair: Pair, attempts: dict[str, int]) -> None:
    for phase in LET_GO:
        pair.writes.release(Stage.COMPLETION, phase)
    await pair.consumer.released(*attempts.values())


def _abort_all(producer: HandEngine) -> None:
    for transfer, source in producer.sources.items():
        if not source.released:
            producer.abort(transfer)


async def asked_then_cancelled(rig: Rig) -> None:
    """Every phase is asked about, and granted a permit; then the consumer gives all of it up."""
    pair = await rig.pair(bound_s=1, **SLOW_RETRY)
    attempts = await gallery(pair)
    await pair.producer.fired(*(f"producer.{phase}/Query" for phase in SERVED))
    await pair.producer.fired(*(f"producer.{phase}/Permitted" for phase in SERVED))
    await pair.consumer.fired("consumer.registered/Tick", "consumer.registered/Registered")
    for phase in SERVED:
        pair.consumer.cancel(phase)
    await pair.producer.fired(*(f"producer.{phase}/Revoke" for phase in SERVED))
    await pair.consumer.fired("consumer.revoking/Registered", "consumer.revoking/Tick")
    await _release(pair, attempts)
    _abort_all(pair.producer)
    await pair.producer.source_released(*pair.producer.sources)


async def unanswered_then_aborted(rig: Rig) -> None:
    """REGISTERED never comes, so REGISTER comes again in every phase; then the producer aborts."""
    pair = await rig.pair(**SLOW_RETRY)
    pair.faults.rule(Registered, act=Act.DROP)
    attempts = await gallery(pair)
    await pair.producer.fired(*(f"producer.{phase}/RegistrationReceived" for phase in SERVED))
    dropped = pair.faults.rule(Failed, act=Act.DROP)
    _abort_all(pair.producer)
    phases = [phase for phase in SERVED if phase != "expected"]
    await pair.producer.fired(*(f"producer.{phase}/PrefillAborted" for phase in phases))
    await pair.producer.fired("producer.failed/RegistrationReceived")
    dropped.lift()
    pair.consumer.cancel("expected")
    await _release(pair, attempts)
    await pair.consumer.fired("consumer.registering/Failed")
    await pair.producer.source_released(*pair.producer.sources)


async def cut_and_retried(rig: Rig) -> None:
    """The link is lost in every phase, and each request is registered anew over the next one."""
    pair = await rig.pair(attempts=3, **SLOW_RETRY)
    unheard = pair.faults.rule(Registered, act=Act.DROP, where=of_transfer("expected"))
    first = await gallery(pair)
    await pair.consumer.stands("consumer", "queued", "registered")
    await pair.faults.cut()
    unheard.lift()
    await pair.producer.fired(*(f"producer.{phase}/LinkDown" for phase in SERVED))
    await pair.consumer.fired("consumer.registering/LinkDown", "consumer.registered/LinkDown")
    second = {}
    for phase in SERVED:
        await pair.consumer.retry_due(first[phase])
        second[phase] = pair.offer(phase, tokens=48, failures=1)
    await pair.consumer.fired("consumer.quarantined/LinkUp")
    await _release(pair, first)
    for phase in EARLY:
        if phase == "expected":
            pair.producer.arrive(phase, 48)
        elif phase == "preempted":
            pair.producer.resume(phase)
        pair.producer.compute(phase, 48, final=True)
    aborted = "draining"
    for phase in SERVED:
        outcome = await pair.consumer.outcome(second[phase])
        assert (outcome == "delivered") == (phase != aborted), f"{phase}: {outcome}"
    await pair.consumer.released(*second.values())
    await pair.producer.source_released(*pair.producer.sources)


async def late_news_of_old_attempts(rig: Rig) -> None:
    """RECEIVED and REVOKE of an attempt come while the next one is in each phase."""
    pair = await rig.pair(attempts=3, **SLOW_RETRY)
    kept = pair.faults.rule(Received, act=Act.DROP)
    for phase in SERVED:
        number = pair.offer(phase, tokens=48)
        await pair.consumer.stands("consumer", phase, "registered")
        pair.consumer.cancel(phase)
        await pair.consumer.released(number)
    await until(lambda: len(_by_attempt(kept)) == len(SERVED))
    late = _by_attempt(kept).values()
    kept.lift()
    attempts = await gallery(pair)
    for data in late:
        await pair.faults.inject(data, Toward.PRODUCER)
    await pair.producer.fired(*(f"producer.{phase}/Received" for phase in SERVED))
    for phase in SERVED:
        pair.consumer.cancel(phase)
    await _release(pair, attempts)
    _abort_all(pair.producer)
    await pair.producer.source_released(*pair.producer.sources)


def _by_attempt(rule: Rule) -> dict[AttemptId | None, bytes]:
    return {seen.attempt: seen.data for seen in rule.seen}


async def somebody_else_is_gone(rig: Rig) -> None:
    """A third engine is proven dead; nothing of this pair is touched, in whatever phase it is."""
    pair = await rig.pair(bound_s=1, **SLOW_RETRY)
    third = await rig.engine("E", bound_s=1)
    attempts = await gallery(pair)
    over = await _over(pair)
    pair.producer.produce("holding")
    await pair.producer.stands("producer", "holding", "holding")
    assert await third.stop()
    pair.producer.gone(third.worker)
    pair.consumer.gone(third.worker)
    phases = (*SERVED, "holding", "notifying", "done", "failed")
    await pair.producer.fired(*(f"producer.{phase}/WriterGone" for phase in phases))
    await pair.consumer.fired("consumer.registered/WriterGone")
    for phase in (*SERVED, "failed"):
        pair.consumer.cancel(phase)
    await _release(pair, attempts)
    await pair.consumer.released(*over.values())
    _abort_all(pair.producer)
    await pair.producer.source_released(*pair.producer.sources)


async def _over(pair: Pair) -> dict[str, int]:
    """Transfers that are over at the producer: told, forgotten by the consumer, aborted."""
    attempts = {}
    dropped = pair.faults.rule(Received, act=Act.DROP, where=of_transfer("notifying"))
    for phase in ("notifying", "done"):
        pair.producer.produce(phase)
        attempts[phase] = pair.offer(phase)
        await pair.producer.stands("producer", phase, phase)
    await until(lambda: dropped.seen)
    pair.producer.produce("failed")
    await pair.producer.stands("producer", "failed", "holding")
    pair.producer.abort("failed")
    attempts["failed"] = pair.offer("failed")
    await pair.producer.stands("producer", "failed", "failed")
    return attempts


async def asked_after_the_end(rig: Rig) -> None:
    """Verdicts are lost, so that the producer is asked, revoked and registered with when over."""
    pair = await rig.pair(hold=seconds(3), write_retries=0, attempts=1)
    lost = pair.faults.rule(Complete, Failed, act=Act.DROP)
    pair.producer.produce("told")
    told = pair.offer("told")
    pair.producer.arrive("failed")
    failed = pair.offer("failed")
    await pair.consumer.stands("consumer", "failed", "registered")
    pair.producer.abort("failed")
    pair.producer.produce("held")
    pair.writes.fate("held", Fate.FAILED)
    held = pair.offer("held")
    pair.producer.produce("revoked")
    revoked = pair.offer("revoked")
    await pair.producer.fired(
        "producer.notifying/Query",
        "producer.failed/Query",
        "producer.holding/Query",
        "producer.expired/Query",
    )
    lost.lift()
    pair.consumer.cancel("revoked")
    assert await pair.consumer.outcome(told) == "delivered"
    assert await pair.consumer.outcome(failed) == "aborted"
    assert await pair.consumer.outcome(held) == "write_failed"
    await pair.consumer.released(told, failed, held, revoked)
    await pair.producer.stands("producer", "told", "done")
    again = {name: pair.offer(name) for name in ("told", "held", "failed")}
    outcomes = {name: await pair.consumer.outcome(number) for name, number in again.items()}
    assert outcomes == {"told": "gone", "held": "expired", "failed": "aborted"}
    await pair.consumer.released(*again.values())
    await pair.producer.fired(
        "producer.done/RegistrationReceived",
        "producer.expired/RegistrationReceived",
        "producer.notifying/Received",
        "producer.done/Received",
        "producer.expired/Received",
        "producer.failed/Received",
    )


async def revoked_unheard_of(rig: Rig) -> None:
    """REGISTER was lost before REVOKE came: the producer remembers the attempt in every phase."""
    pair = await rig.pair(hold=seconds(3))
    pair.producer.produce("expired")
    pair.producer.produce("done")
    first = pair.offer("done")
    await pair.producer.stands("producer", "done", "done")
    pair.producer.produce("notifying")
    second = pair.offer("notifying")
    pair.faults.rule(Received, act=Act.DROP, where=of_attempt(second))
    await pair.producer.stands("producer", "notifying", "notifying")
    await pair.consumer.released(first, second)
    again = pair.offer("notifying")  # the producer has not heard RECEIVED of the one before
    assert await pair.consumer.outcome(again) == "gone"
    await pair.producer.stands("producer", "expired", "expired")
    pair.producer.produce("holding")
    await pair.producer.stands("producer", "holding", "holding")
    lost = pair.faults.rule(Register, act=Act.DROP)
    names = ("expired", "done", "notifying", "holding", "failed")
    attempts = [pair.offer(name) for name in names]
    await until(lambda: len(_by_attempt(lost)) == len(names))
    for name in names:
        pair.consumer.cancel(name)
    await pair.consumer.released(*attempts)
    await pair.producer.fired(*(f"producer.{each}/Revoke" for each in names))
    await pair.producer.fired(
        "producer.notifying/RegistrationReceived",
        "producer.holding/Received",
        "producer.expired/Received",
        "producer.holding/Tick",
    )
    await pair.producer.source_released(*pair.producer.sources)


async def the_name_comes_again(rig: Rig) -> None:
    """A request arrives under a name whose transfer is over, in each way that it can be over."""
    pair = await rig.pair(hold=seconds(3))
    kept = pair.faults.rule(Received, act=Act.DROP, where=of_transfer("notifying"))
    pair.producer.produce("expired")
    for name in ("done", "notifying"):
        pair.producer.produce(name)
        attempt = pair.offer(name)
        assert await pair.consumer.outcome(attempt) == "delivered"
        await pair.producer.stands("producer", name, name)
    await until(lambda: kept.seen)
    await pair.producer.stands("producer", "expired", "expired")
    names = ("expired", "done", "notifying")
    await pair.producer.source_released(*names)
    for name in names:
        pair.producer.produce(name)
        attempt = pair.offer(name)
        assert await pair.consumer.outcome(attempt) == "delivered"
        await pair.consumer.released(attempt)
    await pair.producer.fired(*(f"producer.{name}/Arrived" for name in names))
    await pair.producer.source_released(*names)


async def another_decoder_was_served(rig: Rig) -> None:
    """A decoder whose attempt failed asks when another has had the KV and the transfer is over."""
    pair = await rig.pair(write_retries=0, attempts=1)
    other = await rig.engine("E", attempts=1)
    lost = pair.faults.rule(Failed, act=Act.DROP)
    pair.producer.produce("t")
    pair.writes.fate("t", Fate.FAILED)
    fails = pair.offer("t")
    await until(lambda: lost.seen)
    served = other.offer("t", pair.producer.address)
    assert await other.outcome(served) == "delivered"
    await pair.producer.fired("producer.done/Query")
    lost.lift()
    assert await pair.consumer.outcome(fails) == "write_failed"
    await pair.consumer.released(fails)
    await other.released(served)
    await pair.producer.source_released("t")


async def lies(rig: Rig) -> None:
    """A producer that writes nothing says whatever it likes: nothing is taken for delivered."""
    pair = await rig.pair(attempts=1)
    names = ("complete", "revoked", "unproven", "progress")
    unheard = pair.faults.rule(Registered, act=Act.DROP)
    attempts = {name: pair.offer(name) for name in names}
    await until(lambda: len(_by_attempt(unheard)) == len(names))
    named: dict[str, AttemptId] = {each.transfer: each for each in _by_attempt(unheard) if each}

    async def say(*messages: AttemptMessage) -> None:
        for message in messages:
            await pair.faults.inject(message, Toward.CONSUMER)

    await say(
        Complete(named["complete"], ()),
        Revoked(named["revoked"], ()),
        Unproven(named["unproven"], ()),
        Progress(named["progress"], 16),
    )
    assert await pair.consumer.outcome(attempts["complete"]) == "coverage"
    assert await pair.consumer.outcome(attempts["revoked"]) == "unknown_attempt"
    assert await pair.consumer.outcome(attempts["unproven"]) == "unproven"
    await pair.consumer.fired(
        "consumer.registering/Complete",
        "consumer.registering/Revoked",
        "consumer.registering/Unproven",
        "consumer.registering/Progress",
    )
    await say(
        Progress(named["unproven"], 16),
        Complete(named["unproven"], ()),
        Progress(named["progress"], 32),
        Revoked(named["progress"], ()),
    )
    await pair.consumer.fired(
        "consumer.quarantined/Progress",
        "consumer.quarantined/Complete",
        "consumer.registered/Revoked",
    )
    await pair.consumer.released(*attempts.values())


SCENARIOS = (
    asked_then_cancelled,
    unanswered_then_aborted,
    cut_and_retried,
    late_news_of_old_attempts,
    somebody_else_is_gone,
    asked_after_the_end,
    revoked_unheard_of,
    the_name_comes_again,
    another_decoder_was_served,
    lies,
)
