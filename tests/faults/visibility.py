"""Where DONE does not mean visible: verdicts that wait for arrivals, late, lost or twice."""

from __future__ import annotations

from pushkv.core.ids import seconds
from pushkv.core.messages import Complete, Failed, Progress, Registered, Revoke
from pushkv.testing.channel_faults import Act
from pushkv.testing.transport_faults import Stage

from .engine import until
from .rig import Pair, Rig, of_transfer

WEAK = {"shows_done": False}


async def _settles(pair: Pair, transfer: str) -> int:
    """Bring a transfer to where COMPLETE is in, and its arrivals are not."""
    pair.arrivals.hold(Stage.ARRIVAL, transfer)
    pair.producer.produce(transfer)
    attempt = pair.offer(transfer)
    await pair.consumer.stands("consumer", transfer, "settling")
    return attempt


async def _looks(pair: Pair) -> int:
    """While this transfer settles, arrivals of all others are told, too."""
    return await _settles(pair, "looks")


async def arrivals_come_late(rig: Rig) -> None:
    """Verdicts come twice and wait; some are given up meanwhile; the arrivals settle all."""
    pair = await rig.pair(bound_s=1, **WEAK)
    pair.faults.rule(Complete, Failed, act=Act.TWICE)
    delivered = await _settles(pair, "delivered")
    given_up = await _settles(pair, "given up")
    pair.arrivals.hold(Stage.ARRIVAL, "aborted")
    pair.producer.arrive("aborted", 48)
    pair.producer.compute("aborted", 16)
    aborted = pair.offer("aborted", tokens=48)
    await pair.producer.fired("producer.prefilling/WriteDone")
    pair.producer.abort("aborted")
    await pair.consumer.stands("consumer", "aborted", "settling")
    assert await pair.consumer.outcome(aborted) == "aborted"
    pair.consumer.cancel("given up")
    pair.consumer.proven("delivered")
    await pair.consumer.fired(
        "consumer.settling/Complete",
        "consumer.settling/Failed",
        "consumer.settling/Withdrawn",
        "consumer.settling/Proven",
    )
    pair.arrivals.arrivals = 2
    for name, attempt in (("delivered", delivered), ("given up", given_up), ("aborted", aborted)):
        assert not pair.consumer.attempts[attempt].released, "R10: nothing has arrived"
        pair.arrivals.release(Stage.ARRIVAL, name)
    assert await pair.consumer.outcome(delivered) == "delivered"
    assert await pair.consumer.outcome(given_up) == "cancelled"
    await pair.consumer.released(delivered, given_up, aborted)
    await pair.consumer.fired("consumer.settling/ArrivalSeen")
    await pair.producer.source_released("delivered", "given up", "aborted")


async def arrivals_before_verdicts(rig: Rig) -> None:
    """While somebody else's are looked for, arrivals come before any verdict, in each phase."""
    pair = await rig.pair(bound_s=1, **WEAK)
    looks = await _looks(pair)
    pair.faults.rule(Registered, Progress, act=Act.DROP, where=of_transfer("registering"))
    attempts = {}
    pair.arrivals.hold(Stage.ARRIVAL, "registered")
    for name in ("registering", "registered"):
        pair.producer.arrive(name, 48)
        pair.producer.compute(name, 16)
        attempts[name] = pair.offer(name, tokens=48)
    await pair.consumer.stands("consumer", "registered", "registered")
    pair.arrivals.release(Stage.ARRIVAL, "registered")
    pair.writes.hold(Stage.COMPLETION, "revoking")
    pair.arrivals.hold(Stage.ARRIVAL, "revoking")
    pair.producer.produce("revoking")
    attempts["revoking"] = pair.offer("revoking")
    await pair.consumer.stands("consumer", "revoking", "registered")
    await until(lambda: pair.writes.over("revoking"))
    pair.consumer.cancel("revoking")
    await pair.consumer.stands("consumer", "revoking", "revoking")
    pair.arrivals.release(Stage.ARRIVAL, "revoking")
    await pair.consumer.fired(
        "consumer.registering/ArrivalSeen",
        "consumer.registered/ArrivalSeen",
        "consumer.revoking/ArrivalSeen",
    )
    pair.writes.release(Stage.COMPLETION, "revoking")
    for name in ("registering", "registered"):
        pair.producer.compute(name, 48, final=True)
        assert await pair.consumer.outcome(attempts[name]) == "delivered"
    pair.arrivals.release(Stage.ARRIVAL, "looks")
    assert await pair.consumer.outcome(looks) == "delivered"
    await pair.consumer.released(looks, *attempts.values())
    pair.producer.abort("revoking")
    await pair.producer.source_released(*pair.producer.sources)


