"""OpenTelemetry spans of transfers, made from what the runtime's observer is told.

A prefill engine makes one span of a transfer, with its prefill and each attempt below it; a decode
engine one of each attempt. All are made when their transfer has ended, with the times at which
things happened, so that an observer only takes notes. Exporting is a thread of its own, with a
bounded queue: where its endpoint is down, spans are lost and nothing else.

Needs ``pushkv[otel]``; vLLM brings it, too.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from attrs import define, field, frozen

from pushkv.core import producer
from pushkv.core.consumer import Consumer
from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    LinkDown,
    NotDelivered,
    PostWrite,
    Send,
)
from pushkv.core.errors import ConfigurationError, MissingDependencyError
from pushkv.core.events import (
    Arrived,
    Computed,
    PrefillAborted,
    RegistrationReceived,
    WriteDone,
    WriteFailed,
    WriteRefused,
    WriteUnknown,
)
from pushkv.core.ids import Duration, EngineId, TransferId
from pushkv.core.machines import StepRecord
from pushkv.core.messages import (
    Complete,
    Failed,
    Received,
    Registered,
    Revoked,
    Unproven,
)
from pushkv.core.producer import Producer

from .traceparent import TraceParent, read_traceparent, trace_of

try:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import (
        NonRecordingSpan,
        Span,
        SpanContext,
        Status,
        StatusCode,
        TraceFlags,
        set_span_in_context,
    )
except ImportError as _error:
    raise MissingDependencyError("spans need OpenTelemetry: install pushkv[otel]") from _error

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Spans", "Traces", "otlp_exporter"]

EXPORT_TIMEOUT_S = 5.0
LEGS_MOST = 4096
"""Transfers that are noted at a time; beyond, the oldest gets no span."""
VERDICTS = (Complete, Failed, Revoked, Unproven)
WRITE_ENDS = (WriteDone, WriteFailed, WriteRefused, WriteUnknown)


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Exports to an OTLP collector over HTTP.

    Args:
        endpoint: ``http://HOST:4318``, to which ``/v1/traces`` is added, or a URL with its path.

    Raises:
        ConfigurationError: It is no URL.
        MissingDependencyError: The exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise MissingDependencyError(
            "spans need the OTLP exporter: install pushkv[otel]"
        ) from error
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError("otel_endpoint", endpoint, "http://HOST:PORT of an OTLP collector")
    if parts.path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)


class _Ids(IdGenerator):
    """Random spans in the trace that the next one belongs to."""

    def __init__(self) -> None:
        self.trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id or random.getrandbits(128) or 1

    def generate_span_id(self) -> int:
        return random.getrandbits(64) or 1


class Traces:
    """Where the spans of one process's service go. One thread."""

    def __init__(self, exporter: SpanExporter, service: str) -> None:
        self._ids = _Ids()
        resource = Resource.create({"service.name": service})
        self._provider = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pushkv")

    def begin(
        self, name: str, at: int | None = None, parent: TraceParent | Span | None = None
    ) -> Span:
        """Begin a span: below `parent`, at the top of the trace that it names, or of a new one.

        Args:
            name: What it is about.
            at: Nanoseconds since 1970; now by default.
            parent: The span, or the place in a trace; None for a new trace.
        """
        context = Context()
        self._ids.trace_id = 0
        if isinstance(parent, Span):
            context = set_span_in_context(parent, context)
        elif parent is not None and parent.span_id:
            flags = TraceFlags(parent.flags)
            remote = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
            context = set_span_in_context(NonRecordingSpan(remote), context)
        elif parent is not None:
            self._ids.trace_id = parent.trace_id
        return self._tracer.start_span(name, context, start_time=at)

    def close(self) -> None:
        """Export what is left, and end. Blocks for about the export's time-out at most."""
        self._provider.shutdown()


@frozen
class _Note:
    at: int
    text: str


@define
class _Attempt:
    """What one attempt is known by, in nanoseconds of the runtime's clock."""

    number: int
    begin: int
    end: int = 0
    marks: dict[str, int] = field(factory=dict)
    notes: list[_Note] = field(factory=list)
    cause: str = ""

    def first(self, name: str, at: int) -> None:
        self.marks.setdefault(name, at)


@define
class _Leg:
    """One transfer at a prefill engine, or one attempt at a decode engine."""

    begin: int
    attempts: OrderedDict[int, _Attempt] = field(factory=OrderedDict)
    marks: dict[str, int] = field(factory=dict)
    cause: str = ""


