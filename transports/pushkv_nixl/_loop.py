"""The one thread that owns a NIXL agent.

It makes the agent, learns and forgets peers, posts, looks after handles, takes notifications and
ends the agent; nobody else calls NIXL. It sleeps on its queue of orders while there is nothing to
look after, and otherwise looks at once, every poll interval, or every millisecond, the slower the
longer nothing has happened. Nothing ends it but `stop`: what goes wrong becomes the outcome of a
WRITE or a line in the log.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from attrs import frozen

from pushkv.core.capabilities import Capabilities
from pushkv.core.ids import Worker
from pushkv.transport import Write, WriteOutcome

from ._arrivals import Arrivals
from ._codec import agent_name, encode_memory
from ._library import Agent, Library, NixlError
from ._metadata import has_known_form
from ._open_write import OpenWrite, Step
from ._outbox import Outbox
from ._peers import Peers
from ._pieces import cut
from ._regions import RegionTable

__all__ = ["CLOSED", "AgentThread", "Setup"]

_log = logging.getLogger("pushkv.nixl")

_EAGER_NS = 300_000
"""For so long after the last post a WRITE is looked at without a pause."""

_LIVELY_NS = 50_000_000
"""For so long after the last event the poll interval is kept; then it is `_SLOW_S`."""

_SLOW_S = 0.001

_DRAIN_S = 5.0
"""How often notifications that nobody looks for are fetched: NIXL would pile them up for ever."""

CLOSED = "the transport is closed: nothing was posted"

Order = Callable[[], None]


@frozen(eq=False)
class Setup:
    """What the thread needs to know, fixed for its life. Times in seconds unless named."""

    library: Library
    backend: str
    options: Mapping[str, str]
    progress_delay_us: int
    poll_interval_s: float
    capabilities: Capabilities
    worker: Worker
    regions: RegionTable
    clock: Callable[[], int]


class AgentThread(threading.Thread):
    """The thread. A daemon: a handle that never ends must not keep the process alive."""

    def __init__(self, setup: Setup, outbox: Outbox) -> None:
        super().__init__(name=f"pushkv-nixl-{setup.worker.rank}", daemon=True)
        self.started = threading.Event()
        self.error: Exception | None = None
        self.memory = b""
        self.stopping = False
        self.arrivals = Arrivals(setup.worker)
        self._setup = setup
        self._outbox = outbox
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._to_post: deque[OpenWrite] = deque()
        self._open: dict[int, OpenWrite] = {}
        self._posted: dict[int, OpenWrite] = {}
        self._looking = False
        self._posted_ns = 0
        self._event_ns = 0

    # -- from any thread; none of these blocks

    def add_peer(self, worker: Worker, data: bytes) -> None:
        """Learn a peer."""
        self._orders.put(lambda: self._peers.add(worker, data))

    def remove_peer(self, worker: Worker) -> None:
        """Forget a peer."""
        self._orders.put(lambda: self._peers.remove(worker))

    def post(self, number: int, write: Write) -> None:
        """Post a WRITE, to be reported by `number`."""
        self._orders.put(lambda: self._take(number, write))

    def look(self, active: bool) -> None:
        """Look for arrivals, or stop."""

        def order() -> None:
            self._looking = active
            self._event_ns = time.monotonic_ns()

        self._orders.put(order)

    def stop(self) -> None:
        """Post nothing more; end once every posted handle is over."""
        self.stopping = True
        self._orders.put(lambda: None)

    # -- the thread itself

    def run(self) -> None:
        """Live."""
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001 - `start` raises it
            self.error = error
            return
        finally:
            self.started.set()
        while not (self.stopping and not self._open):
            try:
                self._round()
            except Exception:  # noqa: BLE001 - nothing may end the thread
                _log.exception("a round of the NIXL thread failed; it goes on")
                time.sleep(_SLOW_S)
        self._end()

    def _begin(self) -> None:
        setup = self._setup
        name = agent_name(setup.worker)
        self._agent = Agent(
            setup.library, name, setup.backend, setup.options, setup.progress_delay_us
        )
        try:
            self._agent.register(setup.regions)
            metadata = self._agent.metadata()
        except NixlError:
            self._agent.destroy()
            raise
        self.memory = encode_memory(
            setup.library.version, setup.backend, name, setup.regions, metadata
        )
        known = has_known_form(metadata, name, setup.backend, setup.regions)
        if not known:
            _log.warning("NIXL's metadata has a new form here: that of peers is not checked")
        self._peers = Peers(self._agent, setup.library.version, setup.backend, checks=known)

    def _end(self) -> None:
        self._run_orders(0)  # WRITEs ordered meanwhile are reported
        self._outbox.flush()
        try:
            self._peers.forget_all()
            self._agent.destroy()
        except Exception:  # noqa: BLE001 - the process goes on
            _log.exception("the NIXL agent did not end cleanly")

    def _round(self) -> None:
        self._run_orders(self._pause())
        self._post_one()
        # Also when nobody looks: here it costs little, and NIXL's own queue has no bound.
        self._fetch()
        self._check()
        self._outbox.flush()

    def _pause(self) -> float | None:
        """For how long to wait for orders: seconds, None for ever."""
        if self.stopping and not self._open:
            return 0
        if not (self._open or self._looking):
            return _DRAIN_S if len(self._peers) else None
        now = time.monotonic_ns()
        if any(each.write.ready is None for each in self._to_post):
            return 0
        if self._open and now - self._posted_ns < _EAGER_NS:
            return 0
        interval = self._setup.poll_interval_s
        return interval if now - self._event_ns < _LIVELY_NS else max(interval, _SLOW_S)

    def _run_orders(self, pause: float | None) -> None:
        try:
            order = self._orders.get(timeout=pause) if pause != 0 else self._orders.get_nowait()
            while True:
                try:
                    order()
                except Exception:  # noqa: BLE001 - nothing may end the thread
                    _log.exception("an order to the NIXL thread failed; it goes on")
                order = self._orders.get_nowait()
        except queue.Empty:
            return

    def _take(self, number: int, write: Write) -> None:
        if self.stopping:
            self._outbox.report(number, WriteOutcome.FAILED, CLOSED)
            return
        try:
            peer = self._peers.find(write.peer)
            if isinstance(peer, str):
                self._outbox.report(number, WriteOutcome.FAILED, peer)
                return
            if peer.memory is None:
                self._outbox.report(number, WriteOutcome.FAILED, peer.cause)
                return
            pieces = cut(write.source, write.destination, self._setup.regions, peer.memory.regions)
        except Exception as error:  # noqa: BLE001 - a bad order harms its own WRITE alone
            self._outbox.report(number, WriteOutcome.FAILED, str(error))
            return
        if not pieces:
            self._outbox.report(number, WriteOutcome.DONE)
            return
        opened = OpenWrite(number, write, peer, pieces)
        self._open[number] = opened
        self._to_post.append(opened)

    def _post_one(self) -> None:
        """Post a piece of the first WRITE that is ready: one WRITE is finished before the next."""
        if self.stopping:
            while self._to_post:
                each = self._to_post.popleft()
                if each.posting:
                    each.stop(WriteOutcome.FAILED, CLOSED)
                    self._settle(each)
        at = 0
        while at < len(self._to_post):
            each = self._to_post[at]
            if not each.posting:  # a posted piece failed meanwhile
                del self._to_post[at]
                continue
            step = each.post_next(
                self._agent, self._peers, self._setup.clock, self._setup.capabilities
            )
            if step is Step.NOT_READY:
                at += 1
                continue
            self._posted_ns = self._event_ns = time.monotonic_ns()
            if each.handles:
                self._posted[each.number] = each
            if step is Step.STOPPED:
                del self._to_post[at]
                self._settle(each)
            return

    def _check(self) -> None:
        for each in tuple(self._posted.values()):
            if each.check(self._agent, self._peers):
                self._event_ns = time.monotonic_ns()
                self._settle(each)

    def _settle(self, each: OpenWrite) -> None:
        if not each.handles:
            self._posted.pop(each.number, None)
        if each.over:
            del self._open[each.number]
            self._outbox.report(each.number, each.outcome, each.cause)
            self._peers.settle(each.peer)

    def _fetch(self) -> None:
        for sender, notices in self._agent.notifications().items():
            for data in notices:
                self._event_ns = time.monotonic_ns()
                arrival = self.arrivals.take(sender, data)
                if arrival is not None:
                    self._outbox.arrived(arrival)
