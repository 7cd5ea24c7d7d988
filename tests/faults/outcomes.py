"""What may become of WRITEs, while prefill runs, when it is over, and when nobody wants them."""

from __future__ import annotations

from functools import partial

from pushkv.core.effects import ProducerAddress
from pushkv.core.ids import seconds
from pushkv.core.messages import Query, Revoke
from pushkv.testing.channel_faults import Act, Toward
from pushkv.testing.transport_faults import Fate, Stage

from .engine import until
from .rig import Pair, Rig

FAILED, POSTED, REFUSED, UNKNOWN = Fate.FAILED, Fate.POSTED, Fate.REFUSED, Fate.UNKNOWN
NOWHERE = ProducerAddress("127.0.0.1", 1)
BUSY = Fate.UNKNOWN_BUSY


async def _streams(pair: Pair, transfer: str, *fates: Fate, tokens: int = 48) -> int:
    """Serve the first block while prefill runs; `fates` are of its WRITE and of those after it."""
    pair.writes.fate(transfer, *fates)
    pair.producer.arrive(transfer, tokens)
    attempt = pair.offer(transfer, tokens=tokens)
    await pair.consumer.stands("consumer", transfer, "registered")
    await pair.producer.fired("link.up/Grant")  # the first permit of the link
    pair.producer.compute(transfer, 16)
    await pair.producer.stands("producer", transfer, "prefilling")
    return attempt


async def while_prefill_runs(rig: Rig) -> None:
    """A WRITE fails, is refused, or is of unknown outcome before prefill is over."""
    pair = await rig.pair(bound_s=1)
    attempts = {
        name: await _streams(pair, name, fate)
        for name, fate in (("done", POSTED), ("failed", FAILED), ("refused", REFUSED))
    }
    unknown = await _streams(pair, "unknown", UNKNOWN)
    await pair.producer.fired(
        "producer.prefilling/WriteDone",
        "producer.prefilling/WriteFailed",
        "producer.prefilling/WriteRefused",
        "producer.prefilling/WriteUnknown",
        "producer.draining/Tick",
    )
    assert await pair.consumer.outcome(unknown) == "write_failed"
    for name in attempts:
        pair.producer.compute(name, 32)
        pair.producer.compute(name, 48, final=True)
    for name, attempt in attempts.items():
        assert await pair.consumer.outcome(attempt) == "delivered", name
    await pair.consumer.retry_due(unknown)
    again = pair.offer("unknown", tokens=48, failures=1)
    pair.producer.compute("unknown", 48, final=True)
    assert await pair.consumer.outcome(again) == "delivered"
    await pair.consumer.released(*attempts.values(), unknown, again)
    await pair.producer.source_released(*pair.producer.sources)


async def when_prefill_is_over(rig: Rig) -> None:
    """The first of two WRITEs fails; the other is done, fails, or is unknown, while it waits."""
    pair = await rig.pair(bound_s=1, write_backoff=seconds(0.3))
    attempts = {}
    second = {"done": POSTED, "failed": FAILED, "refused": REFUSED, "unknown": UNKNOWN}
    for name, fate in second.items():
        pair.writes.hold(Stage.COMPLETION, name)
        if fate in (POSTED, UNKNOWN):
            pair.writes.hold(Stage.POST, name)
        attempts[name] = await _streams(pair, name, FAILED, fate)
        pair.producer.compute(name, 48, final=True)
        await pair.producer.stands("producer", name, "writing")
        pair.writes.release(Stage.COMPLETION, name)
        await pair.producer.stands("producer", name, "retrying")
        pair.writes.release(Stage.POST, name)
    await pair.producer.fired(
        "producer.retrying/WriteDone",
        "producer.retrying/WriteFailed",
        "producer.retrying/WriteRefused",
        "producer.retrying/WriteUnknown",
        "producer.retrying/Tick",
    )
    for name, fate in (("at once", REFUSED), ("once", UNKNOWN)):
        pair.writes.fate(name, fate)
        pair.producer.produce(name)
        attempts[name] = pair.offer(name)
    for name, attempt in attempts.items():
        expected = "write_failed" if name in ("unknown", "once") else "delivered"
        assert await pair.consumer.outcome(attempt) == expected, name
    await pair.producer.fired("producer.writing/WriteRefused", "producer.writing/WriteUnknown")
    again = {}
    for name in ("unknown", "once"):
        await pair.consumer.retry_due(attempts[name])
        tokens = pair.producer.sources[name].length
        again[name] = pair.offer(name, tokens=tokens, failures=1)
        assert await pair.consumer.outcome(again[name]) == "delivered", name
    await pair.consumer.released(*attempts.values(), *again.values())
    await pair.producer.source_released(*pair.producer.sources)


