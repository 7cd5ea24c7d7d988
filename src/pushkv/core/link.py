"""The link machine: one end of the connection between a consumer rank and a producer rank.

Theory of operation
-------------------
A link is where permits live (R3–R6). The producer's end asks with PING, which carries its own clock
reading as a stamp; the consumer's end echoes the stamp in GRANT; the permit counts from the stamp,
so that a slow answer only shortens it. The consumer remembers when it last granted: once the link
has ended, nothing registered over it can be written after that instant plus the lease. It never
grants on a link that it has ended.

The consumer dials, and dials again while some attempt wants the link. The producer only accepts.
SUSPECT is one way: on silence, or when a REVOKE stays unanswered, the link is ended here and now
and its socket closed; what the peer thinks of it does not matter. Reconnecting does not wait for
old fences.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import frozen

from . import rules as rule
from .copies import copier
from .effects import (
    CloseSocket,
    Counted,
    DialPeer,
    Effect,
    LinkDown,
    LinkUp,
    PermitEnded,
    PermitGranted,
    SendLink,
)
from .events import Closed, Doubted, Opened, Tick, Unwanted, Wanted
from .ids import FOREVER, Epoch, Incarnation, Instant, Worker
from .messages import Grant, Ping
from .table import Result, Rules, Table

__all__ = ["LINK", "Link", "LinkStatus", "accepting", "dialing"]


class LinkStatus(StrEnum):
    """Where a link stands."""

    CONNECTING = "link.connecting"
    UP = "link.up"
    SUSPECT = "link.suspect"
    ENDED = "link.ended"


CONNECTING, UP, SUSPECT, ENDED = LinkStatus

STAMPS_OUTSTANDING = 8


@frozen
class Link:
    """One end of a link. Build with `dialing` (consumer) or `accepting` (producer).

    Attributes:
        grants: Whether this is the consumer's end, which dials and grants; else the producer's.
        incarnation: Our own.
        epoch: The current or last link's name.
        peer: The worker at the other end of it.
        last_grant: Consumer: when it last granted over this epoch.
        stamps: Producer: PINGs over this epoch that are not answered, oldest first.
        silent_at: When silence makes the link suspect, or a dial unanswered; life moves it.
        timer_at: When to PING or to dial.
        wanted: Some attempt needs it: dial again when it ends.
        redials: How often it was dialled in vain since it was last up; each wait is twice as long.
    """

    status: LinkStatus
    grants: bool
    incarnation: Incarnation
    epoch: Epoch | None
    peer: Worker | None
    last_grant: Instant | None
    stamps: tuple[int, ...]
    silent_at: Instant
    timer_at: Instant
    wanted: bool
    redials: int

    @property
    def next_deadline(self) -> Instant:
        """When a Tick is due; FOREVER if never."""
        alive = self.status in (CONNECTING, UP)
        return min(self.timer_at, self.silent_at) if alive else self.timer_at


# What every action copies its state with: `copies.replace`, made for this class alone.
if TYPE_CHECKING:
    from attrs import evolve as replace
else:
    replace = copier(Link)


def dialing(incarnation: Incarnation) -> Link:
    """The consumer's end; it dials when an attempt wants it."""
    return Link(ENDED, True, incarnation, None, None, None, (), FOREVER, FOREVER, False, 0)


def accepting(incarnation: Incarnation) -> Link:
    """The producer's end."""
    return Link(ENDED, False, incarnation, None, None, None, (), FOREVER, FOREVER, False, 0)


def _silence(now: Instant, rules: Rules) -> Instant:
    """Peers exchange PING and GRANT three times a lease; a lease of silence is too long."""
    return Instant(now + rules.policy.lease)


def _finish(state: Link, status: LinkStatus, now: Instant, rules: Rules) -> Result[Link]:
    """R6, R11: the fence is frozen, the permit is over."""
    assert state.epoch is not None
    assert state.peer is not None
    fence = rule.fence(state.last_grant, rules.policy.lease) if state.grants else None
    effects: tuple[Effect, ...] = (LinkDown(state.epoch, state.peer, fence),)
    if not state.grants:
        effects = (PermitEnded(state.epoch, state.peer), *effects)
    state = replace(state, status=status, stamps=(), last_grant=None, timer_at=FOREVER)
    return state, effects


