"""Processes that die, stop and go on, over real NIXL: reference engines, each in a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import sleep
from typing import Any

import anyio.to_thread
from tests.lanes import LANES
from tests.runtime.nixl_node import BLOCKS, NixlNode
from tests.runtime.node import until as wait_until

from pushkv.core.ids import seconds
from pushkv.core.messages import Reason
from pushkv.observe.replay import check_trace
from pushkv.testing.reference_engine import ReferenceCache, Role, generate

from .rig import Rig, Scenario

PROMPT = tuple(range(100))
LONG_PROMPT = tuple(range(800))
LAYERS = 8
PATIENT = {each: seconds(20) for each in ("expected", "hold", "waiting", "transfer")}

Steps = Callable[[Callable[..., NixlNode]], None]


def right(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return generate(ReferenceCache(LAYERS, BLOCKS), prompt, 4)


def in_processes(steps: Steps) -> Scenario:
    """A scenario from blocking steps: their nodes are killed in the end, and the traces checked."""

    async def scenario(rig: Rig) -> None:
        await anyio.to_thread.run_sync(partial(_run, steps, rig))

    scenario.__name__ = steps.__name__
    return scenario


def _run(steps: Steps, rig: Rig) -> None:
    nodes: list[NixlNode] = []

    def node(name: str, port: int = 0, **changes: Any) -> NixlNode:
        trace = rig.folder / f"{name}{len(nodes)}.ndjson"
        options = LANES[rig.lane]
        changes = {**PATIENT, **changes}
        nodes.append(NixlNode(name, port, changes, LAYERS, options, trace_path=trace))
        return nodes[-1]

    try:
        steps(node)
    finally:
        for each in nodes:
            each.kill()
    for trace in sorted(rig.folder.glob("*.ndjson")):
        illegal = check_trace(trace).illegal
        assert illegal is None, f"{trace.name}: {illegal}"


def _delivers(name: str, producer: NixlNode, consumer: NixlNode) -> None:
    """The pair works."""
    producer.call("submit", name, PROMPT, Role.PRODUCE)
    consumer.call("submit", name, PROMPT, Role.CONSUME, 4, producer.address)
    generation = consumer.call("result", name)
    assert (generation.reason, generation.tokens) == (None, right(PROMPT))


@in_processes
def the_consumer_dies_while_it_is_written_to(node: Callable[..., NixlNode]) -> None:
    """NIXL's error frees no source; the reader's certain death does, once nothing is under way."""
    producer, first, second = node("P", hold=seconds(2)), node("D"), node("E")
    for each in (producer, first, second):
        each.ready()
    worker = first.call("worker")
    first.call("submit", "t", LONG_PROMPT, Role.CONSUME, 4, producer.address)
    producer.call("submit", "t", LONG_PROMPT, Role.PRODUCE)
    wait_until(lambda: first.call("written"))
    first.kill()
    _delivers("u", producer, second)
    wait_until(lambda: second.call("free") == BLOCKS)
    producer.call("gone", worker)
    wait_until(lambda: producer.call("free") == BLOCKS)


@in_processes
def the_producer_dies_and_comes_back(node: Callable[..., NixlNode]) -> None:
    """What it was told of is quarantined until its death is proven; its successor serves."""
    producer, consumer = node("P"), node("D")
    for each in (producer, consumer):
        each.ready()
    address, worker = producer.address, producer.call("worker")
    consumer.call("submit", "t", PROMPT, Role.CONSUME, 4, address)
    _delivers("before", producer, consumer)  # links keep order: "t" is registered by now
    producer.kill()
    generation = consumer.call("result", "t")
    assert generation.reason in (Reason.LINK_LOST, Reason.UNREACHABLE)
    assert generation.tokens == right(PROMPT)
    successor = node("P", address.port).ready()
    _delivers("after", successor, consumer)
    quarantined = -(-(len(PROMPT) + 4) // 16)
    wait_until(lambda: consumer.call("free") >= BLOCKS - quarantined)
    assert consumer.call("free") == BLOCKS - quarantined, "a new incarnation proves nothing"
    consumer.call("gone", worker)
    wait_until(lambda: consumer.call("free") == BLOCKS)


@in_processes
def either_end_stops_and_goes_on(node: Callable[..., NixlNode]) -> None:
    """It sleeps for longer than the permits last that it was given, or gave; nothing is lost."""
    nodes = {name: node(name, hold=seconds(2)) for name in ("P", "D")}
    producer, consumer = nodes["P"].ready(), nodes["D"].ready()
    for who, asleep in nodes.items():
        _delivers(f"before {who}", producer, consumer)
        consumer.call("submit", f"waits for {who}", PROMPT, Role.CONSUME, 4, producer.address)
        consumer.call("submit", who, LONG_PROMPT, Role.CONSUME, 4, producer.address)
        producer.call("submit", who, LONG_PROMPT, Role.PRODUCE)
        asleep.pause()
        sleep(1.2)  # the lease is 0.9 s
        asleep.resume()
        assert consumer.call("result", who).tokens == right(LONG_PROMPT)
        consumer.call("cancel", f"waits for {who}")
        _delivers(f"after {who}", producer, consumer)
    wait_until(lambda: producer.call("free") == consumer.call("free") == BLOCKS)


SCENARIOS = (
    the_consumer_dies_while_it_is_written_to,
    the_producer_dies_and_comes_back,
    either_end_stops_and_goes_on,
)
