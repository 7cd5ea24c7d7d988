"""I7: nobody waits without an end: whatever a process is in, it gets out of it by itself.

For every state that a process was in anywhere in a search, its peers are switched off: no message
comes, no permit, no dial is answered, and no end of a connection is heard of but its own. It has
its clocks, its engine and its poster, and with these alone it must still be able to tell every
outcome and to give everything back. It is asked twice: once with peers that are silent, and once
with peers that keep its links up and do nothing else. Blocks that only a proof may free, or the end
of a link that is kept up, are counted, and not waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import evolve

from pushkv.core.consumer import QUARANTINED
from pushkv.core.effects import Hangup, ProducerAddress
from pushkv.core.events import (
    Computed,
    ConnectionClosed,
    Event,
    PrefillAborted,
    Readmitted,
    WriteClosed,
)
from pushkv.core.ids import FOREVER, TransferId
from pushkv.core.link import LINK, LinkStatus
from pushkv.core.producer import DRAINING, Producer, is_over
from pushkv.core.request import RequestStatus

from .bounds import UNIT
from .nodes import Node, Prefilling, Slot, Stage, Step, with_prefill
from .world import World

__all__ = ["Place", "waits_for_ever", "without_end"]

Place = tuple[int, int]
"""A process by its position, and the number of the state it is in."""


def without_end(world: World, places: Iterable[Place]) -> Place | None:
    """The first of `places` from which a process cannot get out by itself; None for none."""
    rows = set(world.nodes.rows)
    wanted = tuple(places)
    stuck = None
    for silent in (True, False):
        fine: set[Place] = set()
        for place in wanted:
            if stuck is None and not _gets_out(world, place, fine, silent):
                stuck = place
    world.nodes.rows = rows
    return stuck


def waits_for_ever(world: World, place: Place) -> str:
    """What is wrong with a place without an end, in words."""
    return f"{world.slots[place[0]]} waits for ever if no peer does anything more"


def _gets_out(world: World, place: Place, fine: set[Place], silent: bool) -> bool:
    """Whether an end, or one of those `fine`, can be reached; all on the way there are fine too."""
    seen: set[Place] = set()
    way: list[tuple[Place, Iterator[Node]]] = []
    at = place[0]
    entering: Place | None = place
    while True:
        if entering is not None:
            node = world.node_parts[entering[1]]
            if entering in fine or not node.life or _over(world, world.slots[at], node, silent):
                fine.update((entering, *(passed for passed, _ in way)))
                return True
            seen.add(entering)
            way.append((entering, _steps(world, at, node, silent)))
        following = next(way[-1][1], None)
        entering = None
        if following is None:
            way.pop()
            if not way:
                return False
            continue
        target = (at, world.node_parts.number(following))
        if target not in seen:
            entering = target


# -- ends


def _over(world: World, slot: Slot, node: Node, silent: bool) -> bool:
    """Nothing is left that the process could still end by itself."""
    unbounded = world.configuration.capabilities.write_bound is None
    if slot.consumer:
        return all(each.told for each in node.offers) and all(
            state.status is QUARANTINED and (unbounded or (state.fence is None and not silent))
            for _, state in node.endpoint.consumers
        )
    pinned = {name for (name, _), state in node.endpoint.producers if _pinned(state)}
    served = all(
        is_over(state) or state.registration is None or _pinned(state)
        for _, state in node.endpoint.producers
    )
    return served and all(
        each.stage == Stage.RELEASED or each.transfer in pinned for each in node.prefills
    )


def _pinned(state: Producer) -> bool:
    """A WRITE of unknown outcome may read the source, and nobody knows for how long."""
    return state.status is DRAINING and any(each.over_at == FOREVER for each in state.unknown)


# -- what a process does by itself


def _steps(world: World, at: int, node: Node, silent: bool) -> Iterator[Node]:
    """What it may be next."""
    slot, nodes = world.slots[at], world.nodes
    for fire in nodes.fires(node):
        if fire.table == LINK.name and fire.field == "silent_at" and not silent:
            continue
        yield _hung_up(world, slot, nodes.fire(slot, node, fire))
    for host, rank in node.dialing:
        dialing = tuple(each for each in node.dialing if each != (host, rank))
        refused = ConnectionClosed(None, ProducerAddress(host, 1, rank), "nobody answers")
        yield _hung_up(world, slot, nodes.step(slot, evolve(node, dialing=dialing), refused))
    for event in _events(node):
        yield _hung_up(world, slot, nodes.step(slot, node, event))
    for prefill in node.prefills:
        yield from _prefills(world, slot, node, prefill)
    yield nodes.older(node, max(world.configuration.rates[0 if slot.consumer else 1], UNIT))


def _events(node: Node) -> Iterator[Event]:
    """What its engine, its sockets and its poster do."""
    links = dict(node.endpoint.links)
    for number, _, _, key in node.endpoint.connections:
        if key is not None and key in links and links[key].status is not LinkStatus.UP:
            yield ConnectionClosed(number, None, "hung up")
    for (transfer, _), request in node.endpoint.requests:
        if request.status is RequestStatus.PREEMPTED:
            yield Readmitted(transfer)
    for _, state in node.endpoint.producers:
        for part in state.open:
            assert state.registration is not None, "only an attempt has open parts"
            yield WriteClosed(state.registration.register.attempt, part.number, "refused")


def _prefills(world: World, slot: Slot, node: Node, prefill: Prefilling) -> Iterator[Node]:
    """Prefill goes on to its end, or is given up where it never gets there."""
    transfer, name = world.transfers[prefill.transfer], TransferId(prefill.transfer)
    if prefill.reads:
        yield with_prefill(node, evolve(prefill, reads=()))
    if prefill.stage not in (Stage.QUEUED, Stage.RUNNING, Stage.PREEMPTED):
        return
    event: Event
    if transfer.chunks:
        after = evolve(prefill, stage=Stage.FINISHED, tokens=transfer.chunks[-1])
        source = prefill.source(transfer.tokens)
        event = Computed(name, transfer.chunks[-1], source, final=True)
    else:
        after, event = evolve(prefill, stage=Stage.ABORTED), PrefillAborted(name)
    step = world.nodes.step(slot, with_prefill(node, after), event)
    yield _hung_up(world, slot, step)


def _hung_up(world: World, slot: Slot, step: Step) -> Node:
    """A socket that it closes itself is reported as closed."""
    node = step.node
    for effect in step.effects:
        if isinstance(effect, Hangup):
            closed = ConnectionClosed(effect.connection, None, "hung up")
            node = world.nodes.step(slot, node, closed).node
    return node
