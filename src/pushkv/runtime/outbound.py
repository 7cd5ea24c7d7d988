"""From the core's PostWrite to the transport's Write: turns, peers, permits, addresses."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

from attrs import define, evolve, field

from pushkv.block_map import block_map, check_pair, regions_in_order
from pushkv.core.effects import (
    PeerJoined,
    PermitEnded,
    PermitGranted,
    PostWrite,
    WithdrawWrites,
)
from pushkv.core.errors import PushKVError, RemoteProtocolError
from pushkv.core.events import (
    Computed,
    Event,
    MessageReceived,
    PrefillPreempted,
    WriteClosed,
)
from pushkv.core.ids import AttemptId, Epoch, Instant, TransferId, Worker
from pushkv.core.messages import Hello, Message, Register
from pushkv.layout import CacheLayout, join_memory, split_memory
from pushkv.transport import Completion, Permit, Transport, Write, WriteOutcome

from .steps import Gate, Share, Shares, Step, Steps
from .turns import Turns

__all__ = ["Outbound"]

log: logging.Logger = logging.getLogger("pushkv.runtime")

OTHER_LAYOUT = b""
"""The digest of no layout."""


_Key = tuple[AttemptId, int]


@define
class _Open:
    """A WRITE that has not been reported.

    Attributes:
        consumer: Whose it is.
        length_bytes: What it counts in the budget, once it is posted.
        gate: What it waits for, if a step of the engine still computes it.
    """

    consumer: Worker
    length_bytes: int = 0
    gate: Gate | None = None


@define
class _Peer:
    """A consumer; `layout` is None while nothing it said of its memory could be used."""

    layout: CacheLayout | None = None
    links: int = 0
    open: int = 0


@define
class _Reads:
    """WRITEs that read a transfer's source: those that may, and those a preemption waits for."""

    unknown: set[_Key] = field(factory=set)
    preemptions: list[set[_Key]] = field(factory=list)


