"""How the two halves of the connector reach the runtime, in one process or in two.

The runtime lives in the worker's process, where the KV cache is. vLLM gives the halves one object
per step each way and nothing else, so in two processes the engine's events wait for a step
(`Relay`). In one process that would only cost time, and reports would wait for a step of an idle
engine: there the scheduler half uses the bridge itself (`Direct`). Which it is shows when the
worker's `Endpoint` arrives: its incarnation is in this process's registry or it is not.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, field, frozen
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pushkv.core.effects import Report
from pushkv.core.events import Computed, EngineEvent, Offered
from pushkv.core.ids import EngineId, Incarnation
from pushkv.fold import RankFold, Said
from pushkv.rank_plan import Ranks

if TYPE_CHECKING:
    from pushkv.runtime import Bridge

__all__ = [
    "Channel",
    "Direct",
    "Endpoint",
    "Local",
    "RankedRelay",
    "Relay",
    "StepMetadata",
    "StepReports",
    "find_runtime",
    "publish",
    "withdraw",
]


@frozen
class Endpoint(KVConnectorHandshakeMetadata):
    """Where a worker's runtime listens; sent to the scheduler half once, at start.

    `heads` are those of the whole model in each KV cache group (`CacheLayout.heads`), `bell` is
    where the worker rings when there are reports.
    """

    engine: EngineId
    incarnation: Incarnation
    host: str
    port: int
    heads: tuple[int, ...] = (1,)
    bell: str = ""


@frozen
class StepMetadata(KVConnectorMetadata):
    """From the scheduler half to every worker, once per step.

    Attributes:
        commands: What the engine has to say to the runtime; empty where it was said directly.
        finished: Requests that the worker reports as received in this step.
        failed: Those of `finished` whose KV cache did not come.
        relayed: Whether the worker shall return the runtime's reports.
        number: What the worker shall return when the step is over; 0 where nobody asks.
        said: Commands to one rank of several.
        completed: What the worker tells the runtime when it has computed the step.
    """

    commands: tuple[EngineEvent, ...]
    finished: frozenset[str]
    failed: frozenset[str]
    relayed: bool
    number: int = 0
    said: tuple[Said, ...] = ()
    completed: tuple[Computed, ...] = ()


@frozen
class StepReports(KVConnectorWorkerMetadata):
    """From a worker to the scheduler half, in steps that have something to tell.

    Attributes:
        reports: The runtime's, where they are relayed.
        number: The step's, which is over at this worker.
    """

    reports: tuple[tuple[int, Report], ...]
    number: int = 0

    def aggregate(self, other: Any) -> StepReports:
        """The reports of two workers, of one step."""
        return StepReports(self.reports + other.reports, max(self.number, other.number))


class Channel(Protocol):
    """The scheduler half's way to the runtime. Nothing here blocks."""

    @property
    def relayed(self) -> bool:
        """Whether events and reports travel with the steps."""

    def submit(self, event: EngineEvent) -> None:
        """Tell the runtime something."""

    def offer(self, offered: Offered, producer: Ranks) -> None:
        """Offer blocks to a producer of these ranks, whose addresses `offered` has."""

    def take(self) -> list[Report]:
        """What the runtime reported since the last call."""

    def outgoing(self) -> tuple[EngineEvent, ...]:
        """Events that this step must carry; each is given once."""

    def said(self) -> tuple[Said, ...]:
        """Events for one rank of several that this step must carry; each is given once."""

    def pending(self) -> bool:
        """Whether some event still waits for a step."""


