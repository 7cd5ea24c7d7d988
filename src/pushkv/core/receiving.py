"""The consumer half of an endpoint: attempts, their members, their budget."""

from __future__ import annotations

import hashlib

from attrs import evolve

from . import consumer as consumer_machine
from . import consumer_actions, rules
from . import request as request_machine
from .consumer import Consumer, ConsumerStatus
from .consumer_table import CONSUMER
from .effects import (
    BlocksReleased,
    Counted,
    Effect,
    Member,
    MemberFreed,
    MemberTold,
    NotDelivered,
    ProducerAddress,
    Send,
    SuspectLink,
    WithdrawMember,
)
from .errors import LocalProtocolError
from .events import (
    ArrivalSeen,
    Cancelled,
    Offered,
    Proven,
    Readmitted,
    TakenBack,
    Tick,
    Withdrawn,
    WriterGone,
)
from .ids import AttemptId, Duration, Instant, TransferId, Worker, block_count
from .links import LinkLost, LinkReady, LinkRefused, Links
from .machines import Machines, Store
from .messages import (
    AttemptMessage,
    Complete,
    Failed,
    Progress,
    Reason,
    Received,
    Register,
    Registered,
    Revoked,
    Unproven,
)
from .request import REQUEST, Request, RequestStatus

__all__ = ["Receiving"]

RequestKey = tuple[TransferId, int]
TO_CONSUMER = (Registered, Progress, Complete, Failed, Revoked, Unproven)


def _mark(marked: set[AttemptId], attempt: AttemptId, belongs: bool) -> None:
    if belongs:
        marked.add(attempt)
    else:
        marked.discard(attempt)


