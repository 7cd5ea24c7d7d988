"""The links of one endpoint: which connection carries which, HELLO, and what may pass.

Nothing is acted on before both HELLOs are in and fit. A message on a connection that is not its
link's current one is void: the link it belonged to has ended.

The producer's end speaks first, and says nothing of its memory, which nobody WRITEs into over this
link. The consumer's end answers with its own HELLO, memory keys included, once it has seen that the
two fit: a key that was handed out cannot be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import define, evolve, frozen

from . import link as link_machine
from .effects import (
    CloseSocket,
    Counted,
    Dial,
    DialPeer,
    Effect,
    Hangup,
    LinkDown,
    LinkUp,
    PeerJoined,
    PermitEnded,
    PermitGranted,
    ProducerAddress,
    SendLink,
    Transmit,
    WriterJoined,
)
from .events import Closed, ConnectionClosed, ConnectionOpened, Doubted, Opened, Unwanted, Wanted
from .ids import Epoch, Incarnation, Instant, Worker
from .link import LINK, Link, LinkStatus
from .machines import Machines, Store
from .messages import Grant, Hello, Message, Ping, Refused

__all__ = [
    "Fits",
    "LinkKey",
    "LinkLost",
    "LinkNews",
    "LinkReady",
    "LinkRefused",
    "Links",
    "PermitFresh",
]

LinkKey = ProducerAddress | Worker
"""A consumer's end is named by the address it dials, a producer's by the worker that dialled."""

Fits = Callable[[Hello, Hello], Refused | None]


@frozen
class LinkReady:
    """A link came up; attempts that wait for it may register."""

    key: LinkKey
    up: LinkUp


@frozen
class LinkLost:
    """A link ended."""

    key: LinkKey
    down: LinkDown


@frozen
class LinkRefused:
    """The peer at this address does not fit."""

    key: LinkKey
    refused: Refused


@frozen
class PermitFresh:
    """WRITEs to this consumer may go on."""

    worker: Worker
    epoch: Epoch


LinkNews = LinkReady | LinkLost | LinkRefused | PermitFresh


@define
class _Connection:
    nonce: int
    dialed: ProducerAddress | None
    key: LinkKey | None = None


class Links:
    """All links of one endpoint. `news` collects what the rest of the endpoint must hear."""

    def __init__(self, machines: Machines, hello: Hello, fits: Fits) -> None:
        self.store: Store[LinkKey, Link] = Store(LINK, {})
        self.news: list[LinkNews] = []
        self._machines = machines
        self._hello = hello
        self._fits = fits
        self._connections: dict[int, _Connection] = {}
        self._current: dict[LinkKey, int] = {}

    @property
    def incarnation(self) -> Incarnation:
        """Our own."""
        return self._hello.incarnation

    def up(self, key: LinkKey) -> LinkUp | None:
        """The link under `key`, if it is up."""
        link = self.store.states.get(key)
        if link is None or link.status is not LinkStatus.UP:
            return None
        assert link.epoch is not None
        assert link.peer is not None
        return LinkUp(link.epoch, link.peer)

    def want(self, address: ProducerAddress, now: Instant) -> list[Effect]:
        """An attempt needs the link to `address`."""
        if address not in self.store.states:
            self._machines.put(self.store, address, link_machine.dialing(self.incarnation))
        return self._step(address, Wanted(), now)

    def unwant(self, address: ProducerAddress, now: Instant) -> list[Effect]:
        """No attempt needs the link to `address` any more."""
        effects = self._step(address, Unwanted(), now)
        self._tidy(address)
        return effects

    def doubt(self, key: LinkKey, now: Instant) -> list[Effect]:
        """A REVOKE over this link stayed unanswered."""
        return self._step(key, Doubted(), now)

    def send(self, key: LinkKey, message: Message) -> Effect:
        """Over the current link, or nowhere: whoever needs it resends."""
        if self.up(key) is None:
            return Counted("no_link", type(message).__name__)
        return Transmit(self._current[key], message)

    def tick(self, key: LinkKey, event: object, now: Instant) -> list[Effect]:
        """Time has passed for this link."""
        effects = self._step(key, event, now)
        self._tidy(key)
        return effects

    def opened(self, event: ConnectionOpened, now: Instant) -> list[Effect]:
        """A connection stands; the side that was dialled speaks first and keeps its keys."""
        self._connections[event.connection] = _Connection(event.nonce, event.dialed)
        if event.dialed is not None:
            return []
        return [Transmit(event.connection, evolve(self._hello, nonce=event.nonce, memory=b""))]

    def closed(self, event: ConnectionClosed, now: Instant) -> list[Effect]:
        """A connection ended, or a dial failed."""
        key: LinkKey | None = event.dialed
        if event.connection is not None:
            connection = self._connections.pop(event.connection, None)
            if connection is None:
                return []
            key = connection.key or connection.dialed
            if key is None or self._current.get(key, event.connection) != event.connection:
                return []
            self._current.pop(key, None)
        if key is None or key not in self.store.states:
            return []
        effects = self._step(key, Closed(event.cause), now)
        self._tidy(key)
        return effects

    def peer_of(self, connection: int) -> tuple[LinkKey, LinkUp] | None:
        """Whose messages this connection carries; None unless it is its link's current one."""
        found = self._connections.get(connection)
        if found is None or found.key is None or self._current.get(found.key) != connection:
            return None
        up = self.up(found.key)
        return None if up is None else (found.key, up)

    def message(
        self, connection: int, message: Hello | Refused | Ping | Grant, now: Instant
    ) -> list[Effect]:
        """HELLO, REFUSED, PING or GRANT came."""
        if isinstance(message, Hello):
            return self._greeted(connection, message, now)
        if isinstance(message, Refused):
            return self._refused(connection, message)
        found = self.peer_of(connection)
        if found is None:
            return [Counted("void_link_message", type(message).__name__)]
        return self._step(found[0], message, now)

    # -- inside

    def _greeted(self, number: int, theirs: Hello, now: Instant) -> list[Effect]:
        connection = self._connections.get(number)
        if connection is None or connection.key is not None:
            return [Counted("unexpected_hello"), Hangup(number)]
        ours = evolve(self._hello, nonce=connection.nonce)
        refused = self._fits(ours, theirs)
        if refused is not None:
            self._refuse(connection, refused)
            return [
                Counted("hello_refused", f"{refused.field}: {refused.ours} | {refused.theirs}"),
                Transmit(number, refused),
                Hangup(number),
            ]
        peer = Worker(theirs.engine, theirs.incarnation, theirs.rank)
        effects: list[Effect] = []
        if connection.dialed is not None:
            key: LinkKey = connection.dialed
            epoch = Epoch(connection.nonce, theirs.nonce)
            effects += [Transmit(number, ours), WriterJoined(peer, theirs)]
        else:
            key = peer
            epoch = Epoch(theirs.nonce, connection.nonce)
            effects.append(PeerJoined(peer, theirs))
            if key not in self.store.states:
                self._machines.put(self.store, key, link_machine.accepting(self.incarnation))
        connection.key = key
        older = self._current.get(key)
        self._current[key] = number
        effects += self._step(key, Opened(epoch, peer), now)
        if older is not None and older != number:
            effects.append(Hangup(older))
        return effects

    def _refused(self, number: int, refused: Refused) -> list[Effect]:
        connection = self._connections.get(number)
        if connection is None:
            return []
        self._refuse(connection, refused)
        detail = f"{refused.field}: {refused.theirs} | {refused.ours}"
        return [Counted("refused_by_peer", detail), Hangup(number)]

    def _refuse(self, connection: _Connection, refused: Refused) -> None:
        if connection.dialed is not None:
            self.news.append(LinkRefused(connection.dialed, refused))

    def _step(self, key: LinkKey, event: object, now: Instant) -> list[Effect]:
        out: list[Effect] = []
        if key not in self.store.states:
            return out
        for effect in self._machines.step(self.store, key, event, now):
            out += self._carry(key, effect)
        return out

    def _carry(self, key: LinkKey, effect: Effect) -> Iterator[Effect]:
        """Effects of a link machine, in the endpoint's terms."""
        if isinstance(effect, LinkUp):
            self.news.append(LinkReady(key, effect))
        elif isinstance(effect, LinkDown):
            self.news.append(LinkLost(key, effect))
        elif isinstance(effect, DialPeer):
            assert isinstance(key, ProducerAddress), "only a consumer dials"
            yield Dial(key)
        elif isinstance(effect, CloseSocket):
            number = self._current.get(key, self._ungreeted(key))
            if number is not None:
                yield Hangup(number)
        elif isinstance(effect, SendLink):
            yield Transmit(self._current[key], effect.message)
        else:
            if isinstance(effect, PermitGranted):
                assert isinstance(key, Worker), "only a producer is granted"
                self.news.append(PermitFresh(key, effect.epoch))
            assert isinstance(effect, Counted | PermitGranted | PermitEnded)
            yield effect

    def _ungreeted(self, key: LinkKey) -> int | None:
        """The connection we dialled for `key` on which no HELLO has come."""
        found = self._connections.items()
        return next((n for n, each in found if each.key is None and each.dialed == key), None)

    def _tidy(self, key: LinkKey) -> None:
        link = self.store.states.get(key)
        if link is not None and link.status is LinkStatus.ENDED and not link.wanted:
            self._machines.drop(self.store, key)