class Spans:
    """Makes spans of a runtime's transfers: give `observe` to its `RuntimeConfig.observer`.

    Args:
        exporter: Where they go.
        engine: The engine's name, which becomes the service's.
        rank: The worker's.
        connect: `Policy.connect` of the runtime: tells when an attempt's blocks were offered.
        clock: The runtime's.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        engine: EngineId,
        rank: int = 0,
        connect: Duration = Duration(0),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._traces = Traces(exporter, engine)
        self._rank = rank
        self._connect = connect
        self._clock = clock
        self._legs: OrderedDict[tuple[str, TransferId, int], _Leg] = OrderedDict()
        self._carried: OrderedDict[TransferId, TraceParent] = OrderedDict()

    def carry(self, transfer: TransferId, traceparent: str) -> None:
        """The request of this transfer carries a `traceparent`. What is none is ignored.

        Any thread; what comes after the transfer has ended is too late.
        """
        parent = read_traceparent(traceparent)
        if parent is not None:
            self._carried[transfer] = parent
            while len(self._carried) > LEGS_MOST:
                self._carried.popitem(last=False)

    def observe(self, record: StepRecord) -> None:
        """Take note of one step. In the runtime's thread; never blocks."""
        if record.machine == "producer":
            self._produced(record)
        elif record.machine == "consumer":
            self._consumed(record)
        elif record.machine == "request":
            self._told(record)

    def close(self) -> None:
        """Export what is left; what has not ended gets no span. Call it after the runtime's stop.

        Blocks for about `EXPORT_TIMEOUT_S` at most.
        """
        self._traces.close()

    # -- notes

    def _keep(self, key: tuple[str, TransferId, int], begin: int) -> _Leg:
        if key not in self._legs:
            self._legs[key] = _Leg(begin)
            if len(self._legs) > LEGS_MOST:
                self._legs.popitem(last=False)
        return self._legs[key]

    def _consumed(self, record: StepRecord) -> None:
        assert isinstance(record.before, Consumer)
        state, name = record.before, record.before.attempt
        offered = state.deadline_at - self._connect if state.epoch is None else record.now
        leg = self._keep(("consume", name.transfer, name.attempt), min(offered, record.now))
        attempt = leg.attempts.setdefault(name.attempt, _Attempt(name.attempt, leg.begin))
        if isinstance(record.event, Registered):
            attempt.first("registered", record.now)
        elif isinstance(record.event, VERDICTS):
            attempt.marks["verdict"] = record.now

    def _told(self, record: StepRecord) -> None:
        for effect in record.effects:
            if not isinstance(effect, Delivered | NotDelivered | BlocksReleased):
                continue
            key = ("consume", effect.transfer, effect.attempt)
            leg = self._legs.get(key)
            if leg is None or effect.attempt not in leg.attempts:
                continue
            attempt = leg.attempts[effect.attempt]
            if isinstance(effect, BlocksReleased):
                attempt.first("released", record.now)
            else:
                attempt.first("told", record.now)
                attempt.cause = str(effect.reason) if isinstance(effect, NotDelivered) else ""
            if {"told", "released"} <= attempt.marks.keys():
                del self._legs[key]
                self._emit_consumer(effect.transfer, attempt, record.now)

    def _produced(self, record: StepRecord) -> None:
        before, after, event = record.before, record.after, record.event
        assert isinstance(before, Producer)
        assert isinstance(after, Producer)
        key = ("produce", before.transfer, before.consumer_rank)
        status = after.status
        if isinstance(event, Arrived) and before.status in producer.OVER:
            self._end_producer(key, record.now)
        if key not in self._legs and status in producer.OVER:
            return
        leg = self._keep(key, record.now)
        self._note_prefill(leg, record)
        if isinstance(event, RegistrationReceived):
            name = event.register.attempt.attempt
            if name not in leg.attempts:
                self._end_attempt(leg, record.now)
                leg.attempts[name] = _Attempt(name, record.now)
        if leg.attempts:
            _note_attempt(next(reversed(leg.attempts.values())), record)
        if status in producer.TERMINAL:
            self._end_producer(key, record.now)

    def _note_prefill(self, leg: _Leg, record: StepRecord) -> None:
        match record.event:
            case Arrived():
                leg.marks.setdefault("arrived", record.now)
            case Computed(final=True):
                leg.marks.setdefault("prefilled", record.now)
            case PrefillAborted(reason=reason):
                leg.marks.setdefault("prefilled", record.now)
                leg.cause = str(reason)

    def _end_attempt(self, leg: _Leg, at: int) -> None:
        for attempt in leg.attempts.values():
            attempt.end = attempt.end or at

    # -- spans

    def _begin(
        self, name: str, at: int, ahead: int, parent: TraceParent | Span, transfer: TransferId
    ) -> Span:
        span = self._traces.begin(name, at + ahead, parent)
        span.set_attributes({"pushkv.transfer": transfer, "pushkv.rank": self._rank})
        return span

    def _phases(
        self, parent: Span, ahead: int, end: int, phases: Iterator[tuple[str, int, int | None]]
    ) -> None:
        for name, begin, over in phases:
            span = self._traces.begin(name, begin + ahead, parent)
            span.end(min(end, max(begin, end if over is None else over)) + ahead)

    def _emit_consumer(self, transfer: TransferId, attempt: _Attempt, end: int) -> None:
        ahead = time.time_ns() - self._clock()
        parent = self._carried.pop(transfer, None) or trace_of(transfer)
        span = self._begin("pushkv.consume", attempt.begin, ahead, parent, transfer)
        span.set_attribute("pushkv.attempt", attempt.number)
        self._phases(span, ahead, end, _consumer_phases(attempt, end))
        _close(span, attempt.cause, end + ahead)

    def _end_producer(self, key: tuple[str, TransferId, int], end: int) -> None:
        leg = self._legs.pop(key, None)
        if leg is None:
            return
        transfer = key[1]
        ahead = time.time_ns() - self._clock()
        parent = self._carried.pop(transfer, None) or trace_of(transfer)
        span = self._begin("pushkv.produce", leg.begin, ahead, parent, transfer)
        if "arrived" in leg.marks:
            phase = ("pushkv.prefill", leg.marks["arrived"], leg.marks.get("prefilled"))
            self._phases(span, ahead, end, iter([phase]))
        self._end_attempt(leg, end)
        for attempt in leg.attempts.values():
            ended = f"attempt {attempt.number}: {attempt.cause or 'complete'}"
            span.add_event(ended, {"pushkv.attempt": attempt.number}, attempt.end + ahead)
            child = self._begin("pushkv.attempt", attempt.begin, ahead, span, transfer)
            child.set_attribute("pushkv.attempt", attempt.number)
            for note in attempt.notes:
                child.add_event(note.text, timestamp=note.at + ahead)
            self._phases(child, ahead, attempt.end, _producer_phases(attempt))
            _close(child, attempt.cause, attempt.end + ahead)
        last = next(reversed(leg.attempts.values()), None)
        _close(span, leg.cause or (last.cause if last is not None else ""), end + ahead)


