"""What Prometheus is told is what is so at the time of the scrape."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.runtime.node import BLOCKS, Node, until

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import TransferId, seconds
from pushkv.core.messages import Reason
from pushkv.observe.metrics import RuntimeCollector, serve_metrics
from pushkv.observe.phases import PHASES, Phases
from pushkv.runtime.health import Health
from pushkv.testing.reference_engine import Role
from pushkv_memory import MemoryFabric

PROMPT = tuple(range(100))
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Idle:
    """A runtime that was never started."""

    health: Health | None = None
    written_bytes = 0

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def scraped(port: int) -> Samples:
    """Every sample at that port, by name and labels beside the engine's."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset((sample.labels.items()) - {("engine", "D"), ("rank", "0")})): value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for value in [sample.value]
    }


def transfers(found: Samples, **labels: str) -> float:
    return found["pushkv_transfers_total", frozenset(labels.items())]


def test_a_scrape_tells_of_transfers_and_blocks_as_they_are() -> None:
    fabric, port = MemoryFabric(), free_port()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        end = serve_metrics(RuntimeCollector(consumer.runtime, "D", 0), "127.0.0.1", port)
        try:
            before = scraped(port)
            delivered = {"role": "consumer", "outcome": "delivered", "cause": ""}
            lost = {"role": "consumer", "outcome": "not_delivered"}
            assert transfers(before, **delivered) == 0
            assert all(transfers(before, **lost, cause=str(each)) == 0 for each in Reason)
            address = producer.address
            waits = consumer.engine.submit(TransferId("w"), PROMPT, Role.CONSUME, 1, address)
            consumer.engine.submit(TransferId("t"), PROMPT, Role.CONSUME, 1, address)
            producer.engine.submit(TransferId("t"), PROMPT, Role.PRODUCE)
            until(lambda: transfers(scraped(port), **delivered) == 1)
            now = scraped(port)
            assert 0 < now["pushkv_exposed_blocks", frozenset()] < BLOCKS
            assert now["pushkv_running", frozenset()] == 1
            assert waits.result(10).reason is not None
            after = scraped(port)
            assert transfers(after, **delivered) == 1
            assert sum(transfers(after, **lost, cause=str(each)) for each in Reason) == 1
            until(lambda: scraped(port)["pushkv_exposed_blocks", frozenset()] == 0)
        finally:
            end()
    with pytest.raises(OSError, match="refused"):
        scraped(port)


def test_before_the_start_there_are_counters_alone() -> None:
    names = {each.name for each in RuntimeCollector(Idle(), "D", 0).collect()}
    assert names == {"pushkv_transfers", "pushkv_events", "pushkv_written_bytes"}


def followed(fabric: MemoryFabric, name: str) -> tuple[Node, Phases]:
    phases = Phases(time.monotonic_ns)
    patient = {"expected": seconds(20), "waiting": seconds(20)}
    node = Node(fabric, name, changes=patient, observer=phases.step, lives=phases.life)
    return node, phases


def samples(collector: RuntimeCollector) -> dict[tuple[str, frozenset[str]], float]:
    """Every sample's value, by name and values of labels."""
    return {
        (sample.name, frozenset(sample.labels.values()) - {"E", "0"}): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def test_every_phase_of_a_transfer_is_counted_once_and_nothing_stays_under_way() -> None:
    fabric = MemoryFabric()
    (producer, served), (consumer, received) = followed(fabric, "P"), followed(fabric, "D")
    with producer, consumer:
        asks, writes = (
            RuntimeCollector(consumer.runtime, "E", 0, received),
            RuntimeCollector(producer.runtime, "E", 0, served),
        )
        waits = consumer.consume("t", PROMPT, producer.address)
        registered = frozenset({"consumer", "registered"})
        until(lambda: samples(asks)["pushkv_machines", registered] == 1)
        aged = samples(asks)["pushkv_oldest_age_seconds", registered]
        assert samples(asks)["pushkv_oldest_age_seconds", registered] > aged >= 0
        assert samples(asks)["pushkv_link_up", frozenset({"P"})] == 1
        producer.produce("t", PROMPT)
        assert waits.result(10).reason is None
        notified = frozenset({"producer", "notify"})
        until(lambda: samples(writes)["pushkv_phase_seconds_count", notified] == 1)
        both = {"consumer": samples(asks), "producer": samples(writes)}
        for phase, role in PHASES.items():
            key = frozenset({role, phase})
            assert both[role]["pushkv_phase_seconds_count", key] == 1, phase
            assert both[role]["pushkv_phase_seconds_sum", key] >= 0
        waited = frozenset({"producer", "registration_wait"})
        assert both["producer"]["pushkv_phase_seconds_sum", waited] == 0
        assert both["producer"]["pushkv_written_bytes_total", frozenset()] > 0
        until(
            lambda: (
                not any(
                    value
                    for (name, labels), value in samples(asks).items()
                    if name == "pushkv_machines" and "link" not in labels
                )
            )
        )


def test_the_documentation_names_every_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
    section = page.split("## Metrics", 1)[1].split("\n## ", 1)[0]
    with Node(MemoryFabric(), "P") as node:
        phases = Phases(time.monotonic_ns)
        families = list(RuntimeCollector(node.runtime, "P", 0, phases).collect())
    assert len(families) > 10
    for family in families:
        name = family.name.removeprefix("pushkv_") + "_total" * (family.type == "counter")
        assert f"`{name}" in section, name


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match="metrics_port") as caught:
            serve_metrics(RuntimeCollector(Idle(), "D", 0), "127.0.0.1", port)
    assert caught.value.value == port
