"""One engine with its runtime, over a fabric of this process: real sockets, real bytes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import pytest
from attrs import evolve

from pushkv.core.consumer import ConsumerStatus
from pushkv.core.effects import ProducerAddress
from pushkv.core.ids import EngineId, TransferId, seconds
from pushkv.core.machines import StepRecord
from pushkv.core.policy import Policy
from pushkv.observe.replay import check_trace
from pushkv.runtime import Runtime, RuntimeConfig
from pushkv.runtime.loop import Loop
from pushkv.testing.reference_engine import Generation, ReferenceCache, ReferenceEngine, Role
from pushkv_memory import MemoryFabric, MemoryTransport

QUICK = Policy(
    lease=seconds(0.9),
    resend=seconds(0.05),
    query=seconds(0.1),
    waiting=seconds(2),
    settle=seconds(0.3),
    expected=seconds(0.3),
    hold=seconds(0.5),
    transfer=seconds(1),
    write_backoff=seconds(0.01),
    retry_backoff=seconds(0.02),
    connect=seconds(0.3),
    connect_backoff=seconds(0.02),
)
BLOCKS = 24


def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait for `condition`, looking often."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.002)


class Node:
    """Start with `with`; stops on the way out, whatever the test has done to it.

    Its trace must then be one that the tables allow.
    """

    def __init__(self, fabric: MemoryFabric, name: str, **config: Any) -> None:
        self.fabric = fabric
        self.cache = ReferenceCache(layers=2, block_count=BLOCKS)
        policy = evolve(QUICK, **config.pop("changes", {}))
        layout = config.pop("layout", self.cache.layout)
        self.keeps_trace = "trace_path" in config
        unheard_of = Path(tempfile.gettempdir(), f"pushkv-{uuid4().hex}.ndjson")
        self.trace = config.pop("trace_path", unheard_of)
        self.config = RuntimeConfig(
            EngineId(name), layout, policy=policy, trace_path=self.trace, **config
        )
        self.runtime = Runtime(self.config, MemoryTransport(fabric))
        self.engine = ReferenceEngine(self.cache, self.runtime.bridge, chunk_tokens=32)

    def __enter__(self) -> Self:
        self.runtime.start()
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.stop(0.5)
        self.engine.stop()
        if self.trace.is_file():
            report = check_trace(self.trace)
            if not self.keeps_trace:
                self.trace.unlink()
            assert report.illegal is None, report.illegal

    @property
    def address(self) -> ProducerAddress:
        return ProducerAddress(*self.runtime.address)

    @property
    def free(self) -> int:
        return len(self.cache.free)

    def produce(self, transfer: str, prompt: tuple[int, ...]) -> Future[Generation]:
        return self.engine.submit(TransferId(transfer), prompt, Role.PRODUCE)

    def consume(
        self, transfer: str, prompt: tuple[int, ...], producer: ProducerAddress, tokens: int = 4
    ) -> Future[Generation]:
        name = TransferId(transfer)
        return self.engine.submit(name, prompt, Role.CONSUME, tokens, producer)


def right(prompt: tuple[int, ...], tokens: int = 4) -> tuple[int, ...]:
    """What a lone engine answers."""
    from pushkv.testing.reference_engine import generate

    return generate(ReferenceCache(layers=2, block_count=BLOCKS), prompt, tokens)


def watch_registrations(monkeypatch: pytest.MonkeyPatch) -> list[StepRecord]:
    """The steps that will bring a consumer into REGISTERED, as they happen."""
    seen: list[StepRecord] = []
    observe = Loop._observe

    def watch(self: Loop, record: StepRecord) -> None:
        if getattr(record.after, "status", None) == ConsumerStatus.REGISTERED:
            seen.append(record)
        observe(self, record)

    monkeypatch.setattr(Loop, "_observe", watch)
    return seen
