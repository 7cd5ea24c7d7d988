"""A whole endpoint as one frozen value, and back: what lets the real one be searched.

An `Endpoint` is mutable; the search needs states that can be compared, kept and taken up again in
any order. `freeze` takes everything it remembers out of it, `thaw` puts it back. Instants are kept
relative to now, which is always zero, so that the same situation later is the same state.

Two kinds of time are told apart. Clocks that safety rests on (permit, fence, write bound, restart
grace, settling) run exactly, down to the point past which nothing depends on them. Deadlines that
only end somebody's patience (resend, query, waiting, hold, transfer, backoffs, silence) are merely
set or not, and may come at any moment: whatever their durations, it is covered.

What is only ever looked up by its name is kept in the order of names: that one thing was heard of
before another is forgotten where nothing depends on it.
"""

from __future__ import annotations

from typing import TypeVar

from attrs import frozen

from pushkv.core.consumer import QUARANTINED, SETTLING, Consumer
from pushkv.core.copies import replace
from pushkv.core.effects import ProducerAddress
from pushkv.core.endpoint import Endpoint
from pushkv.core.events import ProducerEvent
from pushkv.core.ids import FOREVER, AttemptId, Instant, TransferId, Worker
from pushkv.core.link import Link
from pushkv.core.links import LinkKey, _Connection
from pushkv.core.messages import Reason
from pushkv.core.producer import Producer
from pushkv.core.request import Request
from pushkv.core.sending import ProducerKey, _Source

__all__ = ["NOW", "SOON", "EndpointState", "aged", "freeze", "in_order", "older", "thaw"]

NOW = Instant(0)
SOON = Instant(1)
"""The deadline that may come at any moment."""

REDIALS_MOST = 1


@frozen
class SourceState:
    """What one transfer's source blocks are kept for; see `Sending`."""

    said: tuple[ProducerEvent, ...]
    ranks: tuple[int, ...]
    expected: tuple[int, ...]
    freed: tuple[int, ...]
    pinned: int
    reason: Reason | None


@frozen
class EndpointState:
    """Everything an endpoint remembers; see `in_order`."""

    links: tuple[tuple[LinkKey, Link], ...]
    connections: tuple[tuple[int, int, ProducerAddress | None, LinkKey | None], ...]
    current: tuple[tuple[LinkKey, int], ...]
    consumers: tuple[tuple[AttemptId, Consumer], ...]
    requests: tuple[tuple[tuple[TransferId, int], Request], ...]
    exposed_blocks: int
    ready_at: Instant
    latest: tuple[tuple[TransferId, int], ...]
    by_link: tuple[tuple[ProducerAddress, tuple[AttemptId, ...]], ...]
    address: tuple[tuple[AttemptId, ProducerAddress], ...]
    attempt_max: int
    blocks: tuple[tuple[tuple[TransferId, int], int], ...]
    settling: tuple[AttemptId, ...]
    quarantined: tuple[AttemptId, ...]
    producers: tuple[tuple[ProducerKey, Producer], ...]
    sources: tuple[tuple[TransferId, SourceState], ...]
    ranks: tuple[tuple[TransferId, tuple[int, ...]], ...]
    served: tuple[tuple[Worker, tuple[ProducerKey, ...]], ...]
    over: tuple[ProducerKey, ...]
    past: tuple[ProducerKey, ...]
    floors: tuple[tuple[Worker, int], ...]
    looking: bool


# -- time


def older(at: Instant, by: int, least: int) -> Instant:
    """An instant after `by` has passed; below `least` all are alike."""
    return at if at == FOREVER else Instant(max(at - by, least))


def _patience(at: Instant) -> Instant:
    return at if at == FOREVER else SOON


def _consumer(state: Consumer, by: int) -> Consumer:
    exact = state.status in (SETTLING, QUARANTINED)
    return replace(
        state,
        fence=None if state.fence is None else older(state.fence, by, -1),
        timer_at=_patience(state.timer_at),
        deadline_at=older(state.deadline_at, by, 0) if exact else _patience(state.deadline_at),
    )


def _request(state: Request) -> Request:
    return replace(state, retry_at=_patience(state.retry_at))


def _producer(state: Producer, by: int) -> Producer:
    return replace(
        state,
        unknown=tuple(replace(each, over_at=older(each.over_at, by, -1)) for each in state.unknown),
        hold_until=_patience(state.hold_until),
        timer_at=_patience(state.timer_at),
        transfer_until=_patience(state.transfer_until),
    )


def _link(state: Link, by: int, lease: int) -> Link:
    stamps = dict.fromkeys(max(stamp - by, -lease - 1) for stamp in state.stamps)
    granted = state.last_grant
    return replace(
        state,
        last_grant=None if granted is None else older(granted, by, -lease - 1),
        stamps=tuple(stamps),
        silent_at=_patience(state.silent_at),
        timer_at=_patience(state.timer_at),
        redials=min(state.redials, REDIALS_MOST),
    )