def _again(state: Link, now: Instant, rules: Rules) -> Link:
    if not (state.grants and state.wanted):
        return replace(state, status=ENDED, timer_at=FOREVER)
    """A quarantine may want the link for ever: dial ever more rarely, but once a lease at least."""
    wait = min(rules.policy.connect_backoff << min(state.redials, 16), rules.policy.lease)
    return replace(
        state,
        status=CONNECTING,
        timer_at=Instant(now + wait),
        silent_at=FOREVER,
        redials=state.redials + 1,
    )


# -- actions


def _dial(state: Link, event: Wanted, now: Instant, rules: Rules) -> Result[Link]:
    return _dialed(replace(state, status=CONNECTING, wanted=True), now, rules)


def _dialed(state: Link, now: Instant, rules: Rules) -> Result[Link]:
    """I7: whoever takes the connection and says nothing does not keep us from dialling again."""
    silent = Instant(now + rules.policy.connect)
    return replace(state, timer_at=FOREVER, silent_at=silent), (DialPeer(),)


def _want(state: Link, event: Wanted, now: Instant, rules: Rules) -> Result[Link]:
    """A new attempt does not wait out what earlier ones have learnt about this address."""
    timer = state.timer_at
    if state.status is CONNECTING and timer != FOREVER:
        timer = min(timer, Instant(now + rules.policy.connect_backoff))
    return replace(state, wanted=True, timer_at=timer), ()


def _unwant(state: Link, event: Unwanted, now: Instant, rules: Rules) -> Result[Link]:
    return replace(state, wanted=False), ()


def _opened(state: Link, event: Opened, now: Instant, rules: Rules) -> Result[Link]:
    """HELLO of a newer link ends the older one first."""
    effects: tuple[Effect, ...] = ()
    if state.status is UP:
        state, effects = _finish(state, ENDED, now, rules)
    state = replace(
        state,
        status=UP,
        epoch=event.epoch,
        peer=event.peer,
        last_grant=None,
        stamps=(),
        silent_at=_silence(now, rules),
        timer_at=FOREVER,
        redials=0,
    )
    up = LinkUp(event.epoch, event.peer)
    if state.grants:
        return state, (*effects, up)
    state, ping = _ping(state, now, rules)
    return state, (*effects, up, *ping)


def _ping(state: Link, now: Instant, rules: Rules) -> Result[Link]:
    stamps = (*state.stamps, int(now))[-STAMPS_OUTSTANDING:]
    timer = Instant(now + rules.policy.ping)
    return replace(state, stamps=stamps, timer_at=timer), (SendLink(Ping(int(now))),)


def _pinged(state: Link, event: Ping, now: Instant, rules: Rules) -> Result[Link]:
    """R4: echo the stamp. R6: remember the grant before it leaves."""
    if not state.grants or state.peer is None:
        return state, (Counted("ping_at_producer"),)
    grant = Grant(event.stamp, rules.policy.lease, state.incarnation, state.peer.incarnation)
    state = replace(state, last_grant=now, silent_at=_silence(now, rules))
    return state, (SendLink(grant),)


def _granted(state: Link, event: Grant, now: Instant, rules: Rules) -> Result[Link]:
    """R4: only a stamp still outstanding on this link, and only for this pair of incarnations."""
    epoch = state.epoch
    if (
        state.grants
        or epoch is None
        or state.peer is None
        or event.stamp not in state.stamps
        or event.producer_incarnation != state.incarnation
        or event.consumer_incarnation != state.peer.incarnation
    ):
        return state, (Counted("stale_grant"),)
    lease = min(event.lease, rules.policy.lease)
    until = rule.permit_end(event.stamp, lease, rules.policy.drift_ppm)
    state = replace(
        state,
        stamps=tuple(stamp for stamp in state.stamps if stamp > event.stamp),
        silent_at=_silence(now, rules),
    )
    return state, (PermitGranted(epoch, until),)