async def given_up_while_it_gets_on(rig: Rig) -> None:
    """PROGRESS crosses the REVOKE of a request that is given up while its prefill runs."""
    pair = await rig.pair()
    pair.writes.hold(Stage.COMPLETION, "t")
    attempt = await _streams(pair, "t")
    revokes = pair.faults.rule(Revoke, act=Act.HOLD)
    pair.consumer.cancel("t")
    await until(lambda: revokes.seen)
    pair.writes.release(Stage.COMPLETION, "t")
    await pair.consumer.fired("consumer.revoking/Progress")
    revokes.lift()
    await pair.consumer.released(attempt)
    pair.producer.abort("t")
    await pair.producer.source_released("t")


async def while_prefill_is_preempted(rig: Rig) -> None:
    """A WRITE still reads the source that is taken away; then prefill goes on, or begins again."""
    pair = await rig.pair(bound_s=1)
    fates = {"done": POSTED, "failed": FAILED, "refused": REFUSED, "unknown": UNKNOWN}
    attempts = {}
    for name, fate in fates.items():
        pair.writes.hold(Stage.COMPLETION, name)
        attempts[name] = await _streams(pair, name, fate)
        pair.producer.preempt(name)
        await pair.producer.stands("producer", name, "preempted")
        pair.producer.hear()
        assert not pair.producer.yields, "a WRITE reads it"
        pair.writes.release(Stage.COMPLETION, name)
        await until(partial(pair.producer.yields.__contains__, name))
        pair.producer.yields.clear()
    await pair.producer.fired(
        "producer.preempted/WriteDone",
        "producer.preempted/WriteFailed",
        "producer.preempted/WriteRefused",
        "producer.preempted/WriteUnknown",
    )
    for name in fates:
        if name != "done":  # whose last chunk was under way
            pair.producer.resume(name)
        pair.producer.compute(name, 48, final=True)
    await pair.producer.fired("producer.preempted/Computed")
    for name, attempt in attempts.items():
        expected = "write_failed" if name == "unknown" else "delivered"
        assert await pair.consumer.outcome(attempt) == expected, name
    await pair.consumer.retry_due(attempts["unknown"])
    again = pair.offer("unknown", tokens=48, failures=1)
    assert await pair.consumer.outcome(again) == "delivered"
    await pair.consumer.released(*attempts.values(), again)
    await pair.producer.source_released(*fates)


async def when_nobody_wants_them(rig: Rig) -> None:
    """A request is given up with its WRITE in flight, whatever becomes of that; prefill goes on."""
    pair = await rig.pair(bound_s=1)
    attempts = {}
    for name, fate in (
        ("done", POSTED),
        ("failed", FAILED),
        ("refused", REFUSED),
        ("unknown", UNKNOWN),
    ):
        pair.writes.hold(Stage.COMPLETION, name)
        attempts[name] = await _streams(pair, name, fate)
        pair.consumer.cancel(name)
        await pair.producer.stands("producer", name, "draining")
        assert await pair.consumer.outcome(attempts[name]) == "cancelled"
        pair.producer.compute(name, 32)
        pair.producer.preempt(name)
        pair.producer.resume(name)
    await pair.producer.fired(
        "producer.draining/Computed",
        "producer.draining/PrefillPreempted",
        "producer.draining/PrefillResumed",
    )
    for name, attempt in attempts.items():
        assert not pair.consumer.attempts[attempt].released, "R8: a WRITE is open"
        pair.writes.release(Stage.COMPLETION, name)
    await pair.producer.fired(
        "producer.draining/WriteDone",
        "producer.draining/WriteFailed",
        "producer.draining/WriteRefused",
        "producer.draining/WriteUnknown",
    )
    await pair.consumer.released(*attempts.values())
    again = [pair.offer(name, tokens=48) for name in attempts]
    for name in attempts:
        pair.producer.compute(name, 48, final=True)
    for attempt in again:
        assert await pair.consumer.outcome(attempt) == "delivered"
    await pair.consumer.released(*again)
    await pair.producer.source_released(*pair.producer.sources)


async def nobody_can_say(rig: Rig) -> None:
    """Without a bound UNPROVEN is the verdict: asked again, revoked, cut off, until proven."""
    pair = await rig.pair()
    attempts = {}
    for name in ("asked", "revoked"):
        pair.producer.produce(name)
        pair.writes.fate(name, BUSY)
        pair.writes.hold(Stage.COMPLETION, name)
        attempts[name] = pair.offer(name)
        await pair.consumer.stands("consumer", name, "registered")
    pair.consumer.cancel("revoked")
    await pair.producer.stands("producer", "revoked", "draining")
    questions = pair.faults.rule(Query, toward=Toward.PRODUCER, act=Act.HOLD)
    await until(lambda: questions.seen)
    for name in attempts:
        pair.writes.release(Stage.COMPLETION, name)
        await pair.consumer.stands("consumer", name, "quarantined")
    questions.lift()
    await pair.consumer.fired(
        "consumer.registered/Unproven",
        "consumer.revoking/Unproven",
        "consumer.quarantined/Unproven",
    )
    await pair.faults.cut()
    await pair.consumer.fired("consumer.quarantined/LinkDown", "consumer.quarantined/LinkUp")
    # The WRITEs are over, and the operator has seen to it.
    for name in attempts:
        pair.consumer.proven(name)
        pair.producer.proven(name)
    await pair.producer.fired("producer.draining/Proven")
    await pair.consumer.released(*attempts.values())
    again = [pair.offer(name) for name in attempts]
    for attempt in again:
        assert await pair.consumer.outcome(attempt) == "delivered"
    await pair.consumer.released(*again)
    await pair.producer.source_released(*pair.producer.sources)