def _close(span: Span, cause: str, at: int) -> None:
    if cause:
        span.set_status(Status(StatusCode.ERROR, cause))
    span.end(at)


def _note_attempt(attempt: _Attempt, record: StepRecord) -> None:
    now, event = record.now, record.event
    if isinstance(event, WRITE_ENDS):
        attempt.marks["written"] = now
        attempt.notes.append(_Note(now, f"{type(event).__name__} {event.part}"))
    elif isinstance(event, LinkDown) and "verdict" not in attempt.marks:
        attempt.cause = "link_lost"
    elif isinstance(event, Received):
        attempt.first("received", now)
    for effect in record.effects:
        if isinstance(effect, PostWrite):
            attempt.first("ordered", now)
        elif isinstance(effect, Send) and isinstance(effect.message, VERDICTS):
            attempt.first("verdict", now)
            attempt.cause = _cause(effect.message)


def _cause(verdict: object) -> str:
    if isinstance(verdict, Failed):
        return str(verdict.reason)
    return "" if isinstance(verdict, Complete) else type(verdict).__name__.lower()


def _consumer_phases(attempt: _Attempt, end: int) -> Iterator[tuple[str, int, int | None]]:
    yield "pushkv.registration", attempt.begin, attempt.marks.get("registered", end)
    if "verdict" in attempt.marks:
        yield "pushkv.admission", attempt.marks["verdict"], attempt.marks["told"]


def _producer_phases(attempt: _Attempt) -> Iterator[tuple[str, int, int | None]]:
    if "ordered" in attempt.marks:
        yield "pushkv.write", attempt.marks["ordered"], attempt.marks.get("written")
    if "verdict" in attempt.marks:
        yield "pushkv.notify", attempt.marks["verdict"], attempt.marks.get("received")