def _doubt(state: Link, event: Doubted, now: Instant, rules: Rules) -> Result[Link]:
    state, effects = _finish(state, SUSPECT, now, rules)
    return state, (*effects, CloseSocket())


def _tick_up(state: Link, event: Tick, now: Instant, rules: Rules) -> Result[Link]:
    if now >= state.silent_at:
        state, effects = _finish(state, SUSPECT, now, rules)
        return state, (*effects, CloseSocket())
    if not state.grants and now >= state.timer_at:
        return _ping(state, now, rules)
    return state, ()


def _tick_connecting(state: Link, event: Tick, now: Instant, rules: Rules) -> Result[Link]:
    if now >= state.silent_at:
        return replace(state, silent_at=Instant(now + rules.policy.connect)), (CloseSocket(),)
    if now < state.timer_at:
        return state, ()
    if not state.wanted:
        return replace(state, status=ENDED, timer_at=FOREVER), ()
    return _dialed(state, now, rules)


def _closed_up(state: Link, event: Closed, now: Instant, rules: Rules) -> Result[Link]:
    state, effects = _finish(state, ENDED, now, rules)
    return _again(state, now, rules), effects


def _closed(state: Link, event: Closed, now: Instant, rules: Rules) -> Result[Link]:
    return _again(state, now, rules), ()


EVENTS = (Wanted, Unwanted, Opened, Closed, Ping, Grant, Doubted, Tick)


def _build() -> Table[Link]:
    table: Table[Link] = Table("link", LinkStatus, EVENTS)
    on, ignore = table.on, table.ignore
    on(ENDED, Wanted, to=CONNECTING, do=_dial, why="an attempt needs it")
    on(CONNECTING, Wanted, to=CONNECTING, do=_want, why="dialled already, or again soon")
    on(UP, Wanted, to=UP, do=_want, why="up already; dial again when it ends")
    on(SUSPECT, Wanted, to=SUSPECT, do=_want, why="dial when the old socket is closed")
    for status in (CONNECTING, UP, SUSPECT):
        on(status, Unwanted, to=status, do=_unwant, why="the last attempt is over: dial no more")
    ignore(ENDED, Unwanted, why="what somebody wants is dialled, not ended")
    on(
        (ENDED, CONNECTING, UP, SUSPECT),
        Opened,
        to=UP,
        do=_opened,
        why="HELLO of a newer link ends the older one first, at both ends",
    )
    on(UP, Closed, to=(ENDED, CONNECTING), do=_closed_up, why="R6, R11: the fence freezes now")
    on(SUSPECT, Closed, to=(ENDED, CONNECTING), do=_closed, why="ended when suspected")
    on(CONNECTING, Closed, to=(ENDED, CONNECTING), do=_closed, why="the dial failed: again later")
    ignore(ENDED, Closed, why="ended already")
    on(UP, Ping, to=UP, do=_pinged, why="R4: one exchange for all transfers of the pair")
    on(UP, Grant, to=UP, do=_granted, why="R4: the permit counts from our own stamp")
    ignore((CONNECTING, SUSPECT, ENDED), Ping, Grant, why="R6: no grant on a link that has ended")
    on(UP, Doubted, to=SUSPECT, do=_doubt, why="a REVOKE stayed unanswered: grant no more")
    ignore((CONNECTING, SUSPECT, ENDED), Doubted, why="it has ended already")
    on(UP, Tick, to=(UP, SUSPECT), do=_tick_up, why="I7: PING keeps the permit; silence ends it")
    on(
        CONNECTING,
        Tick,
        to=(CONNECTING, ENDED),
        do=_tick_connecting,
        why="dial again while some attempt wants the link; hang up on who does not answer",
    )
    ignore((SUSPECT, ENDED), Tick, why="nothing to wait for")
    return table.freeze()


LINK = _build()
"""The link's table, frozen."""
