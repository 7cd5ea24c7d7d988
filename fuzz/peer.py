"""A peer that says anything, in any order, to an endpoint that serves somebody else as well.

Bytes choose among messages whose names are few, so that they often meet something that exists. No
message may raise, and none may change what another peer is party to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from attrs import evolve

from pushkv.compatibility import compare
from pushkv.core.capabilities import Capabilities
from pushkv.core.effects import Delivered, Effect, NotDelivered, PostWrite, ProducerAddress
from pushkv.core.endpoint import Endpoint, Identity
from pushkv.core.events import (
    Arrived,
    Computed,
    ConnectionOpened,
    MessageReceived,
    Offered,
    Tick,
    WriteClosed,
)
from pushkv.core.ids import (
    AttemptId,
    Blocks,
    Duration,
    EngineId,
    Incarnation,
    Instant,
    Part,
    TransferId,
    Worker,
    seconds,
)
from pushkv.core.messages import (
    Complete,
    Failed,
    Grant,
    Hello,
    Message,
    Ping,
    Progress,
    Query,
    Reason,
    Received,
    Refused,
    Register,
    Registered,
    Revoke,
    Revoked,
    Unproven,
)
from pushkv.core.policy import Policy

__all__ = ["converse"]

POLICY = Policy(lease=seconds(10), transfers=50, remembered=20)
LAYOUT = b"layout"
PROMPT = b"prompt"
US, PEER, FRIEND = EngineId("us"), EngineId("peer"), EngineId("friend")
HELLO = Hello(1, 0, US, Incarnation(1), 0, (), (), "t", "1", POLICY.lease, (), b"")
FRIENDLY = Capabilities("t", done_means_visible=True, write_bound=seconds(1))
STRANGE, GOOD = 1, 2
"""Connections accepted from the peer under test and from the friend."""
WAITS_MOST = 25
"""Tenths of a second: no deadline of the friend's comes."""
DIALED = {3: ProducerAddress("peer", 1), 4: ProducerAddress("friend", 1)}
"""Connections to producers: the peer's and the friend's."""


class _SpentError(Exception):
    """The bytes are used up."""


class _Chooser:
    """Small choices out of bytes; ends when they do."""

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)

    def number(self, below: int) -> int:
        for byte in self._bytes:
            return byte % below
        raise _SpentError

    def name(self, *names: str) -> str:
        return names[self.number(len(names))]


def converse(data: bytes) -> None:
    """Everything that `data` says, from a peer that is greeted already."""
    endpoint = Endpoint(Identity(HELLO, LAYOUT, b"s" * 16), POLICY, FRIENDLY, compare, Instant(0))
    now = Instant(seconds(100))
    told: list[Effect] = []

    def happen(event: object) -> None:
        told.extend(endpoint.handle(event, now))  # type: ignore[arg-type]

    for number, address in ((STRANGE, None), (GOOD, None), *DIALED.items()):
        happen(ConnectionOpened(number, number, address))
        name = PEER if number in (STRANGE, 3) else FRIEND
        happen(MessageReceived(number, evolve(HELLO, engine=name, incarnation=Incarnation(7))))
    for transfer in ("a", "b", "c"):
        happen(Arrived(TransferId(transfer), PROMPT))
    happen(Computed(TransferId("b"), 8, ((4, 5),), final=True))
    happen(MessageReceived(GOOD, _register(_attempt(FRIEND, "b", 1))))
    stamp = endpoint.links.store.states[Worker(FRIEND, Incarnation(7), 0)].stamps[-1]
    happen(MessageReceived(GOOD, Grant(stamp, POLICY.lease, Incarnation(7), HELLO.incarnation)))
    served = endpoint.sending.producers.states[TransferId("b"), 0].registration
    for number, (transfer, address) in enumerate((("x", DIALED[4]), ("y", DIALED[3]))):
        happen(_offer(transfer, number, address))
    for number, message in _messages(_Chooser(data)):
        if message is None:
            now = Instant(now + number)
            happen(Tick())
        else:
            happen(MessageReceived(number, message))
        for effect in told:
            if isinstance(effect, PostWrite) and effect.attempt.consumer != FRIEND:
                happen(WriteClosed(effect.attempt, effect.part.number, "done"))
        ended = [each for each in told if isinstance(each, Delivered | NotDelivered)]
        assert not [each for each in ended if each.transfer == "x"], "the friend's was ended"
        told.clear()
        if served is not None:
            state = endpoint.sending.producers.states[TransferId("b"), 0]
            assert state.registration == served, "the friend's registration was changed"
    assert len(endpoint.sending.producers.states) <= POLICY.transfers + 2 * POLICY.remembered


