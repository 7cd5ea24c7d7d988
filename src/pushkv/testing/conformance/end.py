"""One end of a transfer: a transport, its memory and its news. It lives where its memory is."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from pushkv.core.capabilities import Capabilities
from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import FOREVER, AttemptId, Worker
from pushkv.transport import Arrival, Completion, Permit, Region, Segments, Transport, Write

__all__ = [
    "LARGE_AT",
    "LARGE_BYTES",
    "SMALL_AT",
    "SMALL_BYTES",
    "Bytes",
    "End",
    "Facts",
    "Name",
    "Order",
    "Usage",
    "memory_bytes",
    "segments",
]

Bytes = NDArray[np.uint8]
Name = tuple[AttemptId, int]
"""Attempt and number of a part: what its completion and its arrival are known by."""

_GUARD_BYTES = 1 << 16
SMALL_AT = _GUARD_BYTES
SMALL_BYTES = 4 << 20
LARGE_AT = SMALL_AT + SMALL_BYTES + _GUARD_BYTES + 64
"""Each end's memory: two registered regions, with memory before, between and after them that is
not. The second begins and ends off the borders of pages."""
LARGE_BYTES = (64 << 20) + 4000
"""Length of the second region unless the ends say otherwise, and of the largest WRITE."""
_LARGE_BYTES_MIN = 2 << 20

_GLANCE_S = 0.01
_CLOSE_S = 5.0
_SIBLING_RANKS = 1000


def memory_bytes(large_bytes: int) -> int:
    """How much memory an end has whose second region has `large_bytes`; a multiple of 8.

    Raises:
        ConfigurationError: That is too little.
    """
    if large_bytes < _LARGE_BYTES_MIN:
        raise ConfigurationError("large_bytes", large_bytes, f"at least {_LARGE_BYTES_MIN}")
    return (LARGE_AT + large_bytes + _GUARD_BYTES + 7) // 8 * 8


def segments(rows: list[tuple[int, int]]) -> Segments:
    """(address, length) pairs as the contract wants them."""
    return np.array(rows, np.uint64).reshape(-1, 2)


@frozen(eq=False)
class Order:
    """A WRITE to be posted, in a form that travels between processes.

    Attributes:
        permit_ns: For how long from now the permit lasts, in nanoseconds; None for ever.
        gate: The number of the gate that says whether the source is ready; None for ready.
    """

    peer: Worker
    attempt: AttemptId
    part: int
    token: int
    source: Segments
    destination: Segments
    permit_ns: int | None = None
    gate: int | None = None

    @property
    def name(self) -> Name:
        """The name of its part."""
        return self.attempt, self.part

    @property
    def length_bytes(self) -> int:
        """The bytes it moves."""
        return int(self.source[:, 1].sum())


@frozen
class Facts:
    """What a transport says of itself."""

    memory: bytes
    version: str
    capabilities: Capabilities


@frozen
class Usage:
    """What a process holds."""

    threads: int
    descriptors: int

    @classmethod
    def now(cls) -> Usage:
        """Of this process, threads that Python does not know of included."""
        return cls(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))


class End:
    """Everything here is called by one thread, in the process whose memory it is.

    Attributes:
        slowest: The call into the transport that took longest, and its seconds.
        kept: A sibling that outlives the call that made it.
    """

    def __init__(
        self,
        factory: Callable[[], Transport],
        worker: Worker,
        memory: Bytes,
        address: int,
        large_bytes: int,
    ) -> None:
        self.factory = factory
        self.large_bytes = large_bytes
        self.worker = worker
        self.memory = memory
        self.address = address
        self.news: threading.Event = threading.Event()
        self.completions: list[Completion] = []
        self.arrivals: list[Arrival] = []
        self.slowest: tuple[str, float] = ("", 0.0)
        self.kept: End | None = None
        self._gates: dict[int, threading.Event] = {}
        self._siblings = 0
        self.transport: Transport = factory()
        regions = [
            Region(address + SMALL_AT, SMALL_BYTES),
            Region(address + LARGE_AT, large_bytes),
        ]
        self.transport.start(worker, regions, time.monotonic_ns, self.news.set)

    def sibling(self) -> End:
        """Another transport of this process, over the same memory."""
        self._siblings += 1
        me = self.worker
        worker = Worker(me.engine, me.incarnation, me.rank + _SIBLING_RANKS + self._siblings)
        return End(self.factory, worker, self.memory, self.address, self.large_bytes)

    def facts(self) -> Facts:
        """What the transport says of itself now."""
        transport = self.transport
        return Facts(transport.memory(), transport.version, transport.capabilities)

    # -- orders

    def build(
        self,
        order: Order,
        permit: Permit | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> Write:
        """The WRITE of an order, with another permit or another `ready` where given."""
        if permit is None:
            permit = Permit()
            lasts = order.permit_ns
            permit.until_ns = FOREVER if lasts is None else time.monotonic_ns() + lasts
        if order.gate is not None:
            ready = self._gates.setdefault(order.gate, threading.Event()).is_set
        return Write(
            order.peer,
            order.attempt,
            order.part,
            order.token,
            order.source,
            order.destination,
            permit,
            ready,
        )

    def post(self, orders: list[Order]) -> None:
        """Post WRITEs, one after another."""
        for order in orders:
            write = self.build(order)
            self.timed("post", lambda write=write: self.transport.post(write))  # type: ignore[misc]

    def open_gate(self, number: int) -> None:
        """From now on the sources behind this gate are ready."""
        self._gates.setdefault(number, threading.Event()).set()

    def add_peer(self, peer: Worker, memory: bytes) -> None:
        """Learn a peer."""
        self.timed("add_peer", lambda: self.transport.add_peer(peer, memory))

    def remove_peer(self, peer: Worker) -> None:
        """Forget a peer."""
        self.timed("remove_peer", lambda: self.transport.remove_peer(peer))

    def look(self, active: bool) -> None:
        """Look for arrivals, or stop."""
        self.timed("look_for_arrivals", lambda: self.transport.look_for_arrivals(active))

    def timed(self, name: str, call: Callable[[], None]) -> None:
        """Make a call and keep its time if it is the longest."""
        before = time.monotonic()
        call()
        self.slowest = max(self.slowest, (name, time.monotonic() - before), key=lambda it: it[1])

    def take_slowest(self) -> tuple[str, float]:
        """The slowest call since the last time, and its seconds."""
        slowest, self.slowest = self.slowest, ("", 0.0)
        return slowest

    # -- news

    def poll(self) -> None:
        """Take what there is."""
        self.timed("poll", self._poll)

    def _poll(self) -> None:
        for each in self.transport.poll():
            if isinstance(each, Completion):
                self.completions.append(each)
            else:
                self.arrivals.append(each)

    def wait(self, enough: Callable[[], bool], timeout_s: float) -> None:
        """Poll until there is enough, or the time is up; woken or not."""
        until = time.monotonic() + timeout_s
        while True:
            self.news.clear()
            self.poll()
            left_s = until - time.monotonic()
            if enough() or left_s <= 0:
                return
            self.news.wait(min(left_s, _GLANCE_S))

    def take_completions(self, count: int, timeout_s: float) -> list[Completion]:
        """All completions, once there are `count`, or those that came in time."""
        self.wait(lambda: len(self.completions) >= count, timeout_s)
        taken, self.completions = self.completions, []
        return taken

    def take_arrivals(self, count: int, timeout_s: float) -> list[Arrival]:
        """All arrivals, once they name `count` parts, or those that came in time."""
        self.wait(lambda: len({(a.attempt, a.part) for a in self.arrivals}) >= count, timeout_s)
        taken, self.arrivals = self.arrivals, []
        return taken

    def arrival_and_bytes(
        self, name: Name, at: int, length: int, timeout_s: float
    ) -> tuple[bool, bytes]:
        """Whether a part arrived, and some of the memory as it was then."""
        until = time.monotonic() + timeout_s
        while not (arrived := self.has_arrived(name)) and time.monotonic() < until:
            self.poll()
        return arrived, self.memory[at : at + length].tobytes()

    def has_arrived(self, name: Name) -> bool:
        """Whether a part is among the arrivals that were not taken yet."""
        return any((each.attempt, each.part) == name for each in self.arrivals)

    def usage(self) -> Usage:
        """What this process holds."""
        return Usage.now()

    def cpu_share(self, wall_s: float) -> float:
        """The share of a core that this process uses while nobody here does anything."""
        before_s, began_s = time.process_time(), time.monotonic()
        time.sleep(wall_s)
        return (time.process_time() - before_s) / (time.monotonic() - began_s)

    def close(self) -> bool:
        """Close the transport."""
        return self.transport.close(_CLOSE_S)
