"""Transfers over adapters that share their bandwidth equally, and threads that post one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attrs import define

from .settings import LinkModel
from .timeline import Entry, Timeline, nanoseconds

__all__ = ["Fabric", "Poster"]


@define(eq=False)
class _Flow:
    source: str
    target: str
    left_bytes: float
    since: int
    rate: float
    ended: Callable[[], None]
    entry: Entry | None = None


class Fabric:
    """All transfers under way; whoever begins or ends changes the shares of its neighbours."""

    def __init__(self, timeline: Timeline, link: LinkModel) -> None:
        self._timeline = timeline
        self._bytes_per_ns = link.bandwidth_bytes_s / 1e9
        self._latency = nanoseconds(link.latency_s)
        self._out: dict[str, dict[_Flow, None]] = {}
        self._in: dict[str, dict[_Flow, None]] = {}
        self.moved_bytes: int = 0

    def start(self, source: str, target: str, size_bytes: int, ended: Callable[[], None]) -> None:
        """Move so many bytes; `ended` is called when the last has landed."""
        self.moved_bytes += size_bytes
        flow = _Flow(source, target, size_bytes, 0, 0.0, ended)
        self._timeline.after(self._latency, lambda: self._begin(flow))

    def _begin(self, flow: _Flow) -> None:
        flow.since = self._timeline.now
        self._out.setdefault(flow.source, {})[flow] = None
        self._in.setdefault(flow.target, {})[flow] = None
        self._share(flow)

    def _share(self, changed: _Flow) -> None:
        now = self._timeline.now
        sharing = {**self._out[changed.source], **self._in[changed.target]}
        for flow in sharing:
            flow.left_bytes -= flow.rate * (now - flow.since)
            flow.since = now
            crowd = max(len(self._out[flow.source]), len(self._in[flow.target]))
            flow.rate = self._bytes_per_ns / crowd
            if flow.entry is not None:
                Timeline.cancel(flow.entry)
            left = max(0, round(flow.left_bytes / flow.rate))
            flow.entry = self._timeline.after(left, partial(self._end, flow))

    def _end(self, flow: _Flow) -> None:
        flow.entry = None
        del self._out[flow.source][flow]
        del self._in[flow.target][flow]
        self._share(flow)
        flow.ended()


class Poster:
    """A thread that prepares and posts one transfer after the other."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._free_at = 0

    def post(self, takes: int, posted: Callable[[], None]) -> None:
        """Call when what is posted before, and then this, is done; `takes` in nanoseconds."""
        self._free_at = max(self._free_at, self._timeline.now) + takes
        self._timeline.at(self._free_at, posted)
