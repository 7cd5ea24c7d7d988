"""One worker process with its engine: the real endpoint, and what is known around it.

`Nodes` runs one event through a thawed endpoint and freezes it again. Equal questions are answered
from memory: the same process in the same state meets the same event in thousands of worlds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve, frozen

from pushkv.core import rules
from pushkv.core.consumer import QUARANTINED, REVOKING, SETTLING, WAITING
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.copies import replace
from pushkv.core.deadlines import Deadlines
from pushkv.core.effects import (
    BlocksReleased,
    Counted,
    Delivered,
    Dial,
    Effect,
    Hangup,
    LookForArrivals,
    NotDelivered,
    PeerJoined,
    PermitEnded,
    PermitGranted,
    RetryDue,
    SourceReleased,
    Transmit,
    WriterJoined,
)
from pushkv.core.endpoint import Endpoint, Identity
from pushkv.core.events import ArrivalSeen, ConnectionClosed, Event, MessageReceived, Tick
from pushkv.core.ids import FOREVER, AttemptId, EngineId, Epoch, Incarnation, Instant, Worker
from pushkv.core.link import LINK, LinkStatus
from pushkv.core.machines import StepRecord, Store
from pushkv.core.messages import Hello, Refused
from pushkv.core.producer import DRAINING, EXPECTED, HOLDING, RETRYING, WRITING
from pushkv.core.producer_table import PRODUCER
from pushkv.core.request import REQUEST, RequestStatus

from .configurations import Configuration
from .properties import INPUT, judged, moved, wanted
from .snapshot import NOW, EndpointState, aged, freeze, older, thaw

__all__ = ["Fire", "Node", "Nodes", "Offer", "Slot", "Stage", "Step"]

LAYOUT = b"layout"
SECRET = b"a secret of the checker"
HARMLESS = (Counted, Transmit, Hangup, LookForArrivals)
"""What the same input may lead to a second time: it is counted, and answered again."""


@frozen(order=True)
class Slot:
    """A place where a worker process runs: it may die there, and another life begin."""

    engine: str
    rank: int
    consumer: bool

    def worker(self, life: int) -> Worker:
        """The process of that life; lives count from 1."""
        return Worker(EngineId(self.engine), Incarnation(life), self.rank)

    def __str__(self) -> str:
        return f"{self.engine}{self.rank or ''}"


@frozen
class Offer:
    """What the engine knows of one attempt that it has offered blocks for."""

    transfer: str
    attempt: int
    blocks: tuple[int, ...]
    told: str = ""
    released: bool = False


class Stage:
    """How far a producer's engine is with a transfer, as plain words in states."""

    ABSENT = "absent"
    QUEUED = "queued"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"
    RELEASED = "released"


@frozen
class Prefilling:
    """One transfer at a producer's engine.

    Attributes:
        stage: How far it is.
        tokens: How many are computed, in blocks of its present life.
        life: How often it was preempted: each life has other blocks.
        reads: WRITEs that were open when it was preempted, by attempt and part: until they are
            over the blocks of the former life are pinned, whatever the present one does.
    """

    transfer: str
    stage: str
    tokens: int
    life: int = 0
    reads: tuple[tuple[AttemptId, int], ...] = ()

    def source(self, tokens: int) -> tuple[tuple[int, ...]]:
        """The blocks of the present life of a prompt of so many tokens."""
        return (tuple(range(self.life * tokens, (self.life + 1) * tokens)),)


@frozen
class Node:
    """One process: its endpoint, and the engine and runtime around it.

    Attributes:
        life: Which life it is, from 1; 0 while nobody runs there.
        lives: Lives so far.
        serving: Whether the engine hands out blocks (R13).
        permits: By link, until when WRITEs may be posted.
        dialing: Hosts and ranks that are being dialled.
        offers: Attempts not over yet, oldest first.
        offers_left: By transfer, how often it may still offer.
        prefills: The transfers it is, or was, sent.
        delivered: The transfers that were delivered, where that is asked for.
    """

    life: int
    lives: int
    endpoint: EndpointState
    serving: bool
    permits: tuple[tuple[Epoch, Instant], ...]
    dialing: tuple[tuple[str, int], ...]
    offers: tuple[Offer, ...]
    offers_left: tuple[tuple[str, int], ...]
    prefills: tuple[Prefilling, ...]
    delivered: tuple[str, ...] = ()

    def permit(self, epoch: Epoch) -> Instant:
        """Until when WRITEs may be posted over a link; long ago if there is no permit."""
        return dict(self.permits).get(epoch, Instant(-1))

    def offer(self, transfer: str) -> Offer | None:
        """The latest attempt of a transfer that is not over."""
        return next((each for each in reversed(self.offers) if each.transfer == transfer), None)

    def prefill(self, transfer: str) -> Prefilling | None:
        """What the engine knows of a transfer."""
        return next((each for each in self.prefills if each.transfer == transfer), None)


