"""The scheduler half: turns vLLM's hooks into events, and reports into what vLLM may be told.

Runs on EngineCore's scheduler thread alone; no hook blocks. It decides nothing about a transfer:
the core does. It keeps three books: `Ledger` (what vLLM was told about each receiving request),
`Pins` of destination blocks by attempt, and `Prefills` (what is prefilled for others, and held).

Three decisions and their reasons:

* **Pins instead of delayed frees.** `request_finished` never asks vLLM to keep a request's blocks:
  a reference of our own in the block pool does. So nothing ever has to come back as
  `finished_sending`, whose unknown ids are fatal; vLLM forgets the request at once; and an engine
  with nothing but pinned sources sleeps instead of stepping until they are free.
* **Reports are taken when the engine does something**, never by waking it. A sleeping engine needs
  no blocks; whatever wakes it calls `on_new_request` or `build_connector_meta` before it allocates
  any (in two processes reports come with a step's output, so that costs one more step).
* **Ids to report travel with the step's metadata** and come back with its output. So what a worker
  reports is decided here, in one place, whatever the number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from attrs import frozen
from vllm.v1.request import RequestStatus

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    ProducerAddress,
    Report,
    RetryDue,
    SourceReleased,
    SourceYielded,
)
from pushkv.core.errors import ConfigurationError, RemoteProtocolError
from pushkv.core.events import Arrived, Cancelled, EngineEvent, Offered
from pushkv.core.ids import Blocks, TransferId, block_count
from pushkv.fold import RankFold
from pushkv.rank_plan import RankPlan, Ranks

from .bell import Bells
from .blocks import Admission, BlockPool, Pins, admit, held, numbers
from .channel import (
    Channel,
    Direct,
    Endpoint,
    RankedRelay,
    Relay,
    StepMetadata,
    StepReports,
    find_runtime,
)
from .config import Options
from .identity import RequestName, prompt_digest, read_name, transfer_id
from .ledger import Entry, Ledger, Parting, Phase
from .log import logger
from .params import ConsumerLeg, ProducerLeg, read_params
from .prefills import Prefill, Prefills
from .stepping import PAUSE_S, Alarm, WhileWaiting, install

__all__ = ["SchedulerHalf", "Shape"]

COMPLETED = frozenset({RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED})
"""A prefill that ended like this has computed all of its prompt."""


@frozen
class Shape:
    """What the scheduler half must know of the engine.

    Attributes:
        produces: Whether the engine may prefill for others.
        consumes: Whether the engine may decode what others prefilled.
        groups: Indices of the KV cache groups that are transferred.
        block_tokens: Tokens per block of each of `groups`.
        block_count: Blocks in the pool.
        randomized: Whether vLLM appends random digits to request ids.
        steps_ahead: How many steps may be under way at once.
        ranks: The engine's ranks.
    """

    produces: bool
    consumes: bool
    groups: tuple[int, ...]
    block_tokens: tuple[int, ...]
    block_count: int
    randomized: bool
    steps_ahead: int = 1
    ranks: Ranks = Ranks()  # noqa: RUF009  - frozen


class SchedulerHalf:
    """See the module. Every method is called by `PushKVConnector` on the scheduler's thread.

    Args:
        options: The engine's options.
        shape: The engine's shape.
    """

    def __init__(self, options: Options, shape: Shape) -> None:
        self.options = options
        self.shape = shape
        self.budget: int = options.exposed_blocks(shape.block_count)
        self.ledger: Ledger = Ledger()
        self.counts: Counter[str] = Counter()
        self.channel: Channel = Relay()
        self.alarm: Alarm | None = None
        self._bells: Bells | None = None
        self._endpoint: Endpoint | None = None
        self._destinations: Pins[int] | None = None
        self.prefills: Prefills = Prefills(
            shape.groups,
            shape.block_tokens,
            options.streaming,
            self._submit,
        )
        self._held: dict[TransferId, bytes] = {}

    # -- set-up

    def bind_pool(self, pool: BlockPool) -> None:
        """VLLM's block pool exists."""
        self._destinations = Pins(pool)
        self.prefills.bind_pool(pool)

    def meet(self, endpoints: Sequence[Endpoint]) -> None:
        """The runtimes of all ranks run; before the first request."""
        self._endpoint = endpoint = endpoints[0]
        if len(endpoints) > 1:
            self.channel = RankedRelay(RankFold(endpoint.heads, self.shape.ranks))
        local = find_runtime(endpoint.incarnation)
        if local is None:
            self._listen(endpoints)
            return
        self.counts = local.counters
        self.channel = direct = Direct(local.bridge)
        if self.options.while_waiting is not WhileWaiting.STEP:
            self.alarm = Alarm(lambda: direct.reported() or self.ledger.is_due, self._received)
            local.bridge.on_report(self.alarm.ring)
        if self.options.while_waiting is WhileWaiting.SLEEP and not install():
            logger.warning("pushkv: this vLLM's loop is unknown: the engine pauses, not sleeps")

    def _listen(self, endpoints: Sequence[Endpoint]) -> None:
        """Sleep only where every worker can be heard, and the engine's loop can be told to."""
        if self.options.while_waiting is not WhileWaiting.SLEEP:
            return
        bells = Bells.at([endpoint.bell for endpoint in endpoints])
        if bells is None or not install():
            logger.warning("pushkv: the engine steps while it waits: %s", _why(bells))
            return
        self._bells = bells
        self.alarm = alarm = Alarm(lambda: bells.rung or self.ledger.is_due, attended=True)
        bells.listen(alarm.ring)

    def _submit(self, event: EngineEvent) -> None:
        self.channel.submit(event)

    @property
    def destinations(self) -> Pins[int]:
        """Pinned destination blocks, by attempt."""
        assert self._destinations is not None, "bind_gpu_block_pool was not called"
        return self._destinations

    # -- requests come

    def on_new_request(self, request: Any) -> None:
        """A request enters the scheduler. Bad parameters cost it its transfer, and nobody else."""
        self.take_reports()
        if request.kv_transfer_params is None:
            return
        try:
            leg = read_params(request.kv_transfer_params)
            if isinstance(leg, ProducerLeg):
                self._expect_prefill(request, leg)
            elif isinstance(leg, ConsumerLeg):
                self._want(request, leg)
        except RemoteProtocolError as error:
            # vLLM looks into them next, and its engine would die of what is no mapping.
            request.kv_transfer_params = None
            self._local(request.request_id, "bad kv_transfer_params", str(error))

    def _expect_prefill(self, request: Any, leg: ProducerLeg) -> None:
        if not self.shape.produces:
            raise RemoteProtocolError("do_remote_decode", True, "false at a kv_consumer")
        if request.resumable:
            raise RemoteProtocolError("do_remote_decode", True, "false for a streaming prompt")
        name = read_name(request.request_id, randomized=self.shape.randomized)
        digest = prompt_digest(request)
        transfer = transfer_id(leg.transfer_id, name, digest)
        known = self._held.get(transfer)
        if known not in (None, digest):
            raise RemoteProtocolError("transfer_id", transfer, "one that no other prompt uses")
        given = leg.transfer_id or transfer_id(None, RequestName(name.base), digest)
        self.prefills.expect(
            request.request_id,
            Prefill(transfer, given, known is not None, tokens=request.num_prompt_tokens),
        )
        if known is None:
            self._held[transfer] = digest
            self.channel.submit(Arrived(transfer, digest))

    def _want(self, request: Any, leg: ConsumerLeg) -> None:
        if not self.shape.consumes:
            raise RemoteProtocolError("do_remote_prefill", True, "false at a kv_producer")
        if request.resumable:
            raise RemoteProtocolError("do_remote_prefill", True, "false for a streaming prompt")
        self._check_ranks(leg.ranks)
        own = read_name(request.request_id, randomized=self.shape.randomized)
        name = RequestName(leg.request_id or own.base, own.prompt, own.sample)
        digest = prompt_digest(request)
        transfer = transfer_id(leg.transfer_id, name, digest)
        if not self.ledger.takes(transfer):
            raise RemoteProtocolError("transfer_id", transfer, "one that no live request uses")
        self.ledger.add(
            Entry(
                request_id=request.request_id,
                transfer=transfer,
                producer=ProducerAddress(leg.host, leg.port, engine=leg.engine),
                ranks=leg.ranks,
                digest=digest,
                tokens=request.num_prompt_tokens,
            )
        )

    def _check_ranks(self, producer: Ranks) -> None:
        """What a client says of a producer must be possible; whether it is true shows at HELLO."""
        if self._endpoint is None:
            return
        try:
            RankPlan(self._endpoint.heads, producer, self.shape.ranks).producers_of(0)
        except ConfigurationError as error:
            raise RemoteProtocolError("tp_size", producer.tensor, str(error)) from error

    # -- requests are scheduled

    def matched_tokens(self, request: Any, cached_tokens: int) -> tuple[int | None, bool]:
        """How many tokens will come from the producer; changes nothing.

        Args:
            request: vLLM's request.
            cached_tokens: Tokens whose KV is here already; whole blocks, fewer than the prompt's.

        Returns:
            The number of tokens, None for "ask again", and whether they come between steps.
        """
        entry = self.ledger.get(request.request_id)
        if entry is None or entry.phase is not Phase.WANTED:
            return 0, False
        remote_tokens = entry.tokens - cached_tokens
        if remote_tokens <= 0:
            return 0, False
        needed = sum(
            -(-entry.tokens // size) - cached_tokens // size for size in self.shape.block_tokens
        )
        match self._admission(needed):
            case Admission.NOW:
                return remote_tokens, True
            case Admission.LATER:
                return None, False
            case Admission.NEVER:
                return 0, False

    def _admission(self, needed: int) -> Admission:
        pins = self.destinations
        ending = pins.held_by(self.ledger.running())
        return admit(needed, pins.held, ending, self.budget)

    def allocated(self, request: Any, blocks: Any, remote_tokens: int) -> None:
        """Blocks are allocated: pin and offer those that the producer shall fill, at once."""
        entry = self.ledger.get(request.request_id)
        if entry is None or entry.phase is not Phase.WANTED:
            assert remote_tokens == 0, f"{request.request_id} waits for nothing"
            return
        if remote_tokens == 0:
            self.ledger.prefill_here(entry)
            self._decline(entry)
            needed = sum(-(-entry.tokens // size) for size in self.shape.block_tokens)
            room = self._admission(needed) is Admission.NOW
            self._local(
                entry.request_id,
                "prefilled here",
                "as vLLM asked" if room else "too many blocks are exposed already",
            )
            return
        start = entry.tokens - remote_tokens
        ranges = [
            blocks.blocks[group][start // size : -(-entry.tokens // size)]
            for group, size in zip(self.shape.groups, self.shape.block_tokens, strict=True)
        ]
        pool = self.destinations.pool
        ids = ([block.block_id for block in group] for group in ranges)
        self._offer(entry, tuple(numbers(group, pool) for group in ids), start)

    def _offer(self, entry: Entry, blocks: Blocks, start: int) -> None:
        offer = Offered(
            transfer=entry.transfer,
            attempt=self.ledger.number(),
            producers=entry.producers,
            blocks=blocks,
            start=start,
            end=entry.tokens,
            prompt_digest=entry.digest,
            failures=entry.failures,
        )
        self.ledger.offered(entry, offer)
        self.destinations.pin(offer.attempt, held(blocks, self.destinations.pool))
        self.channel.offer(offer, entry.ranks)

    def _offer_again(self, entry: Entry) -> None:
        """After a backoff: on the same blocks, which are still the request's, if that is safe."""
        offer = entry.offer
        assert offer is not None, f"{entry.request_id} was never offered"
        if entry.released and self._admission(block_count(offer.blocks)) is Admission.NOW:
            self._offer(entry, offer.blocks, offer.start)
        else:
            self.ledger.ask_for_others(entry)

    def _decline(self, entry: Entry) -> None:
        """Ask for no tokens at all: else the producer holds them until its time is over."""
        nothing = Offered(
            transfer=entry.transfer,
            attempt=self.ledger.number(),
            producers=entry.producers,
            blocks=tuple(() for _ in self.shape.groups),
            start=entry.tokens,
            end=entry.tokens,
            prompt_digest=entry.digest,
        )
        self.channel.offer(nothing, entry.ranks)

    def step_metadata(self, output: Any) -> StepMetadata:
        """What the workers get with the step that vLLM's `SchedulerOutput` describes."""
        if self._bells is not None:
            self._bells.rung = False  # of what has been reported so far, this step brings word
        self.take_reports()
        number, completed = self.prefills.scheduled(output)
        if self.alarm is not None and not self.alarm.attended:
            self._pause(self.alarm, output.total_num_scheduled_tokens)
        due = self.ledger.drain()
        if due.finished:
            self._stir()
        channel = self.channel
        return StepMetadata(
            channel.outgoing(),
            due.finished,
            due.failed,
            channel.relayed,
            number,
            channel.said(),
            completed,
        )

    def _pause(self, alarm: Alarm, scheduled_tokens: int) -> None:
        """Wait a little for reports in a step that has nothing to do, as those before had not."""
        alarm.empty_steps = 0 if scheduled_tokens or alarm.news() else alarm.empty_steps + 1
        if alarm.settled(self.shape.steps_ahead) and self.ledger.waits:
            assert isinstance(self.channel, Direct), "an alarm rings in one process"
            self.channel.bridge.wait(PAUSE_S)
            self.take_reports()

    def step_output(self, reports: object) -> None:
        """What a step's output brought from the workers."""
        if not isinstance(reports, StepReports):
            return
        if isinstance(self.channel, Relay | RankedRelay):
            self.channel.receive(reports.reports)
            self.take_reports()
        self.prefills.over(reports.number)

    def pending(self) -> bool:
        """Whether the engine must step once more: only to carry events to another process."""
        return self.channel.pending()

    # -- requests end

    def finished(self, request: Any, blocks: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """VLLM is done with the request, whatever became of it, and frees its blocks next.

        Args:
            request: vLLM's request.
            blocks: Ids of its computed blocks, for each KV cache group of the engine.

        Returns:
            What the response tells the router about a prefill.
        """
        entry, parting = self.ledger.finished(request.request_id)
        if entry is not None and parting is Parting.CANCEL:
            self.channel.submit(Cancelled(entry.transfer))
        elif entry is not None and parting is Parting.DECLINE:
            self._decline(entry)
        prefill = self.prefills.ended(request.request_id)
        if prefill is None:
            return None
        computed = request.status in COMPLETED and request.num_computed_tokens >= prefill.tokens
        if not prefill.repeated:
            if computed:
                self.prefills.hold(prefill, blocks)
            else:
                self.prefills.give_up(prefill)
        return self._response(request, prefill) if computed else None

    def _response(self, request: Any, prefill: Prefill) -> dict[str, Any] | None:
        endpoint = self._endpoint
        if endpoint is None:
            return None
        response: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": endpoint.engine,
            "remote_request_id": request.request_id,
            "remote_host": endpoint.host,
            "remote_port": endpoint.port,
            "remote_num_tokens": request.num_prompt_tokens,
            "tp_size": self.shape.ranks.tensor,
            "pp_size": self.shape.ranks.pipeline,
            "transfer_id": prefill.given,
        }
        if self.options.advertise_push:
            response["transfer_mode"] = "push"
        return response

    # -- reports

    def take_reports(self) -> None:
        """Act on what the runtime reported."""
        for report in self.channel.take():
            self._stir()
            self._apply(report)

    def _received(self) -> frozenset[str]:
        """Ids of requests whose KV cache has come; each is given once, here or with a step."""
        self.take_reports()
        return self.ledger.drain_received()

    def _stir(self) -> None:
        """This step changes something, so it is not one of those after which an engine sleeps."""
        if self.alarm is not None:
            self.alarm.empty_steps = 0

    def _apply(self, report: Report) -> None:
        match report:
            case Delivered():
                self.ledger.delivered(report)
            case NotDelivered():
                entry = self.ledger.not_delivered(report)
                if entry is not None:
                    self._failed(entry, report)
            case RetryDue():
                again = self.ledger.retry_due(report)
                if again is not None:
                    self._offer_again(again)
            case BlocksReleased():
                self.ledger.released(report)
                self.destinations.unpin(report.attempt)
            case SourceReleased():
                self._held.pop(report.transfer, None)
                self.prefills.released(report.transfer)
            case SourceYielded():
                self.prefills.yielded(report.transfer)

    def _failed(self, entry: Entry, report: NotDelivered) -> None:
        """The runtime has logged and counted the failure; this tells whose it is, and what next."""
        what = "attempt failed, to be retried" if report.retry else "transfer failed"
        logger.info(
            "pushkv: request %s: %s (%s; transfer %s, attempt %d, producer %s at %s:%d)",
            entry.request_id,
            what,
            report.reason,
            entry.transfer,
            report.attempt,
            entry.producer.engine or "of any name",
            entry.producer.host,
            entry.producer.port,
        )

    def _local(self, request_id: str, what: str, why: str) -> None:
        """A request goes on without an attempt, so that the runtime has nothing to tell."""
        cause = what.replace(" ", "_")
        self.counts[cause] += 1
        logger.warning(
            "pushkv: request %s: %s (%s)",
            request_id,
            what,
            why,
            extra={"request": request_id, "cause": cause},
        )


def _why(bells: Bells | None) -> str:
    return "a worker is out of hearing" if bells is None else "this vLLM's loop is unknown"