async def arrivals_are_lost(rig: Rig) -> None:
    """Under a known bound the blocks come back by time, and nothing is called delivered."""
    pair = await rig.pair(bound_s=1, settle=seconds(0.5), attempts=1, **WEAK)
    pair.arrivals.arrivals = 0
    lost = await _settles(pair, "lost")
    assert await pair.consumer.outcome(lost) == "unproven"
    await pair.consumer.fired("consumer.settling/Tick")
    await pair.consumer.released(lost)
    await pair.producer.source_released("lost")


async def the_link_is_lost_while_settling(rig: Rig) -> None:
    """The verdict is kept in quarantine, and the fence ends it."""
    pair = await rig.pair(bound_s=1, attempts=1, lease=seconds(2.4), **WEAK)
    pair.arrivals.arrivals = 0
    cut = await _settles(pair, "cut")
    pair.faults.refuses = True
    await pair.faults.cut()
    await pair.consumer.fired("consumer.settling/LinkDown", "consumer.quarantined/Tick")
    assert await pair.consumer.outcome(cut) == "link_lost"
    await pair.consumer.released(cut)
    await pair.producer.source_released("cut")


async def arrivals_come_after_all(rig: Rig) -> None:
    """Without a bound only the arrivals, however late, complete the proof."""
    pair = await rig.pair(settle=seconds(0.4), attempts=1, **WEAK)
    late = await _settles(pair, "late")
    await pair.consumer.stands("consumer", "late", "quarantined")
    assert await pair.consumer.outcome(late) == "unproven"
    pair.arrivals.release(Stage.ARRIVAL, "late")
    await pair.consumer.fired("consumer.quarantined/ArrivalSeen")
    await pair.consumer.released(late)
    await pair.producer.source_released("late")


async def the_writer_is_gone(rig: Rig) -> None:
    """The producer has ended for certain: its attempts end in every phase; another's do not."""
    pair = await rig.pair(**WEAK)
    other = await rig.engine("O", shows_done=False)
    third = await rig.engine("E", shows_done=False)
    assert await third.stop()
    arrivals = pair.arrivals
    arrivals.hold(Stage.ARRIVAL, "settling")
    other.produce("settling")
    settling = pair.consumer.offer("settling", other.address)
    await pair.consumer.stands("consumer", "settling", "settling")
    lost = pair.faults.rule(Registered, act=Act.DROP)
    registering = pair.offer("registering")
    await until(lambda: lost.seen)
    lost.lift()
    revokes = pair.faults.rule(Revoke, act=Act.DROP)
    revoking = pair.offer("revoking")
    quarantined = pair.offer("quarantined")
    await pair.consumer.stands("consumer", "revoking", "registered")
    await pair.consumer.stands("consumer", "quarantined", "registered")
    pair.consumer.cancel("revoking")
    await until(lambda: revokes.seen)
    pair.consumer.gone(third.worker)
    pair.consumer.proven("revoking")
    await pair.consumer.fired(
        "consumer.registered/WriterGone",
        "consumer.settling/WriterGone",
        "consumer.revoking/WriterGone",
        "consumer.revoking/Proven",
    )
    pair.faults.refuses = True
    await pair.faults.cut()
    await pair.consumer.fired("consumer.revoking/LinkDown")
    await pair.consumer.stands("consumer", "quarantined", "quarantined")
    assert await pair.producer.stop()
    unreached = pair.offer("unreached")
    pair.consumer.gone(pair.producer.worker)
    await pair.consumer.released(registering, revoking, quarantined)
    await pair.consumer.fired("consumer.quarantined/WriterGone", "consumer.registering/WriterGone")
    pair.consumer.cancel("unreached")
    arrivals.release(Stage.ARRIVAL, "settling")
    assert await pair.consumer.outcome(settling) == "delivered"
    await pair.consumer.released(settling, unreached)
    await other.source_released("settling")


SCENARIOS = (
    arrivals_come_late,
    arrivals_before_verdicts,
    arrivals_are_lost,
    the_link_is_lost_while_settling,
    arrivals_come_after_all,
    the_writer_is_gone,
)
