"""The driver: everything that happens goes into one endpoint, and what it wants done is done.

Engine events from the bridge, connections and messages from the channel, completions and arrivals
from the transport, and time all end up here, in order. Between two rings of the bell the loop
sleeps until the endpoint's next deadline; when nothing is outstanding it costs nothing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup
from attrs import evolve

from pushkv.compatibility import compare
from pushkv.core.capabilities import Capabilities
from pushkv.core.effects import (
    Counted,
    Dial,
    Effect,
    Hangup,
    LookForArrivals,
    PeerJoined,
    PermitEnded,
    PermitGranted,
    PostWrite,
    Report,
    SourceReleased,
    SourceYielded,
    Transmit,
    WithdrawWrites,
    WriterJoined,
)
from pushkv.core.endpoint import Endpoint, Identity
from pushkv.core.errors import LocalProtocolError
from pushkv.core.events import (
    ArrivalSeen,
    Arrived,
    Cancelled,
    EngineEvent,
    Event,
    MessageReceived,
    Offered,
    PrefillAborted,
    PrefillPreempted,
    Tick,
)
from pushkv.core.ids import FOREVER, Epoch, Instant, TransferId
from pushkv.core.machines import LifeObserver, StepRecord
from pushkv.core.messages import Reason, Register
from pushkv.core.policy import Policy
from pushkv.core.table import Rules
from pushkv.observe.trace import TraceWriter, this_clock
from pushkv.transport import Completion, Transport, WriteOutcome

from .bridge import Bridge
from .channel import Channel
from .config import RuntimeConfig
from .deaths import Deaths
from .drain import Drain
from .failures import Failures
from .health import Health
from .outbound import Outbound
from .steps import Steps
from .turns import part_tokens
from .wakeup import Wakeup

if TYPE_CHECKING:
    from .admin.ages import Ages

__all__ = ["Loop"]

log: logging.Logger = logging.getLogger("pushkv.runtime")

LOUD = frozenset({"hello_refused", "refused_by_peer", "write_failed", "write_unknown", "fenced"})
"""Causes that an operator should see; the rest is for counters."""


class Loop:
    """Owns one endpoint. All methods belong to the runtime's thread."""

    def __init__(
        self,
        config: RuntimeConfig,
        identity: Identity,
        transport: Transport,
        channel: Channel,
        bridge: Bridge,
        counters: Counter[str],
        failures: Failures,
        deliver: Callable[[Event], None],
        steps: Steps,
        ages: Ages | None = None,
    ) -> None:
        self._engine = config.engine
        self._clock = config.clock
        self._observer = config.observer
        self._transport = transport
        self._channel = channel
        self._bridge = bridge
        self._counters = counters
        self._failures = failures
        self._late: deque[Event] = deque()
        self._quarantined_blocks = 0
        self._unasked: set[TransferId] = set()
        self._outbound = Outbound(
            config.layout,
            transport,
            config.write_budget_bytes,
            steps,
            self._late.append,
            config.clock,
        )
        policy = self._policy = _with_parts(config, transport)
        self._trace: TraceWriter | None = None
        if config.trace_path is not None:
            rules = Rules(policy, transport.capabilities)
            clock = this_clock() if config.clock is time.monotonic_ns else ""
            self._trace = TraceWriter(
                config.trace_path, identity.worker, config.layout, rules, clock
            )
        self._ages = ages
        self._endpoint = Endpoint(
            identity,
            policy,
            transport.capabilities,
            compare,
            Instant(config.clock()),
            self._observe,
            _lives(self._trace, ages, config.lives),
        )
        self.drain: Drain = Drain(self._endpoint)
        self.written_bytes: int = 0
        """By WRITEs that were DONE."""
        self._is_drained = False
        self._is_empty_told = False
        self._deaths: Deaths | None = None
        bound = transport.capabilities.death_bound
        if bound is not None:
            endpoint = self._endpoint
            self._deaths = Deaths(
                bound,
                config.is_gone,
                endpoint.awaited_deaths,
                endpoint.sending.writes_to,
                deliver,
            )

    def serve(self, tasks: TaskGroup) -> None:
        """Watch in `tasks` what is not a socket, until they are cancelled."""
        if self._deaths is not None:
            self._deaths.serve(tasks)

    def health(self) -> Health:
        """The blocks of this moment. Any thread; never blocks."""
        receiving, sending = self._endpoint.receiving, self._endpoint.sending
        return Health(
            is_running=True,
            budget_spent=receiving.budget_spent,
            exposed_blocks=receiving.exposed_blocks,
            exposed_blocks_most=self._policy.exposed_blocks,
            quarantined_blocks=self._quarantined_blocks,
            pinned_blocks=sending.pinned_blocks,
            pinned_blocks_most=self._policy.pinned_blocks,
        )

    @property
    def endpoint(self) -> Endpoint:
        """The machines, to look at."""
        return self._endpoint

    @property
    def capabilities(self) -> Capabilities:
        """What the transport declares."""
        return self._transport.capabilities

    def permit_until(self, epoch: Epoch) -> Instant | None:
        """When the permit of this link of ours ends; None where it has none."""
        return self._outbound.permit_until(epoch)

    async def run(
        self,
        wakeup: Wakeup,
        inbox: deque[Event],
        stopping: Callable[[], float | None],
    ) -> bool:
        """Until stopped; returns whether nothing was left open then."""
        until: float | None = None
        while True:
            wakeup.clear()
            self._follow_drain()
            self._turn(inbox)
            self._say_when_empty()
            self._quarantined_blocks = self._endpoint.receiving.quarantined_blocks()
            if self._trace is not None:
                self._trace.flush()
            timeout_s = stopping()
            if timeout_s is not None:
                if until is None:
                    until = anyio.current_time() + timeout_s
                    self._bridge.close()
                    self._give_up()
                self._refuse_registrations()
                self._take_all(inbox)
                if self._is_empty() or anyio.current_time() >= until:
                    return self._is_empty()
            await self._sleep(wakeup, until)

    async def _sleep(self, wakeup: Wakeup, until: float | None) -> None:
        deadline = self._endpoint.next_deadline()
        wait_s = float("inf") if deadline == FOREVER else (deadline - self._clock()) / 1e9
        if until is not None:
            wait_s = min(wait_s, until - anyio.current_time())
        with anyio.move_on_after(max(wait_s, 0)):
            await wakeup.wait()

    def _turn(self, inbox: deque[Event]) -> None:
        """Everything that has happened so far, and what follows from it at once."""
        self._outbound.post_computed()
        self._take_all(inbox)
        if self._clock() >= self._endpoint.next_deadline():
            self._happen(Tick())
            self._take_all(inbox)

    def _take_all(self, inbox: deque[Event]) -> None:
        busy = True
        while busy:
            busy = False
            for event in self._bridge.events():
                self._submitted(event)
                busy = True
            for source in (inbox, self._late):
                while source:
                    self._received(source.popleft())
                    busy = True
            for news in self._transport.poll():
                busy = True
                if isinstance(news, Completion):
                    self._completed(news)
                else:
                    self._happen(ArrivalSeen(news.attempt, news.part, news.token))

    def _submitted(self, event: EngineEvent) -> None:
        """From the engine; what a drained one no longer takes is answered here."""
        answers = self.drain.answer(event)
        if answers is None:
            self._happen(event)
            return
        if isinstance(event, Offered):
            self._count(Counted("refused_while_drained", f"an offer for {event.transfer}"))
        for report in answers:
            self._report(report)

    def _received(self, event: Event) -> None:
        """From elsewhere; a registration that a drained engine does not serve is answered."""
        self._happen(event)
        if isinstance(event, MessageReceived) and isinstance(event.message, Register):
            attempt = event.message.attempt
            if self.drain.refuses(attempt.transfer):
                self._refuse_registration((attempt.transfer, attempt.consumer_rank))

    def _completed(self, news: Completion) -> None:
        whole = self._outbound.whole(news)
        if whole is None:
            return
        if self._trace is not None:
            self._trace.completion(self._clock(), whole)
        if whole.outcome is WriteOutcome.DONE:
            self.written_bytes += whole.length_bytes
        self._happen(self._outbound.completed(whole))

    def _happen(self, event: Event) -> None:
        """One event; what contradicts the contract is logged and harms nothing else."""
        try:
            effects = self._endpoint.handle(self._outbound.read(event), Instant(self._clock()))
        except LocalProtocolError as error:
            self._counters["local_protocol_error"] += 1
            log.exception("%s was not accepted: %s", type(event).__name__, error)
            return
        for effect in effects:
            self._do(effect)
        self._failures.forget()
        if isinstance(event, PrefillPreempted):
            self._outbound.preempted(event.transfer)
        self._outbound.post()
        for transfer in self._outbound.yielded():
            self._report(SourceYielded(transfer))

    def _observe(self, record: StepRecord) -> None:
        self._failures.observe(record)
        if self._trace is not None:
            self._trace.step(record)
        if self._ages is not None:
            self._ages.step(record)
        if self._observer is not None:
            self._observer(record)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Transmit():
                self._channel.send(effect.connection, self._outbound.current(effect.message))
            case PostWrite():
                self._outbound.order(effect)
            case WithdrawWrites():
                self._outbound.withdraw(effect)
            case PermitGranted():
                self._outbound.granted(effect)
            case PermitEnded():
                self._outbound.ended(effect)
            case PeerJoined():
                self._outbound.joined(effect)
                self._watch(effect)
            case WriterJoined():
                self._watch(effect)
            case Dial():
                self._channel.dial(effect.address)
            case Hangup():
                self._channel.hang_up(effect.connection)
            case LookForArrivals():
                self._transport.look_for_arrivals(effect.active)
            case Counted():
                self._count(effect)
            case _:
                assert isinstance(effect, Report), f"{effect!r} left the endpoint"
                self._report(effect)

    def _report(self, report: Report) -> None:
        """Tell the engine, but for sources that are none of its own."""
        if isinstance(report, SourceReleased):
            self._outbound.released(report.transfer)
        if isinstance(report, SourceReleased) and report.transfer in self._unasked:
            self._unasked.discard(report.transfer)
            return
        self._failures.report(report, self._bridge.offer(report))
        self._bridge.report(report)

    def _count(self, effect: Counted) -> None:
        self._counters[effect.cause] += 1
        log.log(
            logging.WARNING if effect.cause in LOUD else logging.DEBUG,
            "%s: %s",
            effect.cause,
            effect.detail,
        )
        if self._trace is not None:
            self._trace.counted(self._clock(), effect.cause, effect.detail)

    # -- a drain, and the end

    def _follow_drain(self) -> None:
        """Registrations of requests that never came wait for nothing any more."""
        if self.drain.is_on and not self._is_drained:
            log.info("%s is drained: nothing new is taken", self._engine)
            self._refuse_registrations()
        elif self._is_drained and not self.drain.is_on:
            log.info("%s is no longer drained", self._engine)
        self._is_drained = self.drain.is_on

    def _say_when_empty(self) -> None:
        empty = self.drain.is_on and not self.left
        if empty and not self._is_empty_told:
            log.info("%s is drained and empty: it may be stopped", self._engine)
        self._is_empty_told = empty

    @property
    def left(self) -> int:
        """How much is under way; see `Drain.left`."""
        return self.drain.left(self._outbound.open_writes)

    def _give_up(self) -> None:
        """Revoke what was offered, fail what was promised; both drain as ever."""
        for transfer in dict.fromkeys(key[0] for key in self._endpoint.receiving.requests.states):
            self._happen(Cancelled(transfer, Reason.CLOSED))
        for transfer in self._endpoint.sending.transfers():
            self._happen(PrefillAborted(transfer, Reason.CLOSED))

    def _watch(self, effect: PeerJoined | WriterJoined) -> None:
        if self._deaths is not None:
            self._deaths.joined(effect)

    def _refuse_registrations(self) -> None:
        """Answer those of requests that never came: else their blocks would be quarantined."""
        for key in list(self._endpoint.sending.producers.states):
            self._refuse_registration(key)

    def _refuse_registration(self, key: tuple[TransferId, int]) -> None:
        """To the machine it is a request that arrives and is aborted at once.

        The engine, which never sent it or has its source back already, does not hear of that (I3).
        """
        sending, transfer = self._endpoint.sending, key[0]
        state = sending.producers.states.get(key)
        if state is None or state.registration is None or sending.holds(transfer):
            return
        digest = state.registration.register.prompt_digest
        self._unasked.add(transfer)
        self._happen(Arrived(transfer, digest))
        self._happen(PrefillAborted(transfer, Reason.CLOSED))

    def _is_empty(self) -> bool:
        return self._outbound.open_writes == 0 and not self._endpoint.receiving.consumers.states

    def close(self) -> None:
        """Close the trace."""
        if self._trace is not None:
            self._trace.close()


def _lives(
    trace: TraceWriter | None, ages: Ages | None, other: LifeObserver | None
) -> LifeObserver | None:
    """Who is told when machines begin and are forgotten; nobody, as a rule."""
    told: list[LifeObserver] = [each.life for each in (trace, ages) if each is not None]
    if other is not None:
        told.append(other)
    if len(told) < 2:
        return told[0] if told else None

    def all_of_them(machine: str, key: object, state: object) -> None:
        for tell in told:
            tell(machine, key, state)

    return all_of_them


def _with_parts(config: RuntimeConfig, transport: Transport) -> Policy:
    """The policy, with parts of the budget's size.

    A part of which nothing is to be written can not be proven to have arrived where done does not
    mean visible; where all layers have sliding windows there would be such.
    """
    layout, policy = config.layout, config.policy
    windows = all(group.window_tokens for group in layout.groups)
    if windows and not transport.capabilities.done_means_visible:
        return policy
    most = part_tokens(layout, config.write_budget_bytes)
    return evolve(policy, part_tokens=min(policy.part_tokens, most))