class Receiving:
    """Everything one endpoint does as a consumer."""

    def __init__(
        self,
        me: Worker,
        machines: Machines,
        links: Links,
        layout_digest: bytes,
        secret: bytes,
        started_at: Instant,
    ) -> None:
        self.consumers: Store[AttemptId, Consumer] = Store(CONSUMER, {})
        self.requests: Store[RequestKey, Request] = Store(REQUEST, {})
        self.exposed_blocks: int = 0
        """Blocks of attempts that are not released; within the budget."""
        self.budget_spent: bool = False
        """An offer was refused for the budget, and no blocks have come back since."""
        self._me = me
        self._machines = machines
        self._links = links
        self._layout_digest = layout_digest
        self._secret = secret
        grace = rules.restart_grace(machines.rules.policy.lease, machines.rules.capabilities)
        self._ready_at = Instant(started_at + grace)
        self._latest: dict[TransferId, int] = {}
        self._by_link: dict[ProducerAddress, dict[AttemptId, None]] = {}
        self._address: dict[AttemptId, ProducerAddress] = {}
        self._attempt_max = -1
        self._blocks: dict[RequestKey, int] = {}
        self.settling: set[AttemptId] = set()
        """Attempts whose verdict waits for arrivals."""
        self.quarantined: set[AttemptId] = set()
        """Attempts whose blocks may be written although the outcome is told."""

    @property
    def ready_at(self) -> Instant:
        """R13: before this the engine must hand out no block of registered memory to anybody."""
        return self._ready_at

    def quarantined_blocks(self) -> int:
        """Blocks of attempts that only a proof ends; they are exposed, too."""
        requests = {(each.transfer, each.attempt) for each in self.quarantined}
        return sum(self._blocks.get(each, 0) for each in requests)

    def is_live(self, transfer: TransferId) -> bool:
        """Whether the latest attempt of this transfer is not over."""
        return transfer in self._latest

    def quarantined_writers(self) -> frozenset[Worker]:
        """The producers whose certain death would end a quarantine."""
        producers = (self.consumers.states[each].producer for each in self.quarantined)
        return frozenset(each for each in producers if each is not None)

    # -- the engine

    def offered(self, event: Offered, now: Instant) -> list[Effect]:
        """Register blocks, unless the budget or a live attempt says no; then both reports at once.

        Raises:
            LocalProtocolError: The attempt number was used before, or the event contradicts itself.
        """
        if event.attempt <= self._attempt_max:
            raise LocalProtocolError(
                f"attempt {event.attempt} of transfer {event.transfer!r}: numbers above "
                f"{self._attempt_max} only, each used once (R9)"
            )
        ranks = tuple(sorted({address.rank for address in event.producers}))
        if not ranks or len(ranks) < len(event.producers):
            raise LocalProtocolError(
                f"transfer {event.transfer!r}: producers = {event.producers}: expected one "
                "address per producer rank"
            )
        if not 0 <= event.start <= event.end or self._me.rank not in event.consumer_ranks:
            raise LocalProtocolError(
                f"transfer {event.transfer!r}: tokens [{event.start}, {event.end}) at consumer "
                f"ranks {event.consumer_ranks}, of which this is {self._me.rank}"
            )
        served = event.served or (event.consumer_ranks,) * len(event.producers)
        if len(served) != len(event.producers) or any(self._me.rank not in each for each in served):
            raise LocalProtocolError(
                f"transfer {event.transfer!r}: served = {event.served}: expected for each producer "
                f"the consumer ranks that it serves, of which this is {self._me.rank}"
            )
        self._attempt_max = event.attempt
        reason = self._refusal(event, now)
        if reason is not None:
            return [
                NotDelivered(event.transfer, event.attempt, reason, False),
                BlocksReleased(event.transfer, event.attempt),
            ]
        members = tuple(Member(self._me.rank, rank) for rank in ranks)
        out = self._supersede(event.transfer, now)
        request = request_machine.gather(event.transfer, event.attempt, members, event.failures)
        self._machines.put(self.requests, (event.transfer, event.attempt), request)
        self._latest[event.transfer] = event.attempt
        self._blocks[event.transfer, event.attempt] = block_count(event.blocks)
        self.exposed_blocks += block_count(event.blocks)
        attempts = [self._attempt(event, address.rank) for address in event.producers]
        for attempt, address, each in zip(attempts, event.producers, served, strict=True):
            out += self._register(evolve(event, consumer_ranks=each), attempt, address, ranks, now)
        for attempt in attempts:
            out += self._hand_over(attempt, now)
        return out

    def _supersede(self, transfer: TransferId, now: Instant) -> list[Effect]:
        """The engine did not wait for `RetryDue`: it is not told of it later."""
        key = (transfer, self._latest.get(transfer, -1))
        if key not in self.requests.states:
            return []
        return self._step_request(key, Cancelled(transfer), now)

    def _attempt(self, event: Offered, producer_rank: int) -> AttemptId:
        me = self._me
        return AttemptId(
            me.engine, me.incarnation, me.rank, producer_rank, event.transfer, event.attempt
        )

    def _refusal(self, event: Offered, now: Instant) -> Reason | None:
        policy = self._machines.rules.policy
        latest = self.requests.states.get((event.transfer, self._latest.get(event.transfer, -1)))
        if latest is not None and latest.status is RequestStatus.RECEIVING:
            return Reason.DUPLICATE
        if now < self._ready_at:
            return Reason.STARTING
        if len(self.requests.states) >= policy.transfers:
            return Reason.FULL
        if self.exposed_blocks + block_count(event.blocks) > policy.exposed_blocks:
            self.budget_spent = True
            return Reason.BUDGET
        return None

    def _register(
        self,
        event: Offered,
        attempt: AttemptId,
        address: ProducerAddress,
        ranks: tuple[int, ...],
        now: Instant,
    ) -> list[Effect]:
        """One member's machine; all of them stand before the first can fail (R12)."""
        register = Register(
            attempt=attempt,
            blocks=event.blocks,
            start=event.start,
            end=event.end,
            prompt_digest=event.prompt_digest,
            layout_digest=self._layout_digest,
            producer_ranks=ranks,
            consumer_ranks=event.consumer_ranks,
            arrival_token=self._token(attempt),
            deadline=Duration(self._machines.rules.policy.waiting),
        )
        state, effects = consumer_actions.offer(register, now, self._machines.rules)
        self._machines.put(self.consumers, attempt, state)
        self._address[attempt] = address
        self._by_link.setdefault(address, {})[attempt] = None
        return self._carry(attempt, effects, now)

    def _hand_over(self, attempt: AttemptId, now: Instant) -> list[Effect]:
        """Register over the link, or ask for one; a sibling may have ended this member already."""
        address = self._address.get(attempt)
        if address is None:
            return []
        out = self._links.want(address, now)
        up = self._links.up(address)
        if up is not None:
            out += self._link_ready(attempt, LinkReady(address, up), now)
        return out

    def _token(self, attempt: AttemptId) -> int:
        """A number that only the producer this attempt is registered with is told (R10)."""
        named = repr(attempt).encode()
        return int.from_bytes(hashlib.blake2b(named, key=self._secret, digest_size=7).digest())

    def cancelled(self, event: Cancelled, now: Instant) -> list[Effect]:
        """The engine gives a transfer up; unknown ones are counted."""
        return self._engine(event.transfer, event, now)

    def taken_back(self, event: TakenBack | Readmitted, now: Instant) -> list[Effect]:
        """The engine preempts, or admits again."""
        return self._engine(event.transfer, event, now)

    def _engine(self, transfer: TransferId, event: object, now: Instant) -> list[Effect]:
        key = (transfer, self._latest.get(transfer, -1))
        if key not in self.requests.states:
            return [Counted("unknown_transfer", type(event).__name__)]
        return self._step_request(key, event, now)

    # -- links

    def link_news(self, news: LinkReady | LinkLost | LinkRefused, now: Instant) -> list[Effect]:
        """Tell every attempt of that link."""
        out: list[Effect] = []
        if not isinstance(news.key, ProducerAddress):
            return out
        for attempt in list(self._by_link.get(news.key, ())):
            if isinstance(news, LinkReady):
                out += self._link_ready(attempt, news, now)
            elif isinstance(news, LinkLost):
                out += self._step(attempt, news.down, now)
            elif self.consumers.states[attempt].epoch is None:
                out += self._step(attempt, Withdrawn(Reason.REFUSED), now)
        return out

    def _link_ready(self, attempt: AttemptId, ready: LinkReady, now: Instant) -> list[Effect]:
        expected = self._address[attempt].engine
        unsent = self.consumers.states[attempt].epoch is None
        if unsent and expected and expected != ready.up.peer.engine:
            return self._step(attempt, Withdrawn(Reason.ADDRESS), now)
        if unsent and self._address[attempt].rank != ready.up.peer.rank:
            return self._step(attempt, Withdrawn(Reason.ADDRESS), now)
        return self._step(attempt, ready.up, now)

    # -- the peer, the transport, proofs, time

    def message(self, peer: Worker, message: AttemptMessage, now: Instant) -> list[Effect]:
        """R9: the whole name is compared before anything else."""
        if not isinstance(message, TO_CONSUMER):
            return [Counted("not_for_a_consumer", type(message).__name__)]
        attempt = message.attempt
        mine = (attempt.consumer, attempt.consumer_incarnation, attempt.consumer_rank)
        if mine != (self._me.engine, self._me.incarnation, self._me.rank):
            return [Counted("fenced", type(message).__name__)]
        if attempt.producer_rank != peer.rank:
            return [Counted("fenced", type(message).__name__)]
        state = self.consumers.states.get(attempt)
        if state is None:
            verdict = not isinstance(message, Registered | Progress)
            answer: list[Effect] = [Counted("late", type(message).__name__)]
            return [*answer, Send(Received(attempt))] if verdict else answer
        if state.producer != peer:
            return [Counted("fenced", type(message).__name__)]
        return self._step(attempt, message, now)

    def arrival(self, event: ArrivalSeen, now: Instant) -> list[Effect]:
        """An arrival names its attempt in full; links do not matter to it."""
        if event.attempt not in self.consumers.states:
            return [Counted("late", "ArrivalSeen")]
        return self._step(event.attempt, event, now)

    def proof(self, event: WriterGone | Proven, now: Instant) -> list[Effect]:
        """A proof that quarantined blocks are safe."""
        out: list[Effect] = []
        for attempt in list(self.consumers.states):
            if isinstance(event, WriterGone) or attempt.transfer == event.transfer:
                out += self._step(attempt, event, now)
        return out

    def tick(self, kind: str, key: object, now: Instant) -> list[Effect]:
        """Time has passed for one machine of ours."""
        if kind == CONSUMER.name and key in self.consumers.states:
            assert isinstance(key, AttemptId)
            out = self._step(key, Tick(), now)
            self._machines.look_again(self.consumers, key, now)
            return out
        if kind == REQUEST.name and key in self.requests.states:
            request: RequestKey = key
            out = self._step_request(request, Tick(), now)
            self._machines.look_again(self.requests, request, now)
            return out
        return []

    # -- inside

    def _step(self, attempt: AttemptId, event: object, now: Instant) -> list[Effect]:
        if attempt not in self.consumers.states:
            return []
        effects = self._machines.step(self.consumers, attempt, event, now)
        return self._carry(attempt, effects, now)

    def _carry(self, attempt: AttemptId, effects: tuple[Effect, ...], now: Instant) -> list[Effect]:
        """Effects of one member: to its link, or to its request."""
        out: list[Effect] = []
        request = (attempt.transfer, attempt.attempt)
        for effect in effects:
            if isinstance(effect, Send):
                out.append(self._links.send(self._address[attempt], effect.message))
            elif isinstance(effect, SuspectLink):
                out += self._links.doubt(self._address[attempt], now)
            elif isinstance(effect, Counted):
                out.append(effect)
            else:
                assert isinstance(effect, MemberTold | MemberFreed)
                out += self._step_request(request, effect, now)
        state = self.consumers.states.get(attempt)
        if state is None:
            return out
        if consumer_machine.is_terminal(state):
            self._forget(attempt, now, out)
            return out
        _mark(self.settling, attempt, consumer_machine.awaits_arrivals(state))
        _mark(self.quarantined, attempt, state.status is ConsumerStatus.QUARANTINED)
        return out

    def _forget(self, attempt: AttemptId, now: Instant, out: list[Effect]) -> None:
        self._machines.drop(self.consumers, attempt)
        self.settling.discard(attempt)
        self.quarantined.discard(attempt)
        address = self._address.pop(attempt)
        of_link = self._by_link[address]
        del of_link[attempt]
        if not of_link:
            del self._by_link[address]
            out += self._links.unwant(address, now)

    def _step_request(self, key: RequestKey, event: object, now: Instant) -> list[Effect]:
        out: list[Effect] = []
        for effect in self._machines.step(self.requests, key, event, now):
            if isinstance(effect, WithdrawMember):
                attempt = AttemptId(
                    self._me.engine,
                    self._me.incarnation,
                    effect.member.consumer_rank,
                    effect.member.producer_rank,
                    key[0],
                    key[1],
                )
                out += self._step(attempt, Withdrawn(effect.reason), now)
            else:
                if isinstance(effect, BlocksReleased):
                    self.exposed_blocks -= self._blocks.pop(key)
                    self.budget_spent = False
                out.append(effect)
        state = self.requests.states.get(key)
        if state is not None and request_machine.is_terminal(state):
            self._machines.drop(self.requests, key)
            if self._latest.get(key[0]) == key[1]:
                del self._latest[key[0]]
        return out
