"""What may happen to a link: not made, lost at one end, silent, doubted, full, made again."""

from __future__ import annotations

from pushkv.core.ids import seconds
from pushkv.core.messages import Ping, Revoke
from pushkv.testing.channel_faults import Act, Toward
from pushkv.testing.transport_faults import Stage

from .rig import Pair, Rig

LONG = "x" * 500
"""A name that makes long messages."""


async def _delivers(pair: Pair, transfer: str) -> None:
    """The pair works."""
    pair.producer.produce(transfer)
    attempt = pair.offer(transfer)
    assert await pair.consumer.outcome(attempt) == "delivered"
    await pair.consumer.released(attempt)
    await pair.producer.source_released(transfer)


async def nobody_answers(rig: Rig) -> None:
    """A refused dial is made again; one that leads nowhere is given up; then it works."""
    pair = await rig.pair(connect=seconds(0.5))
    pair.faults.refuses = True
    attempts = [pair.offer(name) for name in ("one", "two")]
    await pair.consumer.fired(
        "link.ended/Wanted", "link.connecting/Wanted", "link.connecting/Closed"
    )
    pair.consumer.cancel("one")
    assert await pair.consumer.outcome(attempts[1]) == "unreachable"
    await pair.consumer.released(*attempts)
    await pair.consumer.fired("link.connecting/Unwanted", "link.connecting/Tick")
    pair.faults.refuses, pair.faults.mute = False, True
    mute = pair.offer("mute")
    assert await pair.consumer.outcome(mute) == "unreachable"
    await pair.consumer.released(mute)
    pair.faults.mute = False
    await pair.consumer.stands("link", str(pair.faults.address.port), "ended")
    await _delivers(pair, "t")


async def one_end_does_not_hear_of_it(rig: Rig) -> None:
    """The consumer dials anew while the producer thinks the old link up: the newer one wins."""
    pair = await rig.pair(attempts=3)
    attempt = pair.offer("t")
    await pair.consumer.stands("consumer", "t", "registered")
    pair.faults.deaf = True
    await pair.faults.cut(Toward.CONSUMER)
    await pair.producer.fired("link.up/Opened")
    await pair.consumer.retry_due(attempt)
    again = pair.offer("t", failures=1)
    pair.producer.produce("t")
    assert await pair.consumer.outcome(again) == "delivered"
    await pair.consumer.released(attempt, again)
    await pair.producer.source_released("t")


async def revokes_are_lost(rig: Rig) -> None:
    """A REVOKE stays unanswered: the link is doubted, ended, and made again."""
    pair = await rig.pair(lease=seconds(0.9), attempts=1)
    lost = pair.faults.rule(Revoke, act=Act.DROP)
    attempt = pair.offer("t")
    await pair.consumer.stands("consumer", "t", "registered")
    pair.consumer.cancel("t")
    await pair.consumer.fired("link.up/Doubted", "link.suspect/Closed")
    lost.lift()
    await pair.consumer.released(attempt)
    await _delivers(pair, "u")


async def never_granted(rig: Rig) -> None:
    """A link over which no permit was ever granted needs no fence: its end frees the blocks."""
    pair = await rig.pair(lease=seconds(0.9), attempts=1)
    pair.faults.deaf = True  # the producer gives the link up at the same time
    pings = pair.faults.rule(Ping, act=Act.DROP)
    revokes = pair.faults.rule(Revoke, act=Act.DROP)
    attempt = pair.offer("t")
    await pair.consumer.stands("consumer", "t", "registered")
    pair.consumer.cancel("t")
    await pair.consumer.fired("link.suspect/Unwanted")
    await pair.consumer.released(attempt)
    pings.lift()
    revokes.lift()
    pair.faults.deaf = False
    await _delivers(pair, "u")


async def silence(rig: Rig) -> None:
    """Nothing comes through either way: permits end, both ends suspect the link, and it heals."""
    pair = await rig.pair(bound_s=1, lease=seconds(2.4), attempts=3)
    pair.producer.produce("t")
    pair.writes.hold(Stage.POST, "t")
    attempt = pair.offer("t")
    await pair.producer.stands("producer", "t", "writing")
    for toward in Toward:
        pair.faults.stop(toward)
    pair.faults.refuses = True
    await pair.producer.stands("link", "D", "ended")
    assert await pair.consumer.outcome(attempt) == "link_lost"
    await pair.consumer.released(attempt)
    pair.writes.release(Stage.POST, "t")  # the fence has passed, and so has the permit
    await pair.producer.stands("producer", "t", "holding")
    for toward in Toward:
        pair.faults.go_on(toward)
    pair.faults.refuses = False
    await pair.consumer.retry_due(attempt)
    again = pair.offer("t", failures=1)
    assert await pair.consumer.outcome(again) == "delivered"
    await pair.consumer.released(again)
    await pair.producer.source_released("t")


async def wanted_while_suspected(rig: Rig) -> None:
    """What is queued for a link cannot leave; it is suspected, and another attempt wants it."""
    pair = await rig.pair(lease=seconds(0.9), attempts=1, buffer_bytes=32_768)
    lost = pair.faults.rule(Revoke, act=Act.DROP)
    doubted = pair.offer("doubted")
    await pair.consumer.stands("consumer", "doubted", "registered")
    pair.faults.stop(Toward.PRODUCER)
    pair.faults.deaf = True  # the producer misses its GRANTs, and gives the link up as well
    pair.consumer.cancel("doubted")
    # Registrations that need no blocks and come again and again: soon TCP keeps no more.
    attempts = [pair.offer(f"{at}{LONG}", tokens=16, start=16) for at in range(200)]
    await pair.consumer.stands("link", str(pair.faults.address.port), "suspect")
    attempts.append(pair.offer("late"))
    await pair.consumer.fired("link.suspect/Wanted")
    lost.lift()
    pair.faults.deaf = False
    pair.faults.go_on(Toward.PRODUCER)
    pair.consumer.cancel("late")
    await pair.consumer.released(doubted, *attempts)


SCENARIOS = (
    nobody_answers,
    one_end_does_not_hear_of_it,
    revokes_are_lost,
    never_granted,
    silence,
    wanted_while_suspected,
)
