"""What the moves of WRITEs and arrivals do; see `handlers`."""

from __future__ import annotations

from collections.abc import Hashable

from attrs import evolve

from pushkv.core import rules
from pushkv.core.effects import Effect, PostWrite
from pushkv.core.events import Event, WriteClosed
from pushkv.core.ids import AttemptId, Worker
from pushkv.model import writes as model
from pushkv.model.flights import Outcome

from . import hands as in_hand
from . import memory as blocks
from .hands import Hands
from .moves import Move
from .nodes import Stage
from .snapshot import NOW
from .world import Draft

__all__ = ["happen", "post", "refuse", "slot_of", "write"]

PINNED = (Stage.QUEUED, Stage.RUNNING, Stage.FINISHED, Stage.ABORTED)


def happen(draft: Draft, at: int, key: Hashable, event: Event) -> tuple[Effect, ...]:
    """One event at a process."""
    nodes = draft.world.nodes
    return draft.step(at, key, lambda slot, node: nodes.step(slot, node, event))


def post(draft: Draft, move: Move) -> bool:
    """R3, R5: the poster checks the permit here and now."""
    world = draft.world
    ordered = draft.hands.ordered[move.number]
    write = ordered.write
    at = slot_of(draft, ordered.writer)
    until = draft.node(at).permit(write.epoch)
    if not rules.may_post(NOW, until, world.configuration.capabilities.write_bound):
        return False
    _reads(draft, at, write.attempt, write.part.number)
    _holds(draft, at, write)
    question = ("post", draft.ids[world.hands_at], move.number)
    known = world.known.get(question)
    if known is None:
        ranks = draft.memory(0).pieces_per_block
        pieces = tuple(
            write.destination[0][token - write.destination_start] * ranks
            + write.attempt.producer_rank
            for token in range(write.part.start, write.part.end)
        )
        after = in_hand.post(draft.hands, move.number, pieces)
        known = world.known[question] = world.hands_parts.number(after)
    draft.ids[world.hands_at] = known
    return True


def refuse(draft: Draft, move: Move) -> bool:
    """R3, R5: the poster finds no permit, or one that does not last, and posts nothing.

    Only the latter can come again and again, and has a budget. What was withdrawn is not posted
    where it still waits for its turn, whatever the permit.
    """
    hands = draft.hands
    ordered = hands.ordered[move.number]
    at = slot_of(draft, ordered.writer)
    permitted = ordered.write.epoch in dict(draft.node(at).permits)
    until = draft.node(at).permit(ordered.write.epoch)
    lasts = rules.may_post(NOW, until, draft.world.configuration.capabilities.write_bound)
    if ordered.withdrawn:
        if move.cost:
            return False
    elif lasts or permitted != (move.cost == "refusal"):
        return False
    draft.put_hands(Hands(hands.writes, in_hand.without(hands, move.number)))
    attempt, part = ordered.write.attempt, ordered.write.part.number
    _closed(draft, at, WriteClosed(attempt, part, Outcome.REFUSED.value))
    return True


def slot_of(draft: Draft, worker: Worker) -> int:
    """The place where a worker runs, or ran."""
    return next(
        at
        for at, slot in enumerate(draft.world.slots)
        if (slot.engine, slot.rank) == (worker.engine, worker.rank)
    )


def _closed(draft: Draft, at: int, event: WriteClosed) -> None:
    happen(draft, at, event, event)


def _holds(draft: Draft, at: int, write: PostWrite) -> None:
    """I1: the source of a WRITE that is posted now has what it is to write."""
    found = draft.node(at).prefill(write.attempt.transfer)
    if found is None or (write.attempt, write.part.number) in found.reads:
        return
    tokens = draft.world.transfers[write.attempt.transfer].tokens
    if write.source != found.source(tokens) or write.part.end > found.tokens:
        what = f"tokens [{write.part.start}, {write.part.end}) of {write.attempt.transfer}"
        draft.broken.append(("I1", f"a WRITE reads {what} where they are not, or not yet"))


def _reads(draft: Draft, at: int, attempt: AttemptId, part: int) -> None:
    """I1: the source of a WRITE is still the request's."""
    transfer = attempt.transfer
    found = draft.node(at).prefill(transfer)
    if found is not None and (attempt, part) in found.reads:
        return
    if found is None or found.stage not in PINNED:
        stage = Stage.ABSENT if found is None else found.stage
        draft.broken.append(("I1", f"a WRITE of {transfer} reads a source that is {stage}"))


def write(draft: Draft, move: Move) -> bool:
    """Bytes land, a WRITE ends, an arrival is seen or lost."""
    world = draft.world
    hands = draft.hands
    question = (draft.ids[world.hands_at], move.number)
    known = world.landings.get(question)
    if known is None:
        action = in_hand.choices(hands.writes)[move.number][0]
        writes, events = model.apply(hands.writes, action)
        after = in_hand.settle(evolve(hands, writes=writes))
        known = world.landings[question] = world.hands_parts.number(after), events
    draft.ids[world.hands_at], events = known
    flights = {flight.key: flight for flight in hands.writes.flights} if events else {}
    for event in events:
        match event:
            case model.Landed(key=key, at=worker, piece=piece):
                writer = slot_of(draft, key.writer)
                alive = draft.node(writer).life == key.writer.incarnation
                if alive and flights[key].outcome is not Outcome.DONE:
                    _reads(draft, writer, key.attempt, key.part)
                target = slot_of(draft, worker)
                memory, broken = blocks.landed(draft.memory(target), piece, key.attempt, key.part)
                draft.put_memory(target, memory)
                draft.broken.extend(broken)
            case model.Ended(key=key, outcome=outcome):
                idle = not flights[key].pending
                closed = WriteClosed(key.attempt, key.part, outcome.value, source_idle=idle)
                _closed(draft, slot_of(draft, key.writer), closed)
            case _:
                _notice(draft, event)
    return True


def _notice(draft: Draft, event: model.Noticed) -> None:
    at = slot_of(draft, event.target)
    if draft.node(at).life != event.target.incarnation:
        return
    attempt, part = event.key.attempt, event.key.part
    nodes = draft.world.nodes
    draft.step(
        at,
        ("arrival", attempt, part),
        lambda slot, node: nodes.arrival(slot, node, attempt, part),
    )