class Outbound:
    """Everything this end WRITEs. Owned by the runtime's thread.

    A peer is known to the transport while it has a link or an open WRITE, and forgotten after:
    what a transport keeps for a peer is not small (NIXL over UCX: connections and descriptors).
    """

    def __init__(
        self,
        layout: CacheLayout,
        transport: Transport,
        budget_bytes: int,
        steps: Steps,
        closed: Callable[[WriteClosed], None],
        clock: Callable[[], int],
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._closed = closed
        self._clock = clock
        self._turns = Turns(budget_bytes)
        self._steps = steps
        self._running: dict[TransferId, list[tuple[int, Step]]] = {}
        self._shares = Shares()
        self._held: list[Share] = []
        self._peers: dict[Worker, _Peer] = {}
        self._permits: dict[Epoch, Permit] = {}
        self._open: dict[_Key, _Open] = {}
        self._reads: dict[TransferId, _Reads] = {}
        self._yielded: deque[TransferId] = deque()

    @property
    def open_writes(self) -> int:
        """WRITEs ordered and not completed."""
        return len(self._open)

    def current(self, message: Message) -> Message:
        """A message as it is to be sent: HELLO tells of our memory what the transport says now."""
        if not isinstance(message, Hello) or not message.memory:
            return message
        return evolve(message, memory=join_memory(self._layout, self._transport.memory()))

    def read(self, event: Event) -> Event:
        """`event` as the core is to see it.

        A REGISTER whose ranks are not those of the plan was made for another layout than we have,
        and is refused like one (a consumer that waits for too few ranks would miss bytes).
        """
        if isinstance(event, Computed | PrefillPreempted):
            self._computes(event)
        if not isinstance(event, MessageReceived) or not isinstance(event.message, Register):
            return event
        register = event.message
        attempt = register.attempt
        worker = Worker(attempt.consumer, attempt.consumer_incarnation, attempt.consumer_rank)
        peer = self._peers.get(worker)
        if peer is None or peer.layout is None or self._agrees(register, peer.layout):
            return event
        return evolve(event, message=evolve(register, layout_digest=OTHER_LAYOUT))

    def _computes(self, event: Computed | PrefillPreempted) -> None:
        """Which steps still compute how much of a prompt, in this life of its request."""
        if isinstance(event, PrefillPreempted) or not event.step:
            self._running.pop(event.transfer, None)
            return
        running = self._running.setdefault(event.transfer, [])
        running.append((event.tokens, self._steps[event.step]))
        while running and running[0][1].is_over:
            del running[0]

    def _gate(self, effect: PostWrite) -> Gate | None:
        for tokens, step in self._running.get(effect.attempt.transfer, ()):
            if tokens >= effect.part.end:
                return None if step.is_over else Gate(step)
        return None

    def _agrees(self, register: Register, consumer: CacheLayout) -> bool:
        if self._layout.ranks.count == consumer.ranks.count == 1:
            return True
        plan = self._layout.plan_to(consumer)
        rank = register.attempt.consumer_rank
        return (
            rank == consumer.rank
            and register.producer_ranks == plan.producers_of(rank)
            and register.consumer_ranks == plan.consumers_of(self._layout.rank)
        )

    def joined(self, effect: PeerJoined) -> None:
        """A consumer's memory is known; it may be one we know already, over a newer link."""
        peer = self._peers.setdefault(effect.peer, _Peer())
        peer.links += 1
        try:
            layout, memory = split_memory(effect.hello.memory)
            if layout.description() != effect.hello.layout:
                raise RemoteProtocolError("hello.memory", "another layout", "hello.layout")
            check_pair(self._layout, layout)
        except PushKVError as error:
            log.warning("memory of %s cannot be used: %s", effect.peer.engine, error)
            return
        peer.layout = layout
        self._transport.add_peer(effect.peer, memory)

    def granted(self, effect: PermitGranted) -> None:
        """R4: the permit of this link runs until then."""
        self._permits.setdefault(effect.epoch, Permit()).until_ns = effect.until

    def permit_until(self, epoch: Epoch) -> Instant | None:
        """When the permit of this link ends; None where it was never granted one."""
        permit = self._permits.get(epoch)
        return None if permit is None else Instant(permit.until_ns)

    def ended(self, effect: PermitEnded) -> None:
        """R11: whatever is still on its way to the transport is refused there."""
        permit = self._permits.pop(effect.epoch, None)
        if permit is not None:
            permit.until_ns = 0
            self._refuse(lambda held: held.permit is permit, "the permit did not last")
        peer = self._peers.get(effect.peer)
        if peer is not None:
            peer.links -= 1
            self._tidy(effect.peer)

    def order(self, effect: PostWrite) -> None:
        """A WRITE waits for its turn; one that cannot be made is over before it began."""
        attempt = effect.attempt
        worker = Worker(attempt.consumer, attempt.consumer_incarnation, attempt.consumer_rank)
        peer = self._peers.get(worker)
        if peer is None or peer.layout is None:
            cause = "unknown peer memory"
            self._closed(WriteClosed(attempt, effect.part.number, "failed", cause))
            return
        gate = self._gate(effect)
        self._open[attempt, effect.part.number] = _Open(worker, gate=gate)
        peer.open += 1
        self._turns.wait(worker, effect)

    def withdraw(self, effect: WithdrawWrites) -> None:
        """What waits of an attempt is over: nothing of it was posted, or nothing more will be."""
        attempt = effect.attempt
        worker = Worker(attempt.consumer, attempt.consumer_incarnation, attempt.consumer_rank)
        for write in self._turns.withdraw(worker, attempt):
            self._end(write, WriteOutcome.REFUSED, "it was withdrawn before its turn")
        for (each, _), ordered in self._open.items():
            if each == attempt and ordered.gate is not None:
                ordered.gate.is_withdrawn = True
        self._refuse(lambda held: held.attempt == attempt, "it was withdrawn while its step ran")

    def post_computed(self) -> None:
        """Post what the engine has computed, or queued on its device, since it was asked last."""
        if not self._held:
            return
        now, capabilities = Instant(self._clock()), self._transport.capabilities
        self._refuse(
            lambda held: not held.permit.allows(now, capabilities), "the permit did not last"
        )
        held, self._held = self._held, []
        for share in held:
            write = share.due()
            if write is None:
                self._held.append(share)
            else:
                self._transport.post(write)

    def _refuse(self, chosen: Callable[[Write], bool], cause: str) -> None:
        """What waits for its step and is chosen is over: nothing of it was posted."""
        refused = [share.write for share in self._held if chosen(share.write)]
        self._held = [share for share in self._held if not chosen(share.write)]
        for write in refused:
            ended = Completion(write.attempt, write.part, WriteOutcome.REFUSED, cause=cause)
            whole = self.whole(ended)
            if whole is not None:
                self._closed(self.completed(whole))

    def post(self) -> None:
        """Post what the budget allows."""
        for worker, effect in self._turns.due():
            self._post(worker, effect)

    def _post(self, worker: Worker, effect: PostWrite) -> None:
        layout = self._peers[worker].layout
        if layout is None:
            self._end(effect, WriteOutcome.FAILED, "unknown peer memory")
            return
        try:
            source, destination = block_map(
                self._layout,
                layout,
                effect.source,
                0,
                effect.destination,
                effect.destination_start,
                effect.part.start,
                effect.part.end,
                effect.source_end,
            )
        except PushKVError as error:
            self._end(effect, WriteOutcome.FAILED, str(error))
            return
        if not len(source) and not self._transport.capabilities.done_means_visible:
            cause = "nothing to write, and no arrival would say so"
            self._end(effect, WriteOutcome.FAILED, cause)
            return
        write = Write(
            peer=worker,
            attempt=effect.attempt,
            part=effect.part.number,
            arrival_token=effect.arrival_token,
            source=source,
            destination=destination,
            permit=self._permits.setdefault(effect.epoch, Permit()),
        )
        ordered = self._open[effect.attempt, effect.part.number]
        if ordered.gate is not None and not ordered.gate.step.is_over:
            self._wait_for_step(write, ordered.gate, layout)
            return
        ordered.length_bytes = write.length_bytes
        self._turns.posted(worker, ordered.length_bytes)
        self._transport.post(write)

    def _wait_for_step(self, write: Write, gate: Gate, layout: CacheLayout) -> None:
        """Its layers are posted as the step computes them. What does not exist counts nothing."""
        visible = self._transport.capabilities.done_means_visible
        regions = regions_in_order(self._layout, layout) if visible and len(write.source) else ()
        for share in self._shares.of(write, gate, regions):
            gate.step.await_(share.regions)
            self._held.append(share)
        self.post_computed()

    def _end(self, effect: PostWrite, outcome: WriteOutcome, cause: str) -> None:
        """A WRITE that no transport has heard of is over."""
        ended = Completion(effect.attempt, effect.part.number, outcome, cause=cause)
        self._closed(self.completed(ended))

    def whole(self, completion: Completion) -> Completion | None:
        """What the transport says of a WRITE as it was ordered; None before its last share."""
        return self._shares.whole(completion)

    def completed(self, completion: Completion) -> WriteClosed:
        """A WRITE is over."""
        key = (completion.attempt, completion.part)
        if completion.outcome is WriteOutcome.UNKNOWN and not completion.source_idle:
            self._reads.setdefault(key[0].transfer, _Reads()).unknown.add(key)
        else:
            self._read(key)
        ended = self._open.pop(key, None)
        if ended is not None:
            self._turns.ended(ended.consumer, ended.length_bytes)
            self._peers[ended.consumer].open -= 1
            self._tidy(ended.consumer)
        outcome = str(completion.outcome)
        return WriteClosed(
            completion.attempt,
            completion.part,
            outcome,
            completion.cause,
            completion.source_idle,
        )

    def preempted(self, transfer: TransferId) -> None:
        """The engine wants the source back; `yielded` names it once nothing reads it any more."""
        reads = self._reads.setdefault(transfer, _Reads())
        open_now = {key for key in self._open if key[0].transfer == transfer}
        reads.preemptions.append(open_now | reads.unknown)
        self._settle(transfer)

    def released(self, transfer: TransferId) -> None:
        """Nothing reads it any more, whatever became of it."""
        self._reads.pop(transfer, None)
        self._running.pop(transfer, None)

    def yielded(self) -> Iterator[TransferId]:
        """The transfers whose preempted source nothing reads, once per preemption."""
        while self._yielded:
            yield self._yielded.popleft()

    def _read(self, key: _Key) -> None:
        reads = self._reads.get(key[0].transfer)
        if reads is not None:
            for each in reads.preemptions:
                each.discard(key)
            self._settle(key[0].transfer)

    def _settle(self, transfer: TransferId) -> None:
        reads = self._reads[transfer]
        while reads.preemptions and not reads.preemptions[0]:
            del reads.preemptions[0]
            self._yielded.append(transfer)
        if not reads.preemptions and not reads.unknown:
            del self._reads[transfer]

    def _tidy(self, worker: Worker) -> None:
        peer = self._peers[worker]
        if peer.links == 0 and peer.open == 0:
            del self._peers[worker]
            self._turns.forget(worker)
            if peer.layout is not None:
                self._transport.remove_peer(worker)
