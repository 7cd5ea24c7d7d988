"""The producer half of an endpoint: transfers, the ranks they serve, their memory."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from . import producer as producer_machine
from .effects import (
    Counted,
    Effect,
    LinkDown,
    PostWrite,
    Send,
    SourceFreed,
    SourceReleased,
    WithdrawWrites,
)
from .errors import LocalProtocolError
from .events import (
    Arrived,
    Computed,
    Permitted,
    PrefillAborted,
    PrefillPreempted,
    ProducerEvent,
    Proven,
    RegistrationReceived,
    Tick,
    WriteClosed,
    WriteDone,
    WriteFailed,
    WriteRefused,
    WriterGone,
    WriteUnknown,
)
from .ids import AttemptId, Instant, TransferId, Worker, block_count
from .links import LinkLost, Links, PermitFresh
from .machines import Machines, Store
from .messages import (
    Failed,
    Query,
    Reason,
    Received,
    Revoke,
    Revoked,
    Unproven,
)
from .producer import Producer, ProducerStatus
from .producer_table import PRODUCER

__all__ = ["ProducerKey", "Sending"]

ProducerKey = tuple[TransferId, int]
CLOSING: dict[str, type[WriteDone | WriteFailed | WriteRefused | WriteUnknown]] = {
    "done": WriteDone,
    "failed": WriteFailed,
    "refused": WriteRefused,
    "unknown": WriteUnknown,
}


@define
class _Source:
    """One transfer's source blocks, and the consumer ranks that may be served from them (R12).

    Attributes:
        said: What the engine has said, and when, for ranks that are heard of later.
        ranks: The ranks that were told; the source is free when all of them are.
        expected: The ranks that the last accepted REGISTER named; none so far if empty.
        freed: Those that need it no more.
        pinned: How many blocks its finished prefill pins.
        reason: Why it was given up.
    """

    said: list[tuple[ProducerEvent, Instant]]
    ranks: set[int] = field(factory=set)
    expected: set[int] = field(factory=set)
    freed: set[int] = field(factory=set)
    pinned: int = 0
    reason: Reason | None = None


class Sending:
    """Everything one endpoint does as a producer."""

    def __init__(self, me: Worker, machines: Machines, links: Links, layout_digest: bytes) -> None:
        self.producers: Store[ProducerKey, Producer] = Store(PRODUCER, {})
        self._me = me
        self._machines = machines
        self._links = links
        self._layout_digest = layout_digest
        self.pinned_blocks: int = 0
        self._sources: dict[TransferId, _Source] = {}
        self._ranks: dict[TransferId, tuple[int, ...]] = {}
        self._served: dict[Worker, dict[ProducerKey, None]] = {}
        self._over: dict[ProducerKey, None] = {}
        self._past: dict[ProducerKey, None] = {}
        self._floors: dict[Worker, int] = {}

    def transfers(self) -> tuple[TransferId, ...]:
        """The transfers whose source blocks are not released yet."""
        return tuple(self._sources)

    @property
    def live(self) -> int:
        """Transfers that are not over, over all consumer ranks."""
        return len(self.producers.states) - len(self._over) - len(self._past)

    def holds(self, transfer: TransferId) -> bool:
        """Whether the source blocks of this transfer are not released yet."""
        return transfer in self._sources

    def writes_to(self, consumer: Worker) -> bool:
        """Whether a WRITE to this consumer is open, or of unknown outcome."""
        states = (self.producers.states[key] for key in self._served.get(consumer, ()))
        return any(each.open or each.unknown for each in states)

    def doubted(self) -> list[tuple[Worker, ProducerKey]]:
        """The transfers of whose WRITEs some are of unknown outcome, and whom they are for."""
        states = self.producers.states
        return [
            (worker, key)
            for worker, served in self._served.items()
            for key in served
            if states[key].unknown
        ]

    def doubted_consumers(self) -> frozenset[Worker]:
        """The consumers whose certain death would free a source (R14)."""
        return frozenset(worker for worker, _ in self.doubted())

    # -- the engine

    def engine(self, event: ProducerEvent, now: Instant) -> list[Effect]:
        """The engine's prefill has moved; every consumer rank of the transfer hears of it."""
        transfer = event.transfer
        if isinstance(event, Arrived):
            return self._arrived(event, now)
        source = self._sources.get(transfer)
        if source is None:
            return [Counted("unknown_transfer", type(event).__name__)]
        if isinstance(event, PrefillAborted):
            source.reason = event.reason
        if isinstance(event, Computed | PrefillPreempted):
            source.said = source.said[:1]
        source.said.append((event, now))
        out: list[Effect] = []
        if isinstance(event, Computed) and event.final and not source.pinned:
            source.pinned = block_count(event.blocks)
            self.pinned_blocks += source.pinned
        for rank in sorted(source.ranks):
            out += self._step((transfer, rank), event, now)
        return out + self._make_room(transfer, now)

    def _make_room(self, latest: TransferId, now: Instant) -> list[Effect]:
        """Pinned sources have a budget of their own; the latest and what is served stay anyway."""
        out: list[Effect] = []
        while self.pinned_blocks > self._machines.rules.policy.pinned_blocks:
            held = (each for each in self._sources if each != latest and self._held(each))
            oldest = next(held, None)
            if oldest is None:
                break
            out.append(Counted("source_given_up", oldest))
            out += self.engine(PrefillAborted(oldest, Reason.BUDGET), now)
        return out

    def _held(self, transfer: TransferId) -> bool:
        source = self._sources[transfer]
        return source.pinned > 0 and not any(
            self._serves((transfer, each)) for each in source.ranks
        )

    def _arrived(self, event: Arrived, now: Instant) -> list[Effect]:
        if event.transfer in self._sources:
            return [Counted("duplicate_request", event.transfer)]
        self._sources[event.transfer] = _Source([(event, now)])
        waiting = {self._me.rank}
        for rank in self._ranks.get(event.transfer, ()):
            registration = self.producers.states[event.transfer, rank].registration
            if registration is not None:
                waiting = {rank, *registration.register.consumer_ranks}
                self._sources[event.transfer].expected = waiting
        return self._tell(event.transfer, waiting)

    def _tell(self, transfer: TransferId, ranks: Iterable[int]) -> list[Effect]:
        """Ranks not told yet hear what the engine has said, as of when it said so (I7).

        So a rank that registers late, or never, is bound by the one hold time of the transfer.
        """
        source = self._sources[transfer]
        new = sorted(set(ranks) - source.ranks)
        source.ranks.update(new)
        out: list[Effect] = []
        for rank in new:
            self._create((transfer, rank))
            for event, at in source.said:
                out += self._step((transfer, rank), event, at)
        return out

    # -- the consumer

    def message(
        self, peer: Worker, news: RegistrationReceived | Query | Revoke | Received, now: Instant
    ) -> list[Effect]:
        """R9: the whole name is compared before anything else."""
        attempt = news.register.attempt if isinstance(news, RegistrationReceived) else news.attempt
        named = Worker(attempt.consumer, attempt.consumer_incarnation, attempt.consumer_rank)
        if named != peer or attempt.producer_rank != self._me.rank:
            return [Counted("fenced", type(news).__name__)]
        key = (attempt.transfer, attempt.consumer_rank)
        if attempt.attempt <= self._floors.get(peer, -1) and not self._knows(key, attempt):
            return self._forgotten(attempt, news)
        if isinstance(news, RegistrationReceived):
            if news.register.layout_digest != self._layout_digest:
                return [Send(Failed(attempt, (), Reason.LAYOUT))]
            return self._register(key, news, now)
        if isinstance(news, Received) and key not in self.producers.states:
            return [Counted("late", "Received")]
        self._create(key)
        return self._step(key, news, now)

    def _register(self, key: ProducerKey, news: RegistrationReceived, now: Instant) -> list[Effect]:
        transfer, rank = key
        out: list[Effect] = []
        if key not in self.producers.states and self.live >= self._machines.rules.policy.transfers:
            return [Counted("registration_must_wait", "too many transfers")]
        if transfer in self._sources:
            out += self._tell(transfer, [rank])
        self._create(key)
        out += self._step(key, news, now)
        if transfer in self._sources:
            if self._serves(key):
                self._sources[transfer].expected = {rank, *news.register.consumer_ranks}
                out += self._tell(transfer, news.register.consumer_ranks)
            out += self._dismiss(transfer, now)
        return out

    def _knows(self, key: ProducerKey, attempt: AttemptId) -> bool:
        """Whether the attempt is served or remembered by name."""
        state = self.producers.states.get(key)
        if state is None:
            return False
        served = state.registration is not None and state.registration.register.attempt == attempt
        return served or any(verdict.attempt == attempt for verdict in state.ended)

    def _serves(self, key: ProducerKey) -> bool:
        state = self.producers.states.get(key)
        return state is not None and state.registration is not None

    def _dismiss(self, transfer: TransferId, now: Instant) -> list[Effect]:
        """Ranks that nobody expects are served nothing, once those that are expected are known."""
        source = self._sources[transfer]
        if not source.expected:
            return []
        strangers = source.ranks - source.freed - source.expected
        out: list[Effect] = []
        for rank in sorted(strangers):
            if not self._serves((transfer, rank)):
                out += self._step((transfer, rank), PrefillAborted(transfer, Reason.GONE), now)
        return out

    def _forgotten(self, attempt: AttemptId, news: object) -> list[Effect]:
        """R7: what had to be forgotten is never served, and claimed only as far as it is known."""
        if isinstance(news, Received):
            return [Counted("late", "Received")]
        if not self._machines.rules.capabilities.done_means_visible:
            return [Send(Unproven(attempt, ()))]
        if isinstance(news, Revoke):
            return [Send(Revoked(attempt, ()))]
        return [Send(Failed(attempt, (), Reason.UNKNOWN))]

    # -- links, the transport, proofs, time

    def link_news(self, news: LinkLost | PermitFresh, now: Instant) -> list[Effect]:
        """Tell every transfer that serves this consumer."""
        event: LinkDown | Permitted
        if isinstance(news, LinkLost):
            worker, event = news.down.peer, news.down
        else:
            worker, event = news.worker, Permitted(news.epoch)
        out: list[Effect] = []
        for key in list(self._served.get(worker, ())):
            out += self._step(key, event, now)
        return out

    def closed(self, event: WriteClosed, now: Instant) -> list[Effect]:
        """A WRITE is over, refused, or of unknown outcome."""
        what = CLOSING.get(event.outcome)
        if what is None:
            raise LocalProtocolError(f"outcome = {event.outcome!r}: expected {sorted(CLOSING)}")
        key = (event.attempt.transfer, event.attempt.consumer_rank)
        if key not in self.producers.states:
            return [Counted("stale_completion")]
        closed = what(event.attempt, event.part)
        if isinstance(closed, WriteUnknown):
            closed = WriteUnknown(event.attempt, event.part, event.source_idle)
        out = self._step(key, closed, now)
        if event.outcome != "done":
            out.append(Counted(f"write_{event.outcome}", event.cause))
        return out

    def proof(self, event: WriterGone | Proven, now: Instant) -> list[Effect]:
        """A proof that WRITEs of unknown outcome are over."""
        out: list[Effect] = []
        for key in list(self.producers.states):
            if isinstance(event, WriterGone) or key[0] == event.transfer:
                out += self._step(key, event, now)
        return out

    def tick(self, key: ProducerKey, now: Instant) -> list[Effect]:
        """Time has passed for one transfer."""
        if key not in self.producers.states:
            return []
        out = self._step(key, Tick(), now)
        self._machines.look_again(self.producers, key, now)
        return out

    # -- inside

    def _create(self, key: ProducerKey) -> bool:
        if key in self.producers.states:
            return False
        transfer, rank = key
        self._machines.put(self.producers, key, producer_machine.produce(transfer, rank))
        self._ranks[transfer] = tuple(sorted({*self._ranks.get(transfer, ()), rank}))
        return True

    def _step(self, key: ProducerKey, event: object, now: Instant) -> list[Effect]:
        if key not in self.producers.states:
            return []  # forgotten for the bound, in the step of another that heard of this first
        before = self.producers.states[key].registration
        effects = self._machines.step(self.producers, key, event, now)
        state = self.producers.states[key]
        if state.registration is not before:
            if before is not None:
                served = self._served[before.consumer]
                served.pop(key, None)
                if not served:
                    del self._served[before.consumer]
            if state.registration is not None:
                self._served.setdefault(state.registration.consumer, {})[key] = None
        out = self._carry(key, effects)
        self._keep_or_forget(key, state)
        return out

    def _carry(self, key: ProducerKey, effects: tuple[Effect, ...]) -> list[Effect]:
        """Effects of one transfer: to its consumer's link, or to the engine."""
        out: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Send):
                attempt = effect.message.attempt
                consumer = Worker(
                    attempt.consumer, attempt.consumer_incarnation, attempt.consumer_rank
                )
                out.append(self._links.send(consumer, effect.message))
            elif isinstance(effect, SourceFreed):
                out += self._freed(effect)
            else:
                assert isinstance(effect, PostWrite | WithdrawWrites | Counted)
                out.append(effect)
        return out

    def _freed(self, effect: SourceFreed) -> list[Effect]:
        """R12: the source is free when every rank that may be served from it has ended."""
        source = self._sources.get(effect.transfer)
        if source is None:
            return []
        source.freed.add(effect.consumer_rank)
        if not source.freed.issuperset(source.ranks):
            return []
        del self._sources[effect.transfer]
        self.pinned_blocks -= source.pinned
        state = self.producers.states[effect.transfer, effect.consumer_rank]
        reason = source.reason
        if reason is None and state.status is ProducerStatus.EXPIRED:
            reason = Reason.EXPIRED
        return [SourceReleased(effect.transfer, reason)]

    def _keep_or_forget(self, key: ProducerKey, state: Producer) -> None:
        """R7: what is over is remembered until RECEIVED; beyond the bound, by its number alone.

        Beside those, how the latest transfers of our own ended, to tell whoever asks late.
        """
        if state.idle:
            self._drop(key)
            return
        over = producer_machine.is_over(state)
        memory, other = (self._over, self._past) if state.ended else (self._past, self._over)
        other.pop(key, None)
        if not over:
            memory.pop(key, None)
            return
        memory.setdefault(key)
        if len(memory) > self._machines.rules.policy.remembered:
            self._forget(next(iter(memory)))

    def _forget(self, key: ProducerKey) -> None:
        for verdict in self.producers.states[key].ended:
            attempt = verdict.attempt
            worker = Worker(attempt.consumer, attempt.consumer_incarnation, attempt.consumer_rank)
            self._floors[worker] = max(self._floors.get(worker, -1), attempt.attempt)
        source = self._sources.get(key[0])
        if source is not None:
            # Other ranks still need the source: this one, should it come back, is a new one.
            source.ranks.discard(key[1])
            source.freed.discard(key[1])
        self._drop(key)

    def _drop(self, key: ProducerKey) -> None:
        self._machines.drop(self.producers, key)
        self._over.pop(key, None)
        self._past.pop(key, None)
        left = tuple(rank for rank in self._ranks[key[0]] if rank != key[1])
        if left:
            self._ranks[key[0]] = left
        else:
            del self._ranks[key[0]]
