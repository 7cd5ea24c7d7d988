"""One engine of a swarm: worker ranks with their runtimes, in one life after the other."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Protocol

import anyio
import anyio.abc
from attrs import define, field

from pushkv.core.capabilities import Capabilities
from pushkv.core.effects import ProducerAddress, Report
from pushkv.core.events import EngineEvent
from pushkv.core.ids import EngineId, Incarnation, TransferId, Worker
from pushkv.core.machines import StepRecord
from pushkv.model.faults import mix
from pushkv.runtime import Runtime, RuntimeConfig
from pushkv_memory import MemoryFabric, MemoryTransport

from .network import VirtualNetwork
from .pool import Pool, ViolationError
from .virtual import Agenda
from .weather import Weather

__all__ = ["Engine", "Rank", "Request", "Surroundings", "prompt_digest"]

MILLISECOND = 1_000_000
PORT = 1


@define(eq=False)
class Request:
    """What a client asks for: a prompt, prefilled by one engine and decoded by another.

    Attributes:
        serial: Names the prompt: what its KV cache holds.
        start: The first token that the decode engine does not have already.
        trouble: What befalls it besides faults, with how long after its arrival in nanoseconds.
        outcome: What its client was told, once.
    """

    transfer: TransferId
    serial: int
    tokens: int
    start: int
    digest: bytes
    producers: tuple[ProducerAddress, ...]
    consumer_ranks: tuple[int, ...]
    chunk_blocks: int
    trouble: dict[str, int] = field(factory=dict)
    outcome: str | None = None


class Surroundings(Protocol):
    """What engines live in."""

    agenda: Agenda
    network: VirtualNetwork
    fabric: MemoryFabric
    weather: Weather
    tasks: anyio.abc.TaskGroup
    counters: Counter[str]

    def observe(self, rank: Rank, record: StepRecord) -> None:
        """A machine has made a step."""

    def happened(self, what: str) -> None:
        """For the digest."""

    def guarded(self, call: Callable[[], None]) -> None:
        """Run `call`; a violation ends the run."""

    def settle(self, request: Request, outcome: str) -> None:
        """A request's client is told."""

    def offered(self) -> None:
        """An attempt has begun at a decode engine."""

    def open_writes(self, writer: Worker, transfer: TransferId) -> int:
        """How many WRITEs of a transfer by `writer` were posted and have not ended."""

    def open_reads(self, writer: Worker, transfer: TransferId) -> int:
        """How many WRITEs may still read it at `writer`: those, and those of unknown outcome."""

    def last_post(self, transfer: TransferId) -> int:
        """When a WRITE of a transfer was last posted, in virtual nanoseconds."""