def aged(state: EndpointState, by: int, lease: int) -> EndpointState:
    """The endpoint when its own clock has gone on by `by`, and nothing else has happened."""
    return replace(
        state,
        links=tuple((key, _link(each, by, lease)) for key, each in state.links),
        consumers=tuple((key, _consumer(each, by)) for key, each in state.consumers),
        requests=tuple((key, _request(each)) for key, each in state.requests),
        producers=tuple((key, _producer(each, by)) for key, each in state.producers),
        ready_at=older(state.ready_at, by, 0),
    )


# -- out and in


def freeze(endpoint: Endpoint, lease: int, *, walked: bool) -> EndpointState:
    """What `endpoint` remembers; for `walked` see `in_order`."""
    links, receiving, sending = endpoint.links, endpoint.receiving, endpoint.sending
    state = EndpointState(
        links=tuple(links.store.states.items()),
        connections=tuple(
            (number, each.nonce, each.dialed, each.key)
            for number, each in links._connections.items()
        ),
        current=tuple(links._current.items()),
        consumers=tuple(receiving.consumers.states.items()),
        requests=tuple(receiving.requests.states.items()),
        exposed_blocks=receiving.exposed_blocks,
        ready_at=receiving._ready_at,
        latest=tuple(receiving._latest.items()),
        by_link=tuple((key, tuple(each)) for key, each in receiving._by_link.items()),
        address=tuple(receiving._address.items()),
        attempt_max=receiving._attempt_max,
        blocks=tuple(receiving._blocks.items()),
        settling=tuple(receiving.settling),
        quarantined=tuple(receiving.quarantined),
        producers=tuple(sending.producers.states.items()),
        sources=tuple((key, _source(each)) for key, each in sending._sources.items()),
        ranks=tuple(sending._ranks.items()),
        served=tuple((key, tuple(each)) for key, each in sending._served.items()),
        over=tuple(sending._over),
        past=tuple(sending._past),
        floors=tuple(sending._floors.items()),
        looking=endpoint._looking,
    )
    return in_order(aged(state, 0, lease), walked=walked)


def in_order(state: EndpointState, *, walked: bool) -> EndpointState:
    """The same with everything that is only looked up in the order of its names.

    Attempts and transfers are among it unless they are `walked` through, which proofs (R14) do. The
    attempts of a link always keep the order in which they hear of it.
    """
    return replace(
        state,
        links=_named(state.links),
        connections=tuple(sorted(state.connections, key=lambda each: each[0])),
        current=_named(state.current),
        consumers=state.consumers if walked else _named(state.consumers),
        requests=_named(state.requests),
        latest=_named(state.latest),
        by_link=_named(state.by_link),
        address=_named(state.address),
        blocks=_named(state.blocks),
        settling=tuple(sorted(state.settling)),
        quarantined=tuple(sorted(state.quarantined)),
        producers=state.producers if walked else _named(state.producers),
        sources=_named(state.sources),
        ranks=_named(state.ranks),
        served=_named(state.served),
        over=tuple(sorted(state.over)),
        past=tuple(sorted(state.past)),
        floors=_named(state.floors),
    )


K = TypeVar("K")
V = TypeVar("V")


def _named(items: tuple[tuple[K, V], ...]) -> tuple[tuple[K, V], ...]:
    return tuple(sorted(items, key=lambda item: repr(item[0]))) if len(items) > 1 else items


def _refill(store: dict[K, V], items: tuple[tuple[K, V], ...]) -> None:
    store.clear()
    store.update(items)


def _source(source: _Source) -> SourceState:
    return SourceState(
        tuple(event for event, _ in source.said),
        tuple(sorted(source.ranks)),
        tuple(sorted(source.expected)),
        tuple(sorted(source.freed)),
        source.pinned,
        source.reason,
    )


def thaw(state: EndpointState, endpoint: Endpoint) -> None:
    """Let `endpoint` remember `state`, and nothing else."""
    links, receiving, sending = endpoint.links, endpoint.receiving, endpoint.sending
    _refill(links.store.states, state.links)
    links._connections = {
        number: _Connection(nonce, dialed, key) for number, nonce, dialed, key in state.connections
    }
    links._current = dict(state.current)
    links.news = []
    _refill(receiving.consumers.states, state.consumers)
    _refill(receiving.requests.states, state.requests)
    receiving.exposed_blocks = state.exposed_blocks
    receiving._ready_at = state.ready_at
    receiving._latest = dict(state.latest)
    receiving._by_link = {key: dict.fromkeys(each) for key, each in state.by_link}
    receiving._address = dict(state.address)
    receiving._attempt_max = state.attempt_max
    receiving._blocks = dict(state.blocks)
    receiving.settling = set(state.settling)
    receiving.quarantined = set(state.quarantined)
    _refill(sending.producers.states, state.producers)
    sending._sources = {
        key: _Source(
            [(event, NOW) for event in each.said],
            set(each.ranks),
            set(each.expected),
            set(each.freed),
            each.pinned,
            each.reason,
        )
        for key, each in state.sources
    }
    sending.pinned_blocks = sum(each.pinned for _, each in state.sources)
    sending._ranks = dict(state.ranks)
    sending._served = {key: dict.fromkeys(each) for key, each in state.served}
    sending._over = dict.fromkeys(state.over)
    sending._past = dict.fromkeys(state.past)
    sending._floors = dict(state.floors)
    endpoint._looking = state.looking
