"""All machines of one worker rank: what happens goes in, what is to be done comes out, in order.

An endpoint holds many transfers, as consumer, as producer, or as both. It routes by transfer,
compares incarnation, rank and attempt before anything else (R9), keeps one deadline for all, and
bounds everything it stores. It reads no clock, does no I/O and draws no random number: the same
events at the same instants give the same effects.
"""

from __future__ import annotations

from attrs import frozen

from .capabilities import Capabilities
from .effects import Counted, Delivered, Effect, Hangup, LookForArrivals, Send, Transmit
from .errors import LocalProtocolError
from .events import (
    ArrivalSeen,
    Arrived,
    Cancelled,
    Computed,
    ConnectionClosed,
    ConnectionOpened,
    Event,
    MessageReceived,
    Offered,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
    Proven,
    Readmitted,
    RegistrationReceived,
    TakenBack,
    Tick,
    WriteClosed,
    WriterGone,
)
from .ids import Instant, Worker
from .link import LINK
from .links import Fits, LinkLost, LinkNews, Links, PermitFresh
from .machines import LifeObserver, Machines, Observer
from .messages import Grant, Hello, Message, Ping, Query, Received, Refused, Register, Revoke
from .policy import Policy
from .producer_table import PRODUCER
from .receiving import Receiving
from .sending import Sending
from .table import Rules

__all__ = ["Endpoint", "Identity"]


@frozen
class Identity:
    """Who an endpoint is, as it says in HELLO, and what it alone knows.

    Attributes:
        hello: The HELLO to send; its nonce is replaced per connection.
        layout_digest: Of the KV cache layout; REGISTER carries it.
        secret: Random bytes, at least 16, from which arrival tokens are made.
    """

    hello: Hello
    layout_digest: bytes
    secret: bytes

    @property
    def worker(self) -> Worker:
        """The rank this endpoint is."""
        return Worker(self.hello.engine, self.hello.incarnation, self.hello.rank)


class Endpoint:
    """One worker rank's machines. Not thread-safe; never blocks; does no I/O.

    Args:
        identity: Who we are.
        policy: Durations and bounds.
        capabilities: What the transport declares.
        fits: Compares two HELLOs and names the first difference.
        started_at: When this incarnation began; R13 counts from there.
        observer: Called with every step; None costs one comparison.
        lives: Called when a machine begins and when it is forgotten.
    """

    def __init__(
        self,
        identity: Identity,
        policy: Policy,
        capabilities: Capabilities,
        fits: Fits,
        started_at: Instant,
        observer: Observer | None = None,
        lives: LifeObserver | None = None,
    ) -> None:
        me = identity.worker
        self._machines = Machines(Rules(policy, capabilities), observer, lives)
        self.links: Links = Links(self._machines, identity.hello, fits)
        self.receiving: Receiving = Receiving(
            me,
            self._machines,
            self.links,
            identity.layout_digest,
            identity.secret,
            started_at,
        )
        self.sending: Sending = Sending(me, self._machines, self.links, identity.layout_digest)
        self._looking = False

    def next_deadline(self) -> Instant:
        """When a Tick is due at the latest; FOREVER if nothing waits for time."""
        return self._machines.deadlines.next()

    def awaited_deaths(self) -> frozenset[Worker]:
        """The peers whose certain death would give blocks back (R14)."""
        return self.receiving.quarantined_writers() | self.sending.doubted_consumers()

    def handle(self, event: Event, now: Instant) -> list[Effect]:
        """Let `event` happen at `now`; returns what is to be done, in this order.

        Raises:
            LocalProtocolError: The event contradicts the contract of whoever sent it; nothing
            changed.
        """
        out = self._route(event, now)
        while self.links.news:
            for news in self._news():
                if isinstance(news, PermitFresh):
                    out += self.sending.link_news(news, now)
                    continue
                out += self.receiving.link_news(news, now)
                if isinstance(news, LinkLost):
                    out += self.sending.link_news(news, now)
        return out + self._bell(out)

    def _news(self) -> list[LinkNews]:
        news, self.links.news = self.links.news, []
        return list(news)

    def _bell(self, out: list[Effect]) -> list[Effect]:
        """Arrivals are looked for while a verdict waits for them, and once when one did not."""
        looking = bool(self.receiving.settling)
        if looking != self._looking:
            self._looking = looking
            return [LookForArrivals(looking)]
        if not looking and any(isinstance(effect, Delivered) for effect in out):
            return [LookForArrivals(True), LookForArrivals(False)]
        return []

    def _route(self, event: Event, now: Instant) -> list[Effect]:
        match event:
            case Tick():
                return self._tick(now)
            case MessageReceived():
                return self._message(event.connection, event.message, now)
            case ArrivalSeen():
                return self.receiving.arrival(event, now)
            case WriteClosed():
                return self.sending.closed(event, now)
            case Offered():
                return self.receiving.offered(event, now)
            case Cancelled():
                return self.receiving.cancelled(event, now)
            case TakenBack() | Readmitted():
                return self.receiving.taken_back(event, now)
            case Arrived() | Computed() | PrefillPreempted() | PrefillResumed() | PrefillAborted():
                return self.sending.engine(event, now)
            case ConnectionOpened():
                return self.links.opened(event, now)
            case ConnectionClosed():
                return self.links.closed(event, now)
            case WriterGone() | Proven():
                return self.receiving.proof(event, now) + self.sending.proof(event, now)
            case _:
                raise LocalProtocolError(f"{event!r} is not an event of an endpoint")

    def _message(self, connection: int, message: Message, now: Instant) -> list[Effect]:
        if isinstance(message, Hello | Refused | Ping | Grant):
            return self.links.message(connection, message, now)
        found = self.links.peer_of(connection)
        if found is None:
            return [Counted("void_message", type(message).__name__), Hangup(connection)]
        _, up = found
        if isinstance(message, Register):
            news = RegistrationReceived(message, up.epoch, up.peer)
            out = self.sending.message(up.peer, news, now)
        elif isinstance(message, Query | Revoke | Received):
            out = self.sending.message(up.peer, message, now)
        else:
            out = self.receiving.message(up.peer, message, now)
        return [
            Transmit(connection, effect.message) if isinstance(effect, Send) else effect
            for effect in out
        ]

    def _tick(self, now: Instant) -> list[Effect]:
        out: list[Effect] = []
        for kind, key in self._machines.deadlines.due(now):
            if kind == LINK.name:
                if key in self.links.store.states:
                    out += self.links.tick(key, Tick(), now)
                    self._machines.look_again(self.links.store, key, now)
            elif kind == PRODUCER.name:
                out += self.sending.tick(key, now)
            else:
                out += self.receiving.tick(kind, key, now)
        return out
