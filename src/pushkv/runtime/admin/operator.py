"""What an operator may ask and tell a running engine, and what it answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice

import msgspec
from attrs import frozen

from pushkv.core.events import Event, Proven, WriterGone
from pushkv.core.ids import EngineId, Incarnation, Instant, TransferId, Worker
from pushkv.core.messages import Hello
from pushkv.runtime.config import RuntimeConfig
from pushkv.runtime.loop import Loop

from .ages import Ages
from .snapshot import View, links, quarantined, transfers
from .state import DrainState, EngineState, Peer, Released

__all__ = ["RISK", "Operator", "Refusal", "ReleaseOrder"]

RISK = (
    "a WRITE that still lands, lands in blocks that belong to another request by then, whose "
    "answer is then wrong without anybody's noticing; and one that still reads a source hands over "
    "whatever is there by then. Release only what cannot be reached any more: see that the peer's "
    "process has ended on its host, or that the host is off."
)
FRESH_NS = 50_000_000
"""A state is made anew no more often than this, whoever asks: making it takes the thread that
transfers need."""


class ReleaseOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The operator's word that nothing can reach quarantined blocks any more.

    Attributes:
        transfer: All that is quarantined of this transfer; or
        peer: all that is quarantined for this peer, whose process is dead.
        nothing_can_reach_them: Must be true; see `RISK`.
    """

    transfer: str | None = None
    peer: Peer | None = None
    nothing_can_reach_them: bool = False


@frozen
class Refusal:
    """An order that was not carried out.

    Attributes:
        status: As in HTTP.
        error: What to do about it.
    """

    status: int
    error: str


class Operator:
    """Answers from the machines. The runtime's thread only; never waits.

    Args:
        config: The runtime's.
        hello: What it says of itself.
        loop: What drives its machines.
        ages: Since when they are what they are.
        deliver: Lets an event happen in the loop's next turn.
        set_drain: Begins or ends a drain.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        hello: Hello,
        loop: Loop,
        ages: Ages,
        deliver: Callable[[Event], None],
        set_drain: Callable[[bool], None],
    ) -> None:
        self._config = config
        self._hello = hello
        self._loop = loop
        self._ages = ages
        self._deliver = deliver
        self._set_drain = set_drain
        self._made: tuple[int, int, EngineState] | None = None

    def state(self, most: int) -> EngineState:
        """Everything there is to tell, each list cut at `most`; at most 50 ms old."""
        now = self._config.clock()
        if self._made is not None:
            made_at, made_most, state = self._made
            if made_most == most and now - made_at < FRESH_NS:
                return state
        state = self._state(most)
        self._made = (now, most, state)
        return state

    def drain(self, *, on: bool) -> DrainState:
        """Take nothing new, or take it again."""
        self._set_drain(on)
        self._made = None
        return self._drain_state()

    def release(self, order: ReleaseOrder) -> Released | Refusal:
        """Take the operator's word."""
        if (order.transfer is None) == (order.peer is None):
            return Refusal(400, "name either a transfer or a peer")
        found = tuple(
            each
            for each in quarantined(self._view())
            if (order.peer or each.peer) == each.peer
            and (order.transfer or each.transfer) == each.transfer
        )
        if not found:
            return Refusal(404, "nothing is quarantined under that name: `list` says what is")
        event: Proven | WriterGone
        if order.peer is None:
            assert order.transfer is not None, "one of the two is given"
            event = Proven(TransferId(order.transfer))
        else:
            event = WriterGone(_worker(order.peer))
            if event.worker in self._linked():
                return Refusal(409, f"{order.peer} is alive: its link is up. Drain it or stop it")
        if not order.nothing_can_reach_them:
            return Refusal(409, f"this must be confirmed (nothing_can_reach_them): {RISK}")
        self._deliver(event)
        self._made = None
        return Released(found)

    # -- inside

    def _view(self) -> View:
        loop = self._loop
        return View(
            loop.endpoint,
            loop.permit_until,
            self._ages,
            self._config.policy.lease,
            loop.capabilities,
            Instant(self._config.clock()),
        )

    def _linked(self) -> set[Worker]:
        links = self._loop.endpoint.links
        return {up.peer for key in links.store.states for up in (links.up(key),) if up is not None}

    def _drain_state(self) -> DrainState:
        is_on, left = self._loop.drain.is_on, self._loop.left
        return DrainState(is_on, left, is_on and not left)

    def _state(self, most: int) -> EngineState:
        view, hello = self._view(), self._hello
        endpoint = view.endpoint
        receiving, sending = endpoint.receiving, endpoint.sending
        return EngineState(
            engine=hello.engine,
            incarnation=f"{hello.incarnation:016x}",
            rank=hello.rank,
            address=f"{hello.directory[0].host}:{hello.directory[0].port}",
            transport=f"{hello.transport} {hello.transport_version}",
            protocol=hello.protocol,
            process=os.getpid(),
            health=self._loop.health(),
            drain=self._drain_state(),
            links=links(view, most),
            links_in_all=len(endpoint.links.store.states),
            transfers=transfers(view, most),
            transfers_in_all=len(receiving.consumers.states) + sending.live,
            quarantined=tuple(islice(quarantined(view), most)),
            quarantined_in_all=len(receiving.quarantined) + len(sending.doubted()),
        )


def _worker(peer: Peer) -> Worker:
    return Worker(EngineId(peer.engine), Incarnation(int(peer.incarnation, 16)), peer.rank)
