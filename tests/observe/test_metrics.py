"""What Prometheus is told is what is so at the time of the scrape."""

from __future__ import annotations

import socket
import urllib.request
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.runtime.node import BLOCKS, Node, until

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason
from pushkv.observe.metrics import RuntimeCollector, serve_metrics
from pushkv.runtime.health import Health
from pushkv.testing.reference_engine import Role
from pushkv_memory import MemoryFabric

PROMPT = tuple(range(100))
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Idle:
    """A runtime that was never started."""

    health: Health | None = None

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
    assert names == {"pushkv_transfers", "pushkv_events"}


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match="metrics_port") as caught:
            serve_metrics(RuntimeCollector(Idle(), "D", 0), "127.0.0.1", port)
    assert caught.value.value == port