@frozen
class Fire:
    """A deadline that may come: of which machine, which field, and which budget it costs.

    `field` is "" where the machine's own clock says that the time has come.
    """

    table: str
    index: int
    field: str
    cost: str
    what: str


@frozen
class Step:
    """What one event did at one node.

    Attributes:
        node: The node after it.
        effects: What is left to do in the world around it, in order.
        broken: What should not have happened: (property, detail).
    """

    node: Node
    effects: tuple[Effect, ...]
    broken: tuple[tuple[str, str], ...]


class Nodes:
    """Runs nodes of one configuration. `rows` collects the rows that fired, by table."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.rows: set[tuple[str, str]] = set()
        self._endpoints: dict[tuple[Slot, int], Endpoint] = {}
        self._records: list[StepRecord] = []

    # -- lives

    def begin(self, slot: Slot, life: int, node: Node | None) -> Node:
        """A process starts; its engine has forgotten everything but how often it may offer."""
        endpoint = self._new(slot, life, NOW)
        wanted = tuple(
            (each.name, each.offers)
            for each in self.configuration.transfers
            if slot.consumer and slot.engine in each.consumers
        )
        return Node(
            life=life,
            lives=life,
            endpoint=self._freeze(endpoint),
            serving=node is None or endpoint.receiving.ready_at <= NOW,
            permits=(),
            dialing=(),
            offers=(),
            offers_left=wanted if node is None else node.offers_left,
            prefills=(),
        )

    def started_long_ago(self, slot: Slot) -> Node:
        """A first life whose restart grace is over."""
        node = self.begin(slot, 1, None)
        return evolve(node, endpoint=replace(node.endpoint, ready_at=NOW))

    def _new(self, slot: Slot, life: int, started_at: Instant) -> Endpoint:
        worker = slot.worker(life)
        hello = Hello(
            protocol=1,
            nonce=0,
            engine=worker.engine,
            incarnation=worker.incarnation,
            rank=worker.rank,
            model=(),
            layout=(),
            transport="",
            transport_version="",
            lease=self.configuration.policy.lease,
            directory=(),
            memory=b"",
        )
        endpoint = Endpoint(
            Identity(hello, LAYOUT, SECRET),
            self.configuration.policy,
            self.configuration.capabilities,
            _fits,
            started_at,
            self._records.append,
        )
        run = (
            endpoint.links.store.table,
            endpoint.receiving.consumers.table,
            endpoint.receiving.requests.table,
            endpoint.sending.producers.table,
        )
        real = (LINK, CONSUMER, REQUEST, PRODUCER)
        assert all(one is other for one, other in zip(run, real, strict=True)), "no copies"
        self._endpoints[slot, life] = endpoint
        return endpoint

    def _freeze(self, endpoint: Endpoint) -> EndpointState:
        configuration = self.configuration
        return freeze(endpoint, configuration.policy.lease, walked=configuration.proofs)

    def token(self, attempt: AttemptId) -> int:
        """The arrival token of an attempt; the same at whoever knows the secret."""
        return next(iter(self._endpoints.values())).receiving._token(attempt)

    # -- steps

    def step(self, slot: Slot, node: Node, event: Event) -> Step:
        """One event, now."""
        return self._run(slot, node, event)

    def arrival(self, slot: Slot, node: Node, attempt: AttemptId, part: int) -> Step:
        """An arrival with the token that the attempt's producer was told."""
        token = self._endpoint(slot, node).receiving._token(attempt)
        return self._run(slot, node, ArrivalSeen(attempt, part, token))

    def fire(self, slot: Slot, node: Node, fire: Fire) -> Step:
        """One machine's deadline comes."""

        def due(endpoint: Endpoint) -> None:
            store = self._store(endpoint, fire.table)
            key = list(store.states)[fire.index]
            if fire.field:
                store.states[key] = replace(store.states[key], **{fire.field: NOW})
            endpoint._machines.deadlines.set((fire.table, key), NOW)

        return self._run(slot, node, Tick(), due)

    @staticmethod
    def _store(endpoint: Endpoint, table: str) -> Store[Any, Any]:
        stores: dict[str, Store[Any, Any]] = {
            LINK.name: endpoint.links.store,
            CONSUMER.name: endpoint.receiving.consumers,
            REQUEST.name: endpoint.receiving.requests,
            PRODUCER.name: endpoint.sending.producers,
        }
        return stores[table]

    def _endpoint(self, slot: Slot, node: Node) -> Endpoint:
        return self._endpoints.get((slot, node.life)) or self._new(slot, node.life, NOW)

    def _run(
        self,
        slot: Slot,
        node: Node,
        event: Event,
        prepare: Callable[[Endpoint], None] | None = None,
    ) -> Step:
        endpoint = self._endpoint(slot, node)
        thaw(node.endpoint, endpoint)
        endpoint._machines.deadlines = Deadlines()
        if prepare is not None:
            prepare(endpoint)
        self._records.clear()
        broken: list[tuple[str, str]] = []
        effects: list[Effect] = []
        try:
            effects = endpoint.handle(event, NOW)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not happen
            broken.append(("no exception", f"{type(error).__name__}: {error}"))
        self.rows.update((record.machine, record.row.name) for record in self._records)
        after = evolve(node, endpoint=self._freeze(endpoint))
        same = after.endpoint == node.endpoint
        broken += judged(event, same, self._records, effects)
        if isinstance(event, INPUT):
            broken += self._twice(endpoint, event, after)
        left: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Delivered) and self.configuration.eventually == "delivers":
                delivered = tuple(sorted({*after.delivered, effect.transfer}))
                after = evolve(after, delivered=delivered)
            after, mine, wrong = _at_node(after, effect)
            broken.extend(wrong)
            if not mine:
                left.append(effect)
        broken.extend(_exposed(after))
        broken.extend(wanted(after.endpoint))
        if isinstance(event, ConnectionClosed) and event.connection is not None:
            broken.extend(moved(node.endpoint, after.endpoint, event.connection))
        return Step(after, tuple(left), tuple(broken))

    def _twice(self, endpoint: Endpoint, event: Event, after: Node) -> list[tuple[str, str]]:
        """I5: what comes twice at once changes nothing the second time, and orders nothing."""
        what = type(event.message if isinstance(event, MessageReceived) else event).__name__
        try:
            effects = endpoint.handle(event, NOW)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not happen
            return [("no exception", f"{what} comes twice: {type(error).__name__}: {error}")]
        if self._freeze(endpoint) != after.endpoint:
            return [("I5", f"{what} comes twice, and changes something the second time")]
        done = [type(each).__name__ for each in effects if not isinstance(each, HARMLESS)]
        return [("I5", f"{what} comes twice, and so does {done}")] if done else []

    # -- time

    def aged(self, slot: Slot, node: Node) -> Node:
        """The node after one step of time in which nothing happened there."""
        return self.older(node, self.configuration.rates[0 if slot.consumer else 1])

    def older(self, node: Node, by: int) -> Node:
        """The node after so much time on its own clock."""
        if not node.life:
            return node
        permits = tuple((epoch, older(until, by, -1)) for epoch, until in node.permits)
        endpoint = aged(node.endpoint, by, self.configuration.policy.lease)
        return evolve(node, endpoint=endpoint, permits=permits)

    def fires(self, node: Node) -> tuple[Fire, ...]:
        """The deadlines that may come now."""
        found: list[Fire] = []
        state = node.endpoint
        bound = self.configuration.capabilities.write_bound
        for index, (_, consumer) in enumerate(state.consumers):
            timer = "timer_at" if consumer.timer_at != FOREVER else ""
            if timer:
                found.append(Fire(CONSUMER.name, index, timer, "resend", "asks again"))
            if consumer.status in (*WAITING, REVOKING) and consumer.deadline_at != FOREVER:
                found.append(
                    Fire(CONSUMER.name, index, "deadline_at", "impatience", "has waited too long")
                )
            over = consumer.status in (SETTLING, QUARANTINED) and consumer.deadline_at <= NOW
            fenced = rules.fence_passed(NOW, consumer.fence, bound)
            if over or (consumer.status is REVOKING and fenced):
                found.append(Fire(CONSUMER.name, index, "", "", "looks at the clock"))
        for index, (_, request) in enumerate(state.requests):
            if request.status is RequestStatus.RETRYING:
                found.append(Fire(REQUEST.name, index, "retry_at", "", "has backed off"))
        found += self._producer_fires(node)
        found += self._link_fires(node)
        return tuple(found)

    @staticmethod
    def _producer_fires(node: Node) -> list[Fire]:
        found: list[Fire] = []
        for index, (_, producer) in enumerate(node.endpoint.producers):
            status = producer.status

            def fire(field: str, cost: str, what: str, index: int = index) -> None:
                found.append(Fire(PRODUCER.name, index, field, cost, what))

            if status is EXPECTED and producer.timer_at != FOREVER:
                fire("timer_at", "impatience", "expects the request no longer")
            if status is HOLDING and producer.hold_until != FOREVER:
                fire("hold_until", "impatience", "holds it no longer")
            if status is RETRYING and producer.timer_at != FOREVER:
                fire("timer_at", "", "writes again")
            if status in (WRITING, RETRYING, DRAINING) and producer.transfer_until != FOREVER:
                fire("transfer_until", "impatience", "has tried for too long")
            if status is DRAINING and any(each.over_at < NOW for each in producer.unknown):
                fire("", "", "knows that an unknown WRITE is over")
        return found

    def _link_fires(self, node: Node) -> list[Fire]:
        found: list[Fire] = []
        for index, (_, link) in enumerate(node.endpoint.links):
            if link.status is LinkStatus.CONNECTING and link.timer_at != FOREVER:
                found.append(Fire(LINK.name, index, "timer_at", "", "dials again"))
            if link.status in (LinkStatus.CONNECTING, LinkStatus.UP) and link.silent_at != FOREVER:
                found.append(Fire(LINK.name, index, "silent_at", "impatience", "suspects its link"))
            if link.status is LinkStatus.UP and link.timer_at != FOREVER:
                assert link.epoch is not None
                until = node.permit(link.epoch)
                bound = self.configuration.capabilities.write_bound
                served = any(
                    each.registration is not None and each.registration.epoch == link.epoch
                    for _, each in node.endpoint.producers
                )
                if served and not link.stamps and not rules.may_post(NOW, until, bound):
                    found.append(Fire(LINK.name, index, "timer_at", "", "asks for a permit"))
        return found