@frozen
class Direct:
    """Both halves in one process: the bridge itself."""

    bridge: Bridge

    relayed = False

    def submit(self, event: EngineEvent) -> None:
        """Tell the runtime at once."""
        self.bridge.submit(event)

    def offer(self, offered: Offered, producer: Ranks) -> None:
        """One rank is served by all of the producer's."""
        self.bridge.submit(offered)

    def take(self) -> list[Report]:
        """What was reported since the last call; the bridge bounds it, the rest comes next time."""
        return self.bridge.take()

    def reported(self) -> bool:
        """Whether there is something to take."""
        return self.bridge.wait(0)

    def outgoing(self) -> tuple[EngineEvent, ...]:
        """Nothing: it was all told at once."""
        return ()

    def said(self) -> tuple[Said, ...]:
        """Nothing: there is one rank."""
        return ()

    def pending(self) -> bool:
        """Never."""
        return False


@define
class Relay:
    """The halves in two processes: events out with a step, reports back with its output."""

    _outbox: list[EngineEvent] = field(factory=list)
    _inbox: list[Report] = field(factory=list)

    relayed = True

    def submit(self, event: EngineEvent) -> None:
        """Tell the runtime with the next step."""
        self._outbox.append(event)

    def offer(self, offered: Offered, producer: Ranks) -> None:
        """One rank is served by all of the producer's."""
        self._outbox.append(offered)

    def receive(self, reports: tuple[tuple[int, Report], ...]) -> None:
        """Reports came with a step's output."""
        self._inbox.extend(report for _, report in reports)

    def take(self) -> list[Report]:
        """What came since the last call."""
        taken, self._inbox = self._inbox, []
        return taken

    def outgoing(self) -> tuple[EngineEvent, ...]:
        """The events of this step."""
        if not self._outbox:
            return ()
        taken, self._outbox = tuple(self._outbox), []
        return taken

    def said(self) -> tuple[Said, ...]:
        """Nothing: there is one rank."""
        return ()

    def pending(self) -> bool:
        """Whether events wait: then the engine must step once more, and no longer."""
        return bool(self._outbox)


@define
class RankedRelay:
    """Several ranks, each in a process of its own, as one (R12); otherwise a `Relay`."""

    fold: RankFold
    _outbox: list[Said] = field(factory=list)
    _inbox: list[Report] = field(factory=list)

    relayed = True

    def submit(self, event: EngineEvent) -> None:
        """Tell every rank with the next step."""
        self._outbox.extend(self.fold.say(event))

    def offer(self, offered: Offered, producer: Ranks) -> None:
        """Tell every rank its part with the next step."""
        self._outbox.extend(self.fold.offer(offered, producer))

    def receive(self, reports: tuple[tuple[int, Report], ...]) -> None:
        """Reports came with a step's output."""
        for rank, report in reports:
            heard = self.fold.hear(rank, report)
            self._inbox.extend(heard.reports)
            self._outbox.extend(heard.events)

    def take(self) -> list[Report]:
        """What came since the last call."""
        taken, self._inbox = self._inbox, []
        return taken

    def outgoing(self) -> tuple[EngineEvent, ...]:
        """Nothing that all ranks hear alike."""
        return ()

    def said(self) -> tuple[Said, ...]:
        """The events of this step, each with its rank."""
        taken, self._outbox = tuple(self._outbox), []
        return taken

    def pending(self) -> bool:
        """Whether events wait: then the engine must step once more, and no longer."""
        return bool(self._outbox)


@frozen
class Local:
    """A runtime of this process.

    Attributes:
        bridge: Its bridge.
        counters: Its counters; the scheduler half adds causes that no other thread counts.
    """

    bridge: Bridge
    counters: Counter[str]


_runtimes: dict[Incarnation, Local] = {}


def publish(incarnation: Incarnation, bridge: Bridge, counters: Counter[str]) -> None:
    """Let a scheduler half of this process find the runtime."""
    _runtimes[incarnation] = Local(bridge, counters)


def withdraw(incarnation: Incarnation) -> None:
    """The runtime stops."""
    _runtimes.pop(incarnation, None)


def find_runtime(incarnation: Incarnation) -> Local | None:
    """What that incarnation published, if its runtime lives in this process."""
    return _runtimes.get(incarnation)
