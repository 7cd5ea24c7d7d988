"""The swarm: engines, requests and faults in one event loop, and what must hold at every step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from random import Random
from time import perf_counter

import anyio
import anyio.abc
from attrs import evolve

from pushkv.core.events import WriterGone
from pushkv.core.ids import AttemptId, EngineId, TransferId, Worker, seconds
from pushkv.core.machines import StepRecord
from pushkv.model.faults import mix
from pushkv_memory import Ended, Entry, Landed, MemoryFabric, Posted

from .decode import Decode
from .engine import MILLISECOND, Engine, Rank, Request, prompt_digest
from .network import VirtualNetwork
from .pool import BLOCK_TOKENS, ViolationError, pattern
from .prefill import Prefill
from .report import SwarmReport, SwarmSettings, Violation
from .virtual import Agenda, Clock, run_virtually
from .weather import Weather, draw

__all__ = ["run_swarm"]

PATIENCE = seconds(60)
"""After the last fault nothing may stand still for longer: the longest deadlines, twice over."""
OPERATOR_PATIENCE = seconds(20)
PROVE_EVERY = seconds(5)
WATCH_EVERY = seconds(1)


def run_swarm(
    settings: SwarmSettings, progress: Callable[[int, float], None] | None = None
) -> SwarmReport:
    """Run a swarm to its end or to its first violation, in the caller's thread.

    Args:
        settings: Which run.
        progress: Told, now and then, how many requests have an outcome, and the virtual seconds.

    Raises:
        MissingDependencyError: trio is not installed.
    """
    swarm = _Swarm(settings, progress)
    began = perf_counter()
    with _quiet():
        run_virtually(settings.backend, settings.seed, swarm.run)
    return swarm.report(perf_counter() - began)


@contextmanager
def _quiet() -> Iterator[None]:
    """Transfers fail by the hundred here, and on purpose: nobody wants to read of each."""
    log = logging.getLogger("pushkv")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


class _Swarm:
    """See `Surroundings` for what engines see of it."""

    tasks: anyio.abc.TaskGroup
    agenda: Agenda
    network: VirtualNetwork

    def __init__(
        self, settings: SwarmSettings, progress: Callable[[int, float], None] | None
    ) -> None:
        self.settings = settings
        self.random = Random(f"swarm:{settings.seed}")  # noqa: S311
        self.weather: Weather = draw(
            self.random, settings.weather, settings.transfers, settings.engines
        )
        self.counters: Counter[str] = Counter()
        self.fabric = MemoryFabric(
            settings.seed,
            self.weather.write_faults,
            self.weather.kept,
            self._now,
            history_most=1,
            observer=self._moved,
        )
        self._progress = progress
        self._hash = blake2b(digest_size=16)
        self._rows: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._events = 0
        self._violation: Violation | None = None
        self._requests: dict[TransferId, Request] = {}
        self._open: Counter[tuple[Worker, TransferId]] = Counter()
        self._doubted: Counter[tuple[Worker, TransferId]] = Counter()
        self._last_post: dict[TransferId, int] = {}
        self._posted: set[tuple[Worker, AttemptId, int]] = set()
        self._ranks: dict[Worker, Rank] = {}
        self._asked = self._told = self._open_most = self._live_most = 0
        self._faults_left = self.weather.faults
        self._is_closing = False
        self._virtual_ns = 0
        self._quarantined = 0
        self.decoders: list[Decode] = []
        self.prefills: list[Prefill] = []

    # -- the run

    async def run(self, clock: Clock) -> None:
        """From the first engine to the last check."""
        self.agenda = Agenda(clock, self.fabric.advance, self.fabric.next_due, self.guarded)
        self.network = VirtualNetwork(
            self.agenda,
            mix(self.settings.seed, 7),
            self.weather.message_faults,
            self.weather.latency_most,
            seconds(6),
        )
        async with anyio.create_task_group() as tasks:
            self.tasks = tasks
            self._build()
            await self.agenda.run()
            self._virtual_ns = self.agenda.now()
            tasks.cancel_scope.cancel()

    def _build(self) -> None:
        settings = self.settings
        for number in range(settings.engines):
            ranks = 2 if number % 5 == 4 else 1
            name = f"{'pd'[number % 2]}{number // 2}"
            if number % 2:
                self.decoders.append(Decode(self, name, ranks, f"{settings.seed}:{name}"))
            else:
                self.prefills.append(Prefill(self, name, ranks, f"{settings.seed}:{name}"))
        for engine in self.engines:
            self._begin(engine)
        for serial in range(settings.transfers):
            wait = self.weather.opens + self.random.randrange(self.weather.window)
            self.agenda.after(wait, partial(self._ask, serial))
        self.agenda.after(self.weather.opens, self._plan_fault)
        self.agenda.after(WATCH_EVERY, partial(self._watch, 0, -1))
        self.agenda.after(PROVE_EVERY, self._prove)

    @property
    def engines(self) -> list[Engine]:
        """All of them, prefill first."""
        return [*self.prefills, *self.decoders]

    def _begin(self, engine: Engine) -> None:
        if engine.is_up or self._is_closing:
            return
        engine.begin()
        for rank in engine.ranks:
            assert rank.worker is not None
            self._ranks[rank.worker] = rank

    # -- requests

    def _ask(self, serial: int) -> None:
        random = self.random
        prefill, decode = random.choice(self.prefills), random.choice(self.decoders)
        smallest = min(rank.pool.blocks for rank in (*prefill.ranks, *decode.ranks))
        blocks = random.randint(1, min(self.weather.request_blocks_most, smallest))
        tokens = blocks * BLOCK_TOKENS - random.choice((0, 0, random.randrange(BLOCK_TOKENS)))
        start = BLOCK_TOKENS * random.randrange(blocks) if random.random() < 0.2 else 0
        addresses = tuple(rank.address for rank in prefill.ranks)
        trouble = self._trouble()
        if "wrong engine" in trouble:
            addresses = tuple(evolve(each, engine=EngineId("nobody")) for each in addresses)
        request = Request(
            TransferId(f"t{serial}"),
            serial,
            tokens,
            start,
            prompt_digest(serial + self.settings.transfers * ("wrong prompt" in trouble)),
            addresses,
            tuple(rank.number for rank in decode.ranks),
            random.choice((1, 2, blocks)),
            trouble,
        )
        self._requests[request.transfer] = request
        for name, engine in (("prefill", prefill), ("decode", decode)):
            wait = random.randrange(20 * MILLISECOND)
            if f"late {name}" in trouble:
                wait += trouble[f"late {name}"]
            if f"lost {name}" not in trouble:
                self.agenda.after(wait, partial(engine.ask, request))
        if "lost decode" in trouble:
            self.settle(request, "never dispatched")
        self._asked += 1
        self._open_most = max(self._open_most, self._asked - self._told)

    def _trouble(self) -> dict[str, int]:
        """What befalls a request beside the faults of engines and network."""
        found = {}
        for name, weight, most in (
            ("cancel", 3, 0.3),
            ("preempt", 2, 0.2),
            ("abort", 2, 0.3),
            ("preempt prefill", 2, 0.05),
            ("lost prefill", 1, 1),
            ("lost decode", 1, 1),
            ("late prefill", 2, 8),
            ("slow prefill", 4, 5),
            ("late decode", 1, 15),
            ("wrong prompt", 1, 1),
            ("wrong engine", 1, 1),
        ):
            strikes = self.random.randrange(1_000_000) < weight * self.weather.per_million
            when = self.random.randrange(seconds(most))
            if strikes:
                found[name] = when
                self.counters[name] += 1
        return found

    def settle(self, request: Request, outcome: str) -> None:
        """A request's client is told; once."""
        if request.outcome is not None:
            raise ViolationError("I3", f"{request.transfer}: {request.outcome}, then {outcome}")
        request.outcome = outcome
        self._told += 1
        self._outcomes[outcome] += 1
        self.happened(f"{request.transfer} {outcome}")

    def offered(self) -> None:
        """An attempt has begun."""
        self._live_most = max(self._live_most, sum(each.live for each in self.decoders))

    # -- faults

    def _plan_fault(self) -> None:
        if self._faults_left and not self.agenda.over:
            self._faults_left -= 1
            mean = 1.3 * self.weather.faults_within / self.weather.faults
            wait = int(self.random.random() * 2 * mean)
            self.agenda.after(wait, self._fault)

    def _fault(self) -> None:
        faults = (self._lose, self._lose, self._cut, self._cut, self._slow, self._crash, self._stop)
        self.random.choice(faults)()
        self._plan_fault()

    def _lose(self) -> None:
        wires = list(self.network.wires.values())
        if wires:
            wire = self.random.choice(wires)
            self.counters["connection lost"] += 1
            first = self.random.randrange(2)
            wire.lose(first)
            if self.random.random() < 0.8:
                wait = self.random.randrange(seconds(4))
                self.agenda.after(wait, partial(wire.lose, 1 - first))

    def _cut(self) -> None:
        one, other = self.random.sample(self.engines, 2)
        path = self.random.choice(one.ranks).host, self.random.choice(other.ranks).host
        both = self.random.random() < 0.7
        self.counters["path cut"] += 1
        wait = self.random.randrange(seconds(8))
        for source, target in (path, path[::-1])[: 1 + both]:
            self.network.cut(source, target)
            self.agenda.after(wait, partial(self.network.heal, source, target))

    def _slow(self) -> None:
        wires = list(self.network.wires.values())
        if wires:
            wire = self.random.choice(wires)
            self.counters["slow link"] += 1
            wire.latency_ns = self.random.randrange(seconds(0.05), seconds(1.2))

    def _crash(self) -> None:
        engine = self.random.choice(self.engines)
        if not engine.is_up:
            return
        self.counters["crash"] += 1
        dead = [rank.worker for rank in engine.ranks if rank.worker is not None]
        heard_within = self.random.choice((0, seconds(0.01), seconds(8)))
        engine.crash(self.random.random() < 0.8, heard_within)
        wait = MILLISECOND + self.random.randrange(self.random.choice((seconds(0.2), seconds(8))))
        self.agenda.after(wait, partial(self._begin, engine))
        bound = self.weather.capabilities.death_bound
        if bound is not None and self.random.random() < 0.5:
            self.agenda.after(bound + 1, partial(self._mourn, dead))

    def _mourn(self, dead: list[Worker]) -> None:
        """Whoever runs the engines has seen the processes' end, and waited out their bytes."""
        for engine in self.engines:
            if engine.is_ready:
                for rank in engine.ranks:
                    for worker in dead:
                        rank.submit(WriterGone(worker))

    def _stop(self) -> None:
        engine = self.random.choice(self.engines)
        if not engine.is_ready:
            return
        self.counters["stop"] += 1
        engine.stop(self.random.choice((0.0, 0.5, 3.0)))
        self.agenda.after(seconds(5), partial(self._begin_again, engine))

    def _begin_again(self, engine: Engine) -> None:
        """Once it has stopped."""
        if engine.is_stopping and engine.is_up:
            self.agenda.after(seconds(1), partial(self._begin_again, engine))
        else:
            self._begin(engine)

    def _prove(self) -> None:
        """Without a bound nobody but the operator can say that nothing lands any more."""
        if self.weather.capabilities.write_bound is None:
            keep_one_in = 0 if self.settings.seed % 2 else 50
            for engine in self.engines:
                if engine.is_ready:
                    engine.prove(OPERATOR_PATIENCE, keep_one_in)
        self.agenda.after(PROVE_EVERY, self._prove)

    # -- the end

    def _watch(self, still_since: int, moves: int) -> None:
        """Everything must end; nothing may stand still once the faults are over."""
        if self._progress is not None:
            self._progress(self._told, self.agenda.now() / 1e9)
        now = self.agenda.now()
        given = self.counters["blocks given back"] + self.counters["sources given back"]
        moved = self._told + given  # a queue for few blocks may be long, and its end near
        moving = moved != moves or self._faults_left > 0
        still_since = now if moving else still_since
        everybody = self._asked == self.settings.transfers == self._told
        held = [line for engine in self.engines for line in engine.held_back()]
        if (everybody and not held and not self._faults_left) or now - still_since > PATIENCE:
            self._finish(held)
        else:
            self.agenda.after(WATCH_EVERY, partial(self._watch, still_since, moved))

    def _finish(self, held: list[str]) -> None:
        """Nothing moves any more: whatever is left must be quarantined for want of a proof."""
        self._is_closing = True
        waiting = [each.transfer for each in self._requests.values() if each.outcome is None]
        if waiting:
            where = [f"{each.name}: {each.held_back()}" for each in self.engines]
            self._violate("no wait without end", f"{waiting[:5]} of {len(waiting)}; {where}")
        elif held and self.weather.capabilities.write_bound is not None:
            self._violate("I4", f"never given back: {'; '.join(held[:5])}")
        for engine in self.engines:
            for rank in engine.ranks:
                self.guarded(rank.pool.check_all)
                self._quarantined += rank.pool.blocks - len(rank.pool.free)
            engine.stop(0.5)
        self.agenda.after(seconds(10), self._close)

    def _close(self) -> None:
        if any(engine.is_up for engine in self.engines):
            up = [engine.name for engine in self.engines if engine.is_up]
            self._violate("no wait without end", f"{up} do not stop")
        for cause in ("local_protocol_error", "connection_broke", "unsendable_message"):
            if self.counters[cause]:
                self._violate("no exception", f"{cause}: {self.counters[cause]} times")
        self.agenda.over = True

    # -- what is watched

    def _now(self) -> int:
        return self.agenda.now()

    def happened(self, what: str) -> None:
        """One event, for the digest."""
        self._events += 1
        self._hash.update(f"{self.agenda.now()} {what}\n".encode())

    def guarded(self, call: Callable[[], None]) -> None:
        """Run `call`; a violation ends the run."""
        try:
            call()
        except ViolationError as error:
            self._violate(error.invariant, error.detail)

    def _violate(self, invariant: str, detail: str) -> None:
        if self._violation is None:
            self._violation = Violation(invariant, detail, self.agenda.now() / 1e9)
        self.agenda.over = True
        self.agenda.ring()

    def observe(self, rank: Rank, record: StepRecord) -> None:
        """A machine has made a step."""
        self._rows[record.row.name] += 1
        key = record.key
        name = f"{key.transfer} {key.attempt}" if isinstance(key, AttemptId) else key
        kinds = " ".join(type(effect).__name__ for effect in record.effects)
        self.happened(f"{rank.host} {record.now} {record.row.name} {name} {kinds}")

    def open_writes(self, writer: Worker, transfer: TransferId) -> int:
        """How many WRITEs of a transfer by `writer` were posted and have not ended."""
        return self._open[writer, transfer]

    def open_reads(self, writer: Worker, transfer: TransferId) -> int:
        """How many WRITEs may still read it at `writer`: those, and those of unknown outcome."""
        return self._open[writer, transfer] + self._doubted[writer, transfer]

    def last_post(self, transfer: TransferId) -> int:
        """When a WRITE of a transfer was last posted, in virtual nanoseconds."""
        return self._last_post.get(transfer, 0)

    def _moved(self, entry: Entry) -> None:
        """The fabric did something."""
        self.agenda.ring()
        if isinstance(entry, Landed):
            self.happened(f"landed {entry.attempt.transfer} {entry.attempt.attempt} {entry.part}")
            self.guarded(partial(self._landed, entry))
        elif isinstance(entry, Posted):
            self._posted.add((entry.writer, entry.attempt, entry.part))
            self._open[entry.writer, entry.attempt.transfer] += 1
            self._last_post[entry.attempt.transfer] = entry.at
            self.counters["writes"] += 1
            self.happened(f"posted {entry.attempt.transfer} {entry.attempt.attempt} {entry.part}")
        elif isinstance(entry, Ended):
            self.counters[f"writes {entry.outcome}"] += 1
            posted = (entry.writer, entry.attempt, entry.part)
            if posted in self._posted:
                self._posted.discard(posted)
                source = (entry.writer, entry.attempt.transfer)
                self._open[source] -= 1
                self._doubted[source] += entry.outcome == "unknown"

    def _landed(self, entry: Landed) -> None:
        """I1: the block is the attempt's own, and what is in it now is the prompt's."""
        rank, attempt = self._ranks[entry.into], entry.attempt
        if not rank.engine.is_ready and not rank.engine.is_stopping:
            return  # R13: nobody has been handed a block
        request = self._requests[attempt.transfer]
        mine = attempt.consumer == rank.engine.name and attempt.consumer_rank == rank.number
        for layer, block, first, count in rank.pool.locate(entry.address, entry.length_bytes):
            holder = rank.pool.holders[block]
            if (
                holder is None
                or not mine
                or attempt.consumer_incarnation != entry.into.incarnation
                or (holder.kind, holder.transfer, holder.attempt)
                != ("attempt", attempt.transfer, attempt.attempt)
            ):
                raise ViolationError(
                    "I1", f"part {entry.part} of {attempt} in block {block} of {holder}"
                )
            index = rank.pool.held[holder].index(block) + request.start // BLOCK_TOKENS
            wanted = pattern(request.serial, index)[layer].tobytes()[first : first + count]
            if rank.pool.bytes_at(layer, block, first, count) != wanted:
                raise ViolationError(
                    "I1", f"part {entry.part} of {attempt} was read from a source of others"
                )

    def report(self, wall_s: float) -> SwarmReport:
        """What happened."""
        return SwarmReport(
            self.settings,
            self.weather.transport,
            self._hash.hexdigest(),
            self._events,
            dict(sorted(self._outcomes.items())),
            dict(sorted(self.counters.items())),
            dict(sorted(self._rows.items())),
            self._live_most,
            self._open_most,
            self._quarantined,
            self._virtual_ns / 1e9,
            wall_s,
            self._violation,
        )