def _fits(ours: Hello, theirs: Hello) -> Refused | None:
    return None


def _at_node(node: Node, effect: Effect) -> tuple[Node, bool, list[tuple[str, str]]]:
    """Effects that concern the process alone, and what its engine is told."""
    match effect:
        case PermitGranted(epoch=epoch, until=until):
            kept = tuple(each for each in node.permits if each[0] != epoch)
            permits = (*kept, (epoch, older(until, 0, -1)))
            return evolve(node, permits=permits), True, []
        case PermitEnded(epoch=epoch):
            kept = tuple(each for each in node.permits if each[0] != epoch)
            return evolve(node, permits=kept), True, []
        case Dial(address=address):
            dialing = tuple(sorted({*node.dialing, (address.host, address.rank)}))
            return evolve(node, dialing=dialing), True, []
        case Delivered() | NotDelivered() | BlocksReleased():
            return _report(node, effect)
        case SourceReleased(transfer=transfer):
            found = node.prefill(transfer)
            if found is None or found.stage in (Stage.ABSENT, Stage.RELEASED):
                return node, True, [("I3", f"the source of {transfer} is released twice")]
            return with_prefill(node, evolve(found, stage=Stage.RELEASED, reads=())), True, []
        case Counted() | PeerJoined() | WriterJoined() | LookForArrivals() | RetryDue():
            return node, True, []
        case _:
            return node, False, []