def _attempt(consumer: str, transfer: str, number: int, incarnation: int = 7) -> AttemptId:
    return AttemptId(
        EngineId(consumer), Incarnation(incarnation), 0, 0, TransferId(transfer), number
    )


def _register(attempt: AttemptId, **changes: Any) -> Register:
    plain = Register(
        attempt, ((1, 2),), 0, 8, PROMPT, LAYOUT, (0,), (0,), 9, Duration(POLICY.waiting)
    )
    return evolve(plain, **changes)


def _offer(transfer: str, number: int, address: ProducerAddress) -> Offered:
    blocks: Blocks = ((1, 2),)
    return Offered(TransferId(transfer), number, (address,), blocks, 0, 8, PROMPT, (0,))


def _messages(choose: _Chooser) -> Iterator[tuple[int, Message | None]]:
    """Pairs of connection and message, or of a wait in nanoseconds and None."""
    waits = 0
    with contextlib.suppress(_SpentError):
        while True:
            kind = choose.number(18)
            if kind == 17:
                waits += 1
                if waits < WAITS_MOST:
                    yield seconds(0.1), None
                continue
            yield (STRANGE, 3)[choose.number(2)], _message(kind, choose)


def _message(kind: int, choose: _Chooser) -> Message:
    """Under the peer's name, the friend's, or ours; never more than a few of each."""
    match kind:
        case 11:
            return Ping(choose.number(4))
        case 12:
            lives = Incarnation(choose.number(8)), HELLO.incarnation
            return Grant(seconds(100), POLICY.lease, *lives)
        case 13:
            return evolve(HELLO, engine=EngineId(choose.name(PEER, FRIEND, US)))
        case 14:
            return Refused("model", "a", "b")
    attempt = AttemptId(
        EngineId(choose.name(PEER, PEER, FRIEND, US)),
        Incarnation((7, 7, 1, 8)[choose.number(4)]),
        (0, 0, 1)[choose.number(3)],
        (0, 0, 1)[choose.number(3)],
        TransferId(choose.name("a", "b", "c", "d", "x", "y")),
        choose.number(4),
    )
    if kind in PLAIN:
        return PLAIN[kind](attempt)
    if kind in VERDICTS:
        parts = tuple(
            Part(choose.number(3), 4 * choose.number(3), 8) for _ in range(choose.number(3))
        )
        return VERDICTS[kind](attempt, parts)
    if kind == 2:
        return Progress(attempt, choose.number(12))
    return _register(
        attempt,
        start=4 * choose.number(3),
        prompt_digest=(PROMPT, PROMPT, b"another")[choose.number(3)],
        layout_digest=(LAYOUT, LAYOUT, b"another")[choose.number(3)],
        consumer_ranks=((0,), (0, 1), (1,))[choose.number(3)],
        blocks=(((1, 2),), (), ((1,), (2,)))[choose.number(3)],
    )


PLAIN: dict[int, Callable[[AttemptId], Message]] = {
    1: Registered,
    7: Revoke,
    8: Query,
    9: Received,
}
VERDICTS: dict[int, Callable[[AttemptId, tuple[Part, ...]], Message]] = {
    3: Complete,
    4: lambda attempt, parts: Failed(attempt, parts, Reason.WRITE),
    5: Revoked,
    6: Unproven,
}
"""By kind; the kinds that are left are REGISTERs."""