class Rank:
    """One worker rank, and its memory, which outlives its processes."""

    def __init__(self, engine: Engine, number: int, random: Random) -> None:
        weather = engine.around.weather
        self.engine = engine
        self.number = number
        self.host: str = f"{engine.name}-{number}"
        self.pool: Pool = Pool(self.host, random.randint(*weather.blocks), random.getrandbits(32))
        self.runtime: Runtime | None = None
        self.worker: Worker | None = None
        self.is_rung: bool = False
        self._ppm = random.choice((-1, 0, 1)) * weather.drift_ppm
        self._offset = random.randrange(10**15)
        self._entropy = random.getrandbits(62)
        self._drawn = 0

    @property
    def address(self) -> ProducerAddress:
        """Where consumers dial it."""
        return ProducerAddress(self.host, PORT, self.number, self.engine.name)

    def clock(self) -> int:
        """Its own monotonic nanoseconds."""
        now = self.engine.around.agenda.now()
        return self._offset + now + now * self._ppm // 1_000_000

    def random_bytes(self, count: int) -> bytes:
        """Bytes that nobody else draws."""
        self._drawn += 1
        drawn = (mix(self._entropy, self._drawn, at) for at in range(-(-count // 8)))
        return b"".join(word.to_bytes(8, "big") for word in drawn)[:count]

    def build(self, incarnation: int) -> Runtime:
        """The runtime of a new life."""
        around = self.engine.around
        budgets = around.weather.write_budgets_bytes
        config = RuntimeConfig(
            EngineId(self.engine.name),
            self.pool.layout,
            incarnation=Incarnation(incarnation),
            rank=self.number,
            listen_host=self.host,
            listen_port=PORT,
            plaintext=True,
            policy=around.weather.policy,
            write_budget_bytes=budgets[self._entropy % len(budgets)],
            clock=self.clock,
            random_bytes=self.random_bytes,
            network=around.network.at(self.host),
            observer=partial(around.observe, self),
        )
        self.worker = Worker(config.engine, config.incarnation, config.rank)
        self.runtime = Runtime(config, _DeclaringTransport(around))
        self.runtime.bridge.on_report(partial(self._ring, self.runtime))
        return self.runtime

    def submit(self, event: EngineEvent) -> None:
        """Hand an event to the runtime of this life."""
        assert self.runtime is not None
        self.runtime.bridge.submit(event)

    def _ring(self, runtime: Runtime) -> None:
        """Reports are there: the engine looks at them in its next step."""
        if runtime is self.runtime and not self.is_rung:
            self.is_rung = True
            wait = self.engine.random.randrange(2 * MILLISECOND)
            self.engine.around.agenda.after(wait, partial(self.take, runtime))

    def take(self, runtime: Runtime | None) -> None:
        """The engine's step: all reports so far. Those of an earlier life are nobody's."""
        if runtime is not self.runtime or runtime is None:
            return
        self.is_rung = False
        for report in runtime.bridge.take():
            self.engine.around.happened(f"{self.host} {report}")
            self.engine.hear(self, report)
            self.pool.check()


class _DeclaringTransport(MemoryTransport):
    """Declares the bound as the slowest and the fastest clock see it."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around.fabric)
        self._declared = around.weather.capabilities

    @property
    def capabilities(self) -> Capabilities:
        """What the slowest and the fastest clock would call the fabric's bound."""
        return self._declared


class Engine:
    """Ranks that live and die together; subclasses say what they serve."""

    def __init__(self, around: Surroundings, name: str, ranks: int, seed: str) -> None:
        self.around = around
        self.name = name
        self.random: Random = Random(seed)  # noqa: S311
        self.ranks: tuple[Rank, ...] = tuple(
            Rank(self, number, self.random) for number in range(ranks)
        )
        self.is_ready: bool = False
        self.is_up: bool = False
        self.is_stopping: bool = False
        self.lives: int = 0
        self._scope = anyio.CancelScope()
        self._pending: deque[Request] = deque()

    # -- lives

    def begin(self) -> None:
        """A new incarnation, on the same hosts and in the same memory."""
        if self.is_up:
            return
        self.is_up, self.is_stopping = True, False
        self.lives += 1
        incarnation = self.random.getrandbits(64)
        for rank in self.ranks:
            rank.build(incarnation)
        self._scope = anyio.CancelScope()
        self.around.tasks.start_soon(self._live, self._scope)

    async def _live(self, scope: anyio.CancelScope) -> None:
        runtimes = [rank.runtime for rank in self.ranks if rank.runtime is not None]
        try:
            with scope:
                async with anyio.create_task_group() as tasks:
                    for runtime in runtimes:
                        await tasks.start(runtime.run)
                    self.around.guarded(self._serve)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is found
            broken = ViolationError("no exception", f"{self.name}: {error!r}")
            self.around.guarded(partial(_raise, broken))
        finally:
            for runtime in runtimes:
                runtime.stop(0)  # ranks begin in turn: one that never did has its sockets still
        for runtime in runtimes:
            self.around.counters.update(runtime.counters)
        if not scope.cancel_called:
            self.around.guarded(self._end)

    def _serve(self) -> None:
        """R13 is over: blocks may be handed out."""
        if self.is_up and not self.is_stopping:
            for rank in self.ranks:
                rank.pool.begin()
            self.is_ready = True
            while self._pending:
                self.admit(self._pending.popleft())

    def crash(self, bytes_land: bool, heard_within: int) -> None:
        """The processes of all ranks are gone in this instant."""
        if not self.is_up:
            return
        self.is_up = self.is_ready = False
        for rank in self.ranks:
            assert rank.worker is not None
            self.around.fabric.crash(rank.worker, bytes_land=bytes_land)
            self.around.network.kill(rank.host, heard_within)
            rank.runtime, rank.is_rung = None, False
        self._scope.cancel()
        self.lose_all()

    def stop(self, timeout_s: float) -> None:
        """The engine shuts down in order."""
        self.is_ready, self.is_stopping = False, True
        for rank in self.ranks:
            if rank.runtime is not None:
                rank.runtime.stop_soon(timeout_s)

    def _end(self) -> None:
        """All runtimes have ended by themselves: every attempt has its outcome now."""
        for rank in self.ranks:
            rank.take(rank.runtime)
        self.check_told()
        self.is_up = self.is_ready = False
        for rank in self.ranks:
            rank.runtime, rank.is_rung = None, False
        self.lose_all()

    # -- requests

    def digest_of(self, request: Request) -> bytes:
        """Of the prompt that is really meant."""
        return prompt_digest(request.serial)

    def ask(self, request: Request) -> None:
        """A request arrives; the router keeps it for an engine that is starting."""
        if self.is_ready:
            self.admit(request)
        else:
            self._pending.append(request)

    def later(self, wait: int, call: Callable[[], None]) -> None:
        """Do something in this life, after a while."""
        life = self.lives
        self.around.agenda.after(wait, partial(self._in_life, life, call))

    def _in_life(self, life: int, call: Callable[[], None]) -> None:
        if self.lives == life and self.is_up:
            call()

    def admit(self, request: Request) -> None:
        """A request begins."""
        raise NotImplementedError

    def hear(self, rank: Rank, report: Report) -> None:
        """A report of one rank's runtime."""
        raise NotImplementedError

    def lose_all(self) -> None:
        """The process is gone, and what it knew."""
        raise NotImplementedError

    def prove(self, patience: int, keep_one_in: int) -> None:
        """The operator says what nobody else can prove, of what is older than `patience`."""
        raise NotImplementedError

    def held_back(self) -> list[str]:
        """Whose blocks are not back, in words."""
        raise NotImplementedError

    def check_told(self) -> None:
        """I3, no wait without end: each attempt has an outcome when the runtime is over."""


def prompt_digest(serial: int) -> bytes:
    """16 bytes that name a prompt."""
    return (mix(serial, 1) << 64 | mix(serial, 2)).to_bytes(16, "big")


def _raise(error: ViolationError) -> None:
    raise error
