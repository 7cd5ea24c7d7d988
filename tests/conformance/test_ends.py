"""Ends in processes of their own: what goes wrong there is told here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pushkv.core.errors import ConfigurationError, TransportError
from pushkv.core.ids import EngineId, Incarnation, Worker
from pushkv.testing import ConformanceError, LocalEnds, ProcessEnds, check_transport
from pushkv.testing.conformance.end import SMALL_AT, End
from pushkv.transport import Region, Transport, Write
from pushkv_memory import MemoryFabric, MemoryTransport

SMALL = 2 << 20


class DiesOfAPost(MemoryTransport):
    def post(self, write: Write) -> None:
        os._exit(7)


class DoesNotStart(MemoryTransport):
    def start(
        self,
        worker: Worker,
        regions: Sequence[Region],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        raise TransportError("no such device")


@pytest.mark.parametrize(
    ("transport", "said"),
    [
        (DiesOfAPost, "ended during post, exit code 7"),
        (DoesNotStart, "start of Worker"),
        (MemoryTransport, "is not on this fabric"),
    ],
)
def test_what_happens_in_a_process_is_said(transport: Callable[[], Transport], said: str) -> None:
    with pytest.raises(ConformanceError) as raised:
        check_transport(lambda: ProcessEnds(transport, large_bytes=SMALL), ["bytes_arrive"])
    assert raised.value.check == "bytes_arrive"
    assert said in raised.value.seen


def test_the_trace_of_another_process_comes_along() -> None:
    with pytest.raises(ConformanceError) as raised:
        check_transport(lambda: ProcessEnds(DoesNotStart, large_bytes=SMALL), ["bytes_arrive"])
    assert raised.value.__cause__ is not None
    assert "in start\n" in "".join(raised.value.__cause__.__notes__)


def test_a_factory_that_no_process_can_import_is_refused() -> None:
    with pytest.raises(ConfigurationError) as raised:
        ProcessEnds(lambda: MemoryTransport(MemoryFabric()))
    assert raised.value.field == "factory"


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ConfigurationError) as raised:
        check_transport(lambda: LocalEnds(MemoryTransport, large_bytes=SMALL - 1))
    assert raised.value.field == "large_bytes"


def peek(end: End, at: int) -> int:
    end.memory[at + 1] = 43
    return int(end.memory[at])


def test_memory_is_shared_and_a_successor_has_fresh_memory_at_the_same_addresses() -> None:
    ends = ProcessEnds(MemoryTransport, {"PUSHKV_SEEN": "yes"}, large_bytes=SMALL)
    try:
        first = ends.open(Worker(EngineId("e"), Incarnation(1), 0))
        first.memory[SMALL_AT] = 42
        assert first.run(peek, SMALL_AT) == 42
        assert first.memory[SMALL_AT + 1] == 43
        assert first.run(environment, "PUSHKV_SEEN") == "yes"
        first.crash()
        assert first.memory[SMALL_AT + 1] == 43
        second = ends.open(Worker(EngineId("e"), Incarnation(2), 0), first)
        assert second.address == first.address
        assert second.run(peek, SMALL_AT) == 0
        assert np.count_nonzero(second.memory) == 1
    finally:
        ends.close()


def environment(end: End, name: str) -> str:
    return os.environ[name]
