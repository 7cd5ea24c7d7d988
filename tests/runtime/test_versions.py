"""Engines of two versions, over real sockets: neighbours transfer, others refuse and say why."""

from __future__ import annotations

from typing import Any

import pytest
from tests.runtime.node import Node, right

from pushkv import wire
from pushkv.core.messages import Hello, Message, Query, Reason, Refused
from pushkv.runtime import Runtime, channel
from pushkv.testing.reference_engine import ReferenceEngine
from pushkv_memory import MemoryFabric, MemoryTransport

PROMPT = tuple(range(100))


class OtherNode(Node):
    """A node whose runtime offers `protocol`, over a transport of `version`."""

    def __init__(self, fabric: MemoryFabric, name: str, protocol: int, version: str = "1") -> None:
        super().__init__(fabric, name)
        self.runtime.stop()
        transport = MemoryTransport(fabric)
        transport.version = version
        self.runtime = Runtime(self.config, transport)
        self.runtime.protocol = protocol
        self.engine = ReferenceEngine(self.cache, self.runtime.bridge, chunk_tokens=32)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[type[Message], int]]:
    """What is sent, and in which protocol, by builds that have a second one."""
    codecs = dict(wire._CODECS)
    query = codecs[Query]
    codecs[Query] = wire._Codec(99, query.record, query.values, query.build)
    monkeypatch.setitem(wire._SPOKEN, 2, wire._words(codecs))
    found: list[tuple[type[Message], int]] = []

    def frame(message: Message, *protocol: int) -> bytes:
        data = wire.frame(message, *protocol)
        found.append((type(message), data[4]))
        return data

    monkeypatch.setattr(channel, "frame", frame)
    return found


@pytest.mark.parametrize(("producer", "consumer"), [(1, 2), (2, 1), (2, 2), (1, 1)])
def test_neighbours_transfer_in_the_words_of_the_older(
    sent: list[tuple[type[Message], int]], producer: int, consumer: int
) -> None:
    fabric = MemoryFabric()
    with OtherNode(fabric, "P", producer) as p, OtherNode(fabric, "D", consumer) as d:
        p.produce("t", PROMPT).result(10)
        generation = d.consume("t", PROMPT, p.address).result(10)
        assert (generation.tokens, generation.prefilled) == (right(PROMPT), False)
    assert {number for kind, number in sent if kind is Hello} == {1}
    assert {number for kind, number in sent if kind is not Hello} == {min(producer, consumer)}


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        ((1, "1"), (3, "1"), ("protocol", "1", "3")),
        ((1, "nixl 1.5.1 UCX"), (1, "nixl 1.6.0 UCX"), ("transport_version", "1.5.1", "1.6.0")),
    ],
)
def test_others_refuse_each_other_and_name_both(
    sent: list[tuple[type[Message], int]],
    caplog: pytest.LogCaptureFixture,
    ours: Any,
    theirs: Any,
    told: tuple[str, str, str],
) -> None:
    fabric = MemoryFabric()
    with OtherNode(fabric, "P", *ours) as p, OtherNode(fabric, "D", *theirs) as d:
        p.produce("t", PROMPT).result(10)
        generation = d.consume("t", PROMPT, p.address).result(10)
        assert (generation.prefilled, generation.reason) == (True, Reason.REFUSED)
    assert (Refused, 1) in sent
    lines = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert lines
    assert all(word in line for word in told for line in lines[:1])
