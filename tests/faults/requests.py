"""What the consumer's engine may want of an attempt, and attempts of several ranks."""

from __future__ import annotations

from functools import partial
from unittest import mock

from pushkv.core.ids import seconds
from pushkv.runtime import steps
from pushkv.testing.transport_faults import Fate, Stage

from .engine import BLOCK_BYTES, LAYERS, until
from .rig import Rig


async def taken_back(rig: Rig) -> None:
    """The consumer's engine preempts; admitted again, the request is a new attempt."""
    pair = await rig.pair()
    attempts = {}
    for name in ("admitted", "given up"):
        pair.producer.produce(name)
        pair.writes.hold(Stage.COMPLETION, name)
        attempts[name] = pair.offer(name)
        await pair.producer.stands("producer", name, "writing")
        pair.consumer.take_back(name)
        assert await pair.consumer.outcome(attempts[name]) == "preempted"
    pair.writes.release(Stage.COMPLETION, "admitted")
    await pair.consumer.released(attempts["admitted"])
    pair.consumer.cancel("given up")
    pair.consumer.readmit("admitted")
    await pair.consumer.fired(
        "request.receiving/TakenBack",
        "request.preempted/MemberTold",
        "request.preempted/MemberFreed",
        "request.preempted/Cancelled",
        "request.preempted/Readmitted",
    )
    await pair.consumer.retry_due(attempts["admitted"])
    again = pair.offer("admitted")
    assert await pair.consumer.outcome(again) == "delivered"
    pair.writes.release(Stage.COMPLETION, "given up")
    await pair.consumer.released(attempts["given up"], again)
    pair.producer.abort("given up")
    await pair.producer.source_released(*pair.producer.sources)


async def given_up_between_attempts(rig: Rig) -> None:
    """An attempt fails and is freed; before the next is due nobody wants the request any more."""
    pair = await rig.pair(write_retries=0, retry_backoff=seconds(15), attempts=3)
    pair.writes.fate("t", Fate.FAILED)
    pair.producer.produce("t")
    attempt = pair.offer("t")
    assert await pair.consumer.outcome(attempt) == "write_failed"
    await pair.consumer.released(attempt)
    await pair.consumer.fired("request.retrying/MemberFreed")
    pair.consumer.cancel("t")
    await pair.consumer.fired("request.retrying/Cancelled")
    again = pair.offer("t")
    assert await pair.consumer.outcome(again) == "delivered"
    await pair.consumer.released(again)
    await pair.producer.source_released("t")


async def two_writers(rig: Rig) -> None:
    """Two producer ranks write one attempt: one is done long before the other, or fails alone."""
    first = await rig.engine("P")
    second = await rig.engine("P", rank=1)
    consumer = await rig.engine("D")
    for name in ("waits", "fails"):
        second.transport.hold(Stage.COMPLETION, name)
        for engine in (first, second):
            engine.arrive(name, 48)
            engine.compute(name, 16)
    waits = consumer.offer("waits", first.address, second.address, tokens=48)
    fails = consumer.offer("fails", first.address, second.address, tokens=48)
    for name in ("waits", "fails"):
        for engine in (first, second):
            await engine.fired("producer.prefilling/RegistrationReceived")
            engine.compute(name, 48, final=True)
    await second.fired("producer.failed/Computed")  # the stranger of its own rank
    await consumer.fired("request.receiving/MemberFreed")
    second.abort("fails")
    second.transport.release(Stage.COMPLETION, "fails")
    assert await consumer.outcome(fails) == "aborted"
    second.transport.release(Stage.COMPLETION, "waits")
    assert await consumer.outcome(waits) == "delivered"
    await consumer.released(waits, fails)
    for engine in (first, second):
        await engine.source_released("waits", "fails")


async def turns(rig: Rig) -> None:
    """R8: what waits for its turn is given back at once; another consumer does not wait at all."""
    producer = await rig.engine("P", write_budget_bytes=4 * BLOCK_BYTES)
    busy, idle = await rig.engine("D"), await rig.engine("E")

    def posted(transfer: str) -> int:
        return sum(each.attempt.transfer == transfer for each in producer.transport.posted)

    producer.transport.hold(Stage.COMPLETION, "long")
    producer.produce("long", 160)
    long = busy.offer("long", producer.address, tokens=160)
    await until(lambda: posted("long") == 4)
    producer.produce("given up")
    given_up = busy.offer("given up", producer.address)
    await producer.stands("producer", "given up", "writing")
    producer.produce("short")
    short = idle.offer("short", producer.address)
    assert await idle.outcome(short) == "delivered"
    busy.cancel("given up")
    assert await busy.outcome(given_up) == "cancelled"
    await busy.released(given_up)
    assert (posted("long"), posted("given up")) == (4, 0)
    producer.abort("given up")
    producer.transport.release(Stage.COMPLETION, "long")
    assert await busy.outcome(long) == "delivered"
    assert posted("long") >= 10  # more, if the first came before their permit
    await busy.released(long)
    await producer.source_released("long", "short", "given up")


async def layer_by_layer(rig: Rig) -> None:
    """What a step computes is ordered when it begins, and written layer by layer (UCX)."""
    with mock.patch.object(steps, "SHARE_BYTES_LEAST", 1):
        await _layer_by_layer(rig)


async def _layer_by_layer(rig: Rig) -> None:
    producer, consumer = await rig.engine("P"), await rig.engine("D")
    cache, step = producer.cache, producer.runtime.steps[1]
    regions = [region.address for region in cache.layout.groups[0].regions]

    def shows(layer: int) -> bool:
        there = consumer.cache.bytes[layer, list(consumer.attempts[attempt].blocks)]
        return bool((there == kv[layer]).all())

    producer.arrive("t", 32)
    producer.compute("t", 32, step=1)
    blocks = list(producer.sources["t"].blocks)
    kv, cache.bytes[:, blocks] = cache.bytes[:, blocks].copy(), 0
    attempt = consumer.offer("t", producer.address)
    one_by_one = producer.transport.capabilities.done_means_visible
    loop = producer.runtime._loop
    assert loop is not None
    await until(lambda: loop._outbound.open_writes)
    for layer in reversed(range(LAYERS)):
        assert not shows(layer)
        cache.bytes[layer, blocks] = kv[layer]
        step.computed(regions[layer])
        if one_by_one:
            await until(partial(shows, layer))
        assert [shows(each) for each in range(layer)] == [False] * layer
    posted = len(producer.transport.posted)
    assert posted == (LAYERS if one_by_one else 0), "elsewhere it leaves as a whole, after its step"
    step.end()
    producer.compute("t", 32, final=True)
    assert await consumer.outcome(attempt) == "delivered"
    await consumer.released(attempt)
    await producer.source_released("t")


SCENARIOS = (layer_by_layer, taken_back, given_up_between_attempts, two_writers, turns)
