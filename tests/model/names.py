"""Workers, attempts and a transport's promises, short enough to read in a test."""

from __future__ import annotations

from pushkv.core.capabilities import Capabilities
from pushkv.core.ids import AttemptId, Duration, EngineId, Incarnation, TransferId, Worker


def worker(engine: str, incarnation: int = 1, rank: int = 0) -> Worker:
    return Worker(EngineId(engine), Incarnation(incarnation), rank)


def attempt(number: int = 0, incarnation: int = 1) -> AttemptId:
    return AttemptId(EngineId("d"), Incarnation(incarnation), 0, 0, TransferId("t"), number)


STRONG = Capabilities("test", done_means_visible=True)
WEAK = Capabilities("test", done_means_visible=False)
BOUNDED = Capabilities(
    "test", done_means_visible=True, write_bound=Duration(10), death_bound=Duration(3)
)
