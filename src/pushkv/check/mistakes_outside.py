"""Mistakes around the machines: whoever posts, what carries messages, what is kept for how long.

The machines leave these to the poster of a transport, to connections and to the clock; the checker
stands for all three, and so it is the checker that gets them wrong here.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, frozen

from pushkv.core import producer_actions, producer_pieces, rules
from pushkv.core.copies import replace
from pushkv.core.effects import PostWrite
from pushkv.core.ids import Part
from pushkv.core.producer import Producer
from pushkv.core.table import Result

from . import handlers, snapshot
from .bounds import Configuration
from .moves import Move
from .patch import Apply, Patch, named_in
from .snapshot import NOW
from .world import Draft
from .writing import post, slot_of

__all__ = ["OUTSIDE"]

OUTSIDE: dict[str, Apply] = {}
"""By name."""

mistake: Callable[[Apply], Apply] = named_in(OUTSIDE)

CHECKED = -1
"""Instead of its arrival token, a WRITE whose permit was good when it was ordered has this."""


@frozen
class Posted(Part):
    """A part that is known to be posted."""


@mistake
def a_tombstone_ends_by_time(patch: Patch) -> None:
    """R7: what has ended is forgotten as soon as time passes."""
    real = snapshot._producer

    def older(state: Producer, by: int) -> Producer:
        state = real(state, by)
        return replace(state, ended=()) if by else state

    patch.set(snapshot, "_producer", older)


@mistake
def a_tombstone_until_received_where_messages_overtake(patch: Patch) -> None:
    """R7: the channel is not ordered, and yet RECEIVED ends what is remembered."""
    real = Configuration.budget

    def budget(self: Configuration, fault: str) -> int:
        return real(self, fault) * (2 if fault == "overtake" else 1)

    patch.set(Configuration, "budget", budget)


@mistake
def a_write_is_open_only_when_posted(patch: Patch) -> None:
    """R8: the verdict waits for what was posted, and not for what was only ordered."""
    wait = producer_pieces.drained

    def drained(state: Producer) -> Result[Producer]:
        left = tuple(part for part in state.open if isinstance(part, Posted))
        return wait(replace(state, open=left))

    def posted(draft: Draft, move: Move) -> bool:
        ordered = draft.hands.ordered[move.number]
        if not post(draft, move):
            return False
        at = slot_of(draft, ordered.writer)
        node = draft.node(at)
        producers = tuple(
            (key, _posted(state, ordered.write)) for key, state in node.endpoint.producers
        )
        draft.put_node(at, evolve(node, endpoint=replace(node.endpoint, producers=producers)))
        return True

    patch.set(producer_pieces, "drained", drained)
    patch.set(producer_actions, "drained", drained)
    patch.set(handlers, "HANDLERS", handlers.HANDLERS | {"post": posted})


def _posted(state: Producer, write: PostWrite) -> Producer:
    served = state.registration
    if served is None or served.register.attempt != write.attempt:
        return state
    parts = tuple(
        Posted(part.number, part.start, part.end) if part == write.part else part
        for part in state.open
    )
    return replace(state, open=parts)


@mistake
def a_permit_is_checked_when_ordered(patch: Patch) -> None:
    """R5: what was ordered under a permit is posted later, whether it still lasts or not."""
    do = Draft._do

    def checked(self: Draft, at: int, number: int) -> None:
        world = self.world
        effect = world.effect_parts[number]
        if isinstance(effect, PostWrite):
            until = self.node(at).permit(effect.epoch)
            if rules.may_post(NOW, until, world.configuration.capabilities.write_bound):
                number = world.effect_parts.number(evolve(effect, arrival_token=CHECKED))
        do(self, at, number)

    def posted(draft: Draft, move: Move) -> bool:
        unchecked = Patch()
        if draft.hands.ordered[move.number].write.arrival_token == CHECKED:
            unchecked.set(rules, "may_post", lambda now, until, bound: True)
        try:
            return post(draft, move)
        finally:
            unchecked.undo()

    patch.set(Draft, "_do", checked)
    patch.set(handlers, "HANDLERS", handlers.HANDLERS | {"post": posted})


@mistake
def a_preempted_source_goes_at_once(patch: Patch) -> None:
    """I1: the engine gets the blocks of a preempted prefill back although WRITEs read them."""
    patch.set(handlers, "_reads", lambda draft, move: set())
