"""A runtime's blocks and counters as Prometheus metrics, read when somebody asks.

They are true of the moment of the scrape, also while the engine takes no step. Needs
``prometheus_client``, which comes with vLLM and with ``pushkv[metrics]``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from pushkv.core.consumer_table import CONSUMER
from pushkv.core.errors import ConfigurationError, MissingDependencyError
from pushkv.core.link import LINK
from pushkv.core.messages import Reason
from pushkv.core.producer_table import PRODUCER
from pushkv.core.request import REQUEST

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as _error:
    raise MissingDependencyError(
        "metrics need prometheus_client: install pushkv[metrics]"
    ) from _error

from .phases import BOUNDS_S, OVER, PHASES, Now, Phases

if TYPE_CHECKING:
    from pushkv.runtime.health import Health

__all__ = ["RuntimeCollector", "serve_metrics"]

NOT_DELIVERED, NOT_SERVED = "not_delivered_", "not_served_"
ENDED = {"delivered": "consumer", "served": "producer"}
GAUGES: Mapping[str, tuple[str, Callable[[Health], float]]] = {
    "running": ("1 while the runtime takes work.", lambda health: health.is_running),
    "early_registration_paused": (
        "1 while the budget is spent: requests register late, or compute their prompt themselves.",
        lambda health: health.budget_spent,
    ),
    "exposed_blocks": (
        "Destination blocks registered, being written or quarantined.",
        lambda health: health.exposed_blocks,
    ),
    "exposed_blocks_budget": (
        "The most destination blocks that may be.",
        lambda health: health.exposed_blocks_most,
    ),
    "quarantined_blocks": (
        "Those of them that only a proof gives back.",
        lambda health: health.quarantined_blocks,
    ),
    "pinned_blocks": ("Source blocks of finished prefills.", lambda health: health.pinned_blocks),
    "pinned_blocks_budget": (
        "The most that may be.",
        lambda health: health.pinned_blocks_most,
    ),
}
"""Name without prefix → help, value."""
STATES = tuple(
    (table.name, status.partition(".")[2])
    for table in (CONSUMER, REQUEST, PRODUCER, LINK)
    for status in table.statuses
    if status not in OVER
)
"""Machine and status of what is under way."""


class Observed(Protocol):
    """What is read of a `pushkv.runtime.Runtime`."""

    @property
    def health(self) -> Health | None:
        """The blocks of this moment; None before the start."""

    @property
    def counters(self) -> Counter[str]:
        """How often each cause was counted."""

    @property
    def written_bytes(self) -> int:
        """By WRITEs that were DONE."""


class RuntimeCollector(Collector):
    """The metrics of one runtime. Any thread; never blocks.

    ``pushkv_transfers_total`` counts transfers by role (of this engine), outcome and cause; every
    cause there is exists from the start, at zero. ``pushkv_events_total`` counts what else was
    noticed, by the cause that the log names.

    Args:
        runtime: What to read.
        engine: Its name, a label of each metric.
        rank: Its rank, another one.
        phases: What follows its machines' steps; None for no metrics of phases, states and links.
    """

    def __init__(
        self, runtime: Observed, engine: str, rank: int, phases: Phases | None = None
    ) -> None:
        self._runtime = runtime
        self._phases = phases
        self._labels = {"engine": engine, "rank": str(rank)}

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        counters = dict(self._runtime.counters)
        yield from self._gauges()
        transfers = self._counter("transfers", "Transfers that ended.", "role", "outcome", "cause")
        for outcome, role in ENDED.items():
            self._add(transfers, counters.pop(outcome, 0), role, outcome, "")
        for prefix, role in ((NOT_DELIVERED, "consumer"), (NOT_SERVED, "producer")):
            for reason in Reason:
                count = counters.pop(f"{prefix}{reason}", 0)
                self._add(transfers, count, role, prefix.rstrip("_"), str(reason))
        yield transfers
        events = self._counter("events", "What else was noticed.", "cause")
        for cause, count in sorted(counters.items()):
            self._add(events, count, cause)
        yield events
        written = self._counter("written_bytes", "Bytes of WRITEs that were done.")
        self._add(written, self._runtime.written_bytes)
        yield written
        if self._phases is not None:
            yield from self._followed(self._phases)

    def _followed(self, phases: Phases) -> Iterator[Metric]:
        yield self._histograms(phases)
        retries = self._counter("retries", "What was tried again.", "what")
        for what, count in phases.retries.items():
            self._add(retries, count, what)
        yield retries
        now = tuple(phases.now())
        states = self._gauge("machines", "Machines that are not over.", "machine", "status")
        oldest = self._gauge(
            "oldest_age_seconds", "How long the oldest has been so.", "machine", "status"
        )
        ages: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for each in now:
            ages[each.machine, each.status].append(each.age_s)
        for state in STATES:
            self._add(states, len(ages[state]), *state)
            self._add(oldest, max(ages[state], default=0.0), *state)
        yield states
        yield oldest
        yield self._links(now)

    def _histograms(self, phases: Phases) -> Metric:
        family = HistogramMetricFamily(
            "pushkv_phase_seconds", "How long phases took.", labels=[*self._labels, "role", "phase"]
        )
        for phase, histogram in phases.histograms.items():
            counts = tuple(accumulate(histogram.counts))
            bounds = (*map(str, BOUNDS_S), "+Inf")
            family.add_metric(
                [*self._labels.values(), PHASES[phase], phase],
                list(zip(bounds, counts, strict=True)),
                histogram.sum_ns / 1e9,
            )
        return family

    def _links(self, now: Iterable[Now]) -> Metric:
        """A peer's engine and rank outlive its incarnation, so they are what names it."""
        links = self._gauge("link_up", "1 while the link is up.", "peer", "peer_rank")
        found: defaultdict[tuple[str, str], bool] = defaultdict(bool)
        for each in now:
            if each.peer is not None:
                found[each.peer.engine, str(each.peer.rank)] |= each.status == "up"
        for peer, is_up in found.items():
            self._add(links, is_up, *peer)
        return links

    def _gauges(self) -> Iterator[Metric]:
        health = self._runtime.health
        if health is None:
            return
        for name, (text, value) in GAUGES.items():
            gauge = self._gauge(name, text)
            self._add(gauge, float(value(health)))
            yield gauge

    def _counter(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"pushkv_{name}", text, labels=[*self._labels, *labels])

    def _gauge(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"pushkv_{name}", text, labels=[*self._labels, *labels])

    def _add(
        self, family: CounterMetricFamily | GaugeMetricFamily, value: float, *labels: str
    ) -> None:
        family.add_metric([*self._labels.values(), *labels], value)


def serve_metrics(collector: RuntimeCollector, host: str, port: int) -> Callable[[], None]:
    """Serve ``/metrics`` in a thread of its own.

    Returns:
        What ends it; blocks until the thread has ended.

    Raises:
        ConfigurationError: The port is taken, or not ours to take.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            "metrics_port", port, f"a port that is free at {host} ({error})"
        ) from error

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end
