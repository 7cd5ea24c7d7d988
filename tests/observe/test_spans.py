"""Spans of real engines, as a collector gets them over OTLP: one trace, parents, causes."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from attrs import define, field
from tests.runtime.node import BLOCKS, QUICK, Node, until

from pushkv.core.errors import ConfigurationError
from pushkv.core.events import Cancelled
from pushkv.core.ids import EngineId, TransferId
from pushkv.observe.traceparent import read_traceparent, trace_of
from pushkv_memory import MemoryFabric

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pushkv[otel] is missing")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pushkv.observe.spans import Spans, otlp_exporter

PROMPT = tuple(range(100))
ROUTER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ERROR = 2


@define
class Seen:
    """A span as it came over the wire."""

    service: str
    span: Any

    @property
    def name(self) -> str:
        return str(self.span.name).removeprefix("pushkv.")

    @property
    def trace(self) -> str:
        return bytes(self.span.trace_id).hex()

    @property
    def transfer(self) -> str:
        found = {each.key: each.value.string_value for each in self.span.attributes}
        return str(found.get("pushkv.transfer", ""))

    def holds(self, other: Seen) -> bool:
        return bool(
            self.span.start_time_unix_nano <= other.span.start_time_unix_nano
            and other.span.end_time_unix_nano <= self.span.end_time_unix_nano
        )


@define
class Collector:
    """A real HTTP server that speaks OTLP."""

    port: int = 0
    seen: list[Seen] = field(factory=list)

    def of(self, trace: str) -> list[Seen]:
        return [each for each in self.seen if each.trace == trace]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                named = {each.key: each.value.string_value for each in resource.resource.attributes}
                for scope in resource.scope_spans:
                    collector.seen += [Seen(named["service.name"], each) for each in scope.spans]
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield collector
        server.shutdown()
        thread.join()


TRANSFERS = {"done": f"{ROUTER}-done", "plain": "plain", "gone": f"{ROUTER}-gone"}


@pytest.fixture(scope="module")
def spans(collector: Collector) -> Collector:
    """Two transfers that are done and one that the consumer gives up, exported to the end."""
    fabric, makers = MemoryFabric(), []
    for name in ("P", "D"):
        exporter = otlp_exporter(f"http://127.0.0.1:{collector.port}")
        makers.append(Spans(exporter, EngineId(name), connect=QUICK.connect))
    with (
        Node(fabric, "P", observer=makers[0].observe) as producer,
        Node(fabric, "D", observer=makers[1].observe) as consumer,
    ):
        for name in ("done", "plain"):
            waits = consumer.consume(TRANSFERS[name], PROMPT, producer.address)
            producer.produce(TRANSFERS[name], PROMPT).result(10)
            assert waits.result(10).tokens
        gone = consumer.consume(TRANSFERS["gone"], PROMPT, producer.address)
        until(lambda: consumer.free < BLOCKS)
        consumer.runtime.bridge.submit(Cancelled(TransferId(TRANSFERS["gone"])))
        assert gone.result(10).reason is not None
        until(lambda: consumer.free == BLOCKS)
    for maker in makers:
        maker.close()
    return collector


def one(found: list[Seen], service: str, name: str, transfer: str) -> Seen:
    fits = [
        each
        for each in found
        if (each.service, each.name, each.transfer) == (service, name, transfer)
    ]
    assert len(fits) == 1, (service, name, [each.name for each in found])
    return fits[0]


def below(found: list[Seen], parent: Seen) -> dict[str, Seen]:
    children = [each for each in found if each.span.parent_span_id == parent.span.span_id]
    return {each.name: each for each in children}


@pytest.mark.parametrize("name", ["done", "plain"])
def test_both_engines_are_in_one_trace_and_phases_nest(spans: Collector, name: str) -> None:
    transfer = TRANSFERS[name]
    trace = trace_of(TransferId(transfer))
    found = spans.of(f"{trace.trace_id:032x}")
    produce = one(found, "P", "produce", transfer)
    consume = one(found, "D", "consume", transfer)
    parent = f"{trace.span_id:016x}" if trace.span_id else ""
    for top in (produce, consume):
        assert bytes(top.span.parent_span_id).hex() == parent
        assert top.span.status.code != ERROR
    attempt = below(found, produce)["attempt"]
    assert below(found, produce).keys() == {"prefill", "attempt"}
    assert below(found, attempt).keys() == {"write", "notify"}
    assert below(found, consume).keys() == {"registration", "admission"}
    for outer in (produce, consume, attempt):
        for inner in below(found, outer).values():
            assert outer.holds(inner), (outer.name, inner.name)
    assert consume.holds(below(found, attempt)["write"]), "one host, one clock"
    assert any("WriteDone" in each.name for each in attempt.span.events)
    assert any("complete" in each.name for each in produce.span.events)


def test_what_was_given_up_has_its_cause_as_status(spans: Collector) -> None:
    found = spans.of(f"{trace_of(TransferId(ROUTER)).trace_id:032x}")
    consume = one(found, "D", "consume", TRANSFERS["gone"])
    assert (consume.span.status.code, consume.span.status.message) == (ERROR, "cancelled")


def test_a_trace_is_the_routers_or_derived() -> None:
    router = read_traceparent(ROUTER)
    assert router is not None
    assert str(router) == ROUTER
    assert (
        trace_of(TransferId(f"{ROUTER}-1/0.1")) == trace_of(TransferId(f"{ROUTER}/2.0")) == router
    )
    derived = trace_of(TransferId("a"))
    assert derived == trace_of(TransferId("a")) != trace_of(TransferId("b"))
    assert derived.span_id == 0


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "a" * 55,
        ROUTER.replace("00-", "ff-", 1),
        ROUTER.upper(),
        ROUTER[:-1],
        f"{ROUTER}1",
        ROUTER.replace("b7ad6b7169203331", "0" * 16),
        ROUTER.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
    ],
)
def test_what_is_no_traceparent_is_none(text: str | None) -> None:
    assert read_traceparent(text) is None


def test_a_carried_traceparent_goes_before_what_is_derived(collector: Collector) -> None:
    fabric = MemoryFabric()
    maker = Spans(otlp_exporter(f"http://127.0.0.1:{collector.port}"), EngineId("carried"))
    carried = ROUTER.replace("0af7", "1111")
    maker.carry(TransferId("a"), carried)
    maker.carry(TransferId("a"), "garbage")
    with Node(fabric, "P") as producer, Node(fabric, "D", observer=maker.observe) as consumer:
        producer.produce("a", PROMPT).result(10)
        assert consumer.consume("a", PROMPT, producer.address).result(10).tokens
    maker.close()
    [consume] = [each for each in collector.of(carried[3:35]) if each.name == "consume"]
    assert bytes(consume.span.parent_span_id).hex() == "b7ad6b7169203331"


def test_a_collector_that_is_down_costs_spans_and_nothing_else() -> None:
    fabric = MemoryFabric()
    makers = [Spans(otlp_exporter("http://127.0.0.1:9/"), EngineId(name)) for name in ("P", "D")]
    with (
        Node(fabric, "P", observer=makers[0].observe) as producer,
        Node(fabric, "D", observer=makers[1].observe) as consumer,
    ):
        for name in ("a", "b"):
            producer.produce(name, PROMPT).result(10)
            assert consumer.consume(name, PROMPT, producer.address).result(10).tokens
        until(lambda: consumer.free == producer.free == BLOCKS)
    for maker in makers:
        maker.close()


def test_an_endpoint_that_is_no_url_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="otel_endpoint = 'collector:4318'"):
        otlp_exporter("collector:4318")


def test_nothing_is_imported_where_nobody_asks() -> None:
    program = (
        "import sys, pushkv.runtime, pushkv.observe.trace, pushkv.testing.reference_engine\n"
        "assert not [each for each in sys.modules if each.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