async def the_operator_knows(rig: Rig) -> None:
    """PROVEN says nothing of what is not quarantined, and frees what is, at either end."""
    pair = await rig.pair(transfer=seconds(1.5))
    pair.producer.produce("t")
    pair.writes.fate("t", BUSY)
    attempt = pair.offer("t")
    registered = pair.offer("registered")
    await pair.consumer.stands("consumer", "registered", "registered")
    await pair.consumer.stands("consumer", "t", "quarantined")
    unreached = pair.consumer.offer("unreached", NOWHERE)
    for name in ("t", "registered", "unreached"):
        pair.consumer.proven(name)
    await pair.consumer.fired(
        "consumer.quarantined/Proven",
        "consumer.registered/Proven",
        "consumer.registering/Proven",
    )
    await pair.consumer.released(attempt)
    for name in ("registered", "unreached"):
        pair.consumer.cancel(name)
    await pair.consumer.released(registered, unreached)
    pair.producer.proven("t")
    again = pair.offer("t")
    assert await pair.consumer.outcome(again) == "delivered"
    await pair.consumer.released(again)
    await pair.producer.source_released("t")


async def the_transfer_clock_runs_out(rig: Rig) -> None:
    """A WRITE does not end in time: unproven, until it ends after all and its verdict proves it."""
    pair = await rig.pair(transfer=seconds(1.5), attempts=1)
    for name in ("waits", "revoked"):
        pair.producer.produce(name)
        pair.writes.hold(Stage.COMPLETION, name)
    waits = pair.offer("waits")
    await pair.consumer.stands("consumer", "waits", "quarantined")
    assert await pair.consumer.outcome(waits) == "unproven"
    revoked = pair.offer("revoked")
    await pair.consumer.stands("consumer", "revoked", "registered")
    pair.consumer.cancel("revoked")
    await pair.consumer.stands("consumer", "revoked", "quarantined")
    for name in ("waits", "revoked"):
        pair.writes.release(Stage.COMPLETION, name)
    await pair.consumer.fired("consumer.quarantined/Failed", "consumer.quarantined/Revoked")
    await pair.producer.fired("producer.writing/Tick", "producer.draining/Tick")
    await pair.consumer.released(waits, revoked)
    for name in ("waits", "revoked"):
        pair.producer.abort(name)
    await pair.producer.source_released("waits", "revoked")


async def a_late_answer_to_a_question(rig: Rig) -> None:
    """REGISTERED answers a QUERY that was under way when UNPROVEN came; it changes nothing."""
    pair = await rig.pair(bound_s=5, transfer=seconds(1), attempts=1, lease=seconds(10))
    pair.writes.fate("t", UNKNOWN, POSTED)
    pair.writes.hold(Stage.COMPLETION, "t")
    attempt = await _streams(pair, "t")
    await until(lambda: pair.writes.over("t"))
    pair.writes.hold(Stage.POST, "t")
    pair.producer.compute("t", 48, final=True)
    await pair.producer.stands("producer", "t", "writing")
    pair.writes.release(Stage.COMPLETION, "t")
    await pair.producer.stands("producer", "t", "draining")
    questions = pair.faults.rule(Query, act=Act.HOLD)
    await until(lambda: questions.seen)
    await pair.consumer.stands("consumer", "t", "quarantined")
    questions.lift()
    await pair.consumer.fired("consumer.quarantined/Registered")
    pair.writes.release(Stage.POST, "t")
    await pair.consumer.released(attempt)
    pair.producer.abort("t")
    await pair.producer.source_released("t")


async def a_request_that_never_comes(rig: Rig) -> None:
    """The producer is never sent the request; nor does anybody want it in the end."""
    pair = await rig.pair(expected=seconds(0.4))
    attempt = pair.offer("t")
    assert await pair.consumer.outcome(attempt) == "request_never_arrived"
    await pair.consumer.released(attempt)
    await pair.producer.fired("producer.expected/Tick")
    pair.producer.produce("t")
    again = pair.offer("t")
    assert await pair.consumer.outcome(again) == "delivered"
    await pair.consumer.released(again)
    await pair.producer.source_released("t")


SCENARIOS = (
    while_prefill_runs,
    when_prefill_is_over,
    given_up_while_it_gets_on,
    while_prefill_is_preempted,
    when_nobody_wants_them,
    nobody_can_say,
    the_operator_knows,
    the_transfer_clock_runs_out,
    a_late_answer_to_a_question,
    a_request_that_never_comes,
)