def with_prefill(node: Node, prefill: Prefilling) -> Node:
    """The node with what it knows of one transfer replaced."""
    others = tuple(each for each in node.prefills if each.transfer != prefill.transfer)
    return evolve(node, prefills=tuple(sorted((*others, prefill), key=lambda each: each.transfer)))


def _report(
    node: Node, report: Delivered | NotDelivered | BlocksReleased
) -> tuple[Node, bool, list[tuple[str, str]]]:
    """I3: one outcome, then one release, for each attempt."""
    found = [each for each in node.offers if each.attempt == report.attempt]
    if len(found) != 1:
        return node, True, [("I3", f"{report} after the attempt was over")]
    offer = found[0]
    broken: list[tuple[str, str]] = []
    match report:
        case Delivered() | NotDelivered():
            if offer.told:
                broken = [("I3", f"{report} after it was told: {offer.told}")]
            after = evolve(offer, told="delivered" if isinstance(report, Delivered) else "failed")
        case _:
            if offer.released or not offer.told:
                broken = [("I3", f"{report} {'again' if offer.released else 'untold'}")]
            after = evolve(offer, released=True)
    over = bool(after.told) and after.released
    offers = tuple(
        after if each is offer else each for each in node.offers if not (over and each is offer)
    )
    return evolve(node, offers=offers), False, broken


def _exposed(node: Node) -> list[tuple[str, str]]:
    """I4: what the endpoint counts as exposed is what the engine has not got back."""
    held = sum(len(each.blocks) for each in node.offers if not each.released)
    counted = node.endpoint.exposed_blocks
    return [] if held == counted else [("I4", f"{counted} blocks are counted as exposed of {held}")]
