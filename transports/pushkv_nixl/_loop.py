"""The one thread that owns a NIXL agent.

It makes the agent, learns and forgets peers, posts, looks after handles, takes notifications and
ends the agent; nobody else calls into that agent. It sleeps on its queue of orders while there is
nothing to look after, and otherwise looks at once, every poll interval, or every millisecond, the
slower the longer nothing has happened. Nothing ends it but `stop` and `retire`: what goes wrong
becomes the outcome of a WRITE or a line in the log. If a call of its into NIXL does not return, it
is given up by `_agents.Agents`, and does nothing more.
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
from ._codec import Memory, agent_name, encode_memory
from ._guard import Abandoned, Guard
from ._library import Agent, Library, NixlError
from ._metadata import has_known_form
from ._open_write import OpenWrite, Step
from ._outbox import Outbox
from ._peers import Peers
from ._pieces import Piece, cut
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
    reconnects: bool
    connections_most: int
    call_timeout_s: float


class AgentThread(threading.Thread):
    """The thread. A daemon: a handle that never ends must not keep the process alive.

    Attributes:
        number: 0 for the agent that peers write to; others only write.
        error: Why the agent did not come to stand.
        memory: What peers need to write to this agent.
        added: The peers this agent was told of. For the caller of `add_peer` alone.
        owed: The WRITEs ordered here and not reported, by number.
        touched: Those of them of which something may have been posted.
        facing: The peer that the current call into NIXL is about, if it is about one.
    """

    def __init__(self, setup: Setup, outbox: Outbox, number: int = 0) -> None:
        name = f"pushkv-nixl-{setup.worker.rank}" + (f"-{number}" if number else "")
        super().__init__(name=name, daemon=True)
        self.number = number
        self.started = threading.Event()
        self.error: Exception | None = None
        self.memory = b""
        self.stopping = False
        self.arrivals = Arrivals(setup.worker)
        self.guard = Guard()
        self.added: set[Worker] = set()
        self.owed: set[int] = set()
        self.touched: set[int] = set()
        self.facing: Worker | None = None
        self._retiring = False
        self._agent: Agent | None = None
        self._peers: Peers | None = None
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

    @property
    def worn(self) -> bool:
        """Whether this agent has made as many connections as it should."""
        peers = self._peers
        return peers is not None and peers.spent >= self._setup.connections_most

    def lost_ns(self, worker: Worker) -> int | None:
        """When (monotonic) this agent lost a peer that it cannot connect anew, or None."""
        return None if self._peers is None else self._peers.lost.get(worker)

    def add_peer(self, worker: Worker, data: bytes) -> None:
        """Learn a peer."""

        def order() -> None:
            self.facing = worker
            self._known.add(worker, data)
            self.facing = None

        self.added.add(worker)
        self._orders.put(order)

    def remove_peer(self, worker: Worker) -> None:
        """Forget a peer."""
        self.added.discard(worker)
        self._orders.put(lambda: self._known.remove(worker))

    def post(self, number: int, write: Write) -> None:
        """Post a WRITE, to be reported by `number`."""
        self.owed.add(number)
        memory = None if self._peers is None else self._peers.memory(write.peer)
        pieces = None if memory is None else self._cut(write, memory)
        self._orders.put(lambda: self._take(number, write, memory, pieces))
        if self.error is not None:
            self._fail_owed()

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

    def retire(self) -> None:
        """Another agent writes from now on; post what was ordered, then disconnect.

        An agent that peers write to stays for them; any other ends.
        """

        def order() -> None:
            self._retiring = True

        self._orders.put(order)

    def keep_for_ever(self) -> None:
        """Called when this thread was given up: nothing may end its agent any more."""
        if self._agent is not None:
            self._agent.keep_for_ever()

    # -- the thread itself

    def run(self) -> None:
        """Live."""
        try:
            self._live()
        except Abandoned:
            _log.warning("a call into NIXL returned after its thread was given up")

    def _live(self) -> None:
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001 - `start` raises it
            self.error = error
            self._fail_owed()
            return
        finally:
            self.started.set()
        while not self._finished():
            try:
                self._round()
            except Exception:  # noqa: BLE001 - nothing may end the thread
                _log.exception("a round of the NIXL thread failed; it goes on")
                time.sleep(_SLOW_S)
        self._end()

    def _finished(self) -> bool:
        if self._open:
            return False
        if self._retiring and not self.number:
            self._retiring = False
            self._known.forget_all()
        return self.stopping or self._retiring

    def _begin(self) -> None:
        setup = self._setup
        name = agent_name(setup.worker)
        # Peers of one name are one peer to NIXL; a peer is to know each agent of ours apart.
        ours = f"{name}/{self.number}" if self.number else name
        agent = Agent(
            setup.library, ours, setup.backend, setup.options, setup.progress_delay_us, self.guard
        )
        try:
            agent.register(setup.regions)
            metadata = agent.metadata()
        except NixlError:
            agent.destroy()
            raise
        self.memory = encode_memory(
            setup.library.version, setup.backend, ours, setup.regions, metadata
        )
        self._agent = agent
        known = has_known_form(metadata, ours, setup.backend, setup.regions)
        if not known:
            _log.warning("NIXL's metadata has a new form here: that of peers is not checked")
        self._peers = Peers(
            agent,
            setup.library.version,
            setup.backend,
            checks=known,
            reconnects=setup.reconnects,
        )

    @property
    def _known(self) -> Peers:
        assert self._peers is not None
        return self._peers

    @property
    def _nixl(self) -> Agent:
        assert self._agent is not None
        return self._agent

    def _end(self) -> None:
        self._run_orders(0)  # WRITEs ordered meanwhile are reported
        self._outbox.flush()
        try:
            self._known.forget_all()
            self._nixl.destroy()
        except Exception:  # noqa: BLE001 - the process goes on
            _log.exception("the NIXL agent did not end cleanly")

    def _report(self, number: int, outcome: WriteOutcome, cause: str = "") -> None:
        self._outbox.report(number, outcome, cause)
        self.owed.discard(number)
        self.touched.discard(number)

    def _fail_owed(self) -> None:
        for number in list(self.owed):
            self._report(number, WriteOutcome.FAILED, f"the agent did not start: {self.error}")
        self._outbox.flush()

    def _round(self) -> None:
        self._run_orders(self._pause())
        self._post_one()
        if not self.number:
            # Also when nobody looks: here it costs little, and NIXL's own queue has no bound.
            self._fetch()
        self._check()
        if not any(each.eager for each in self._to_post):
            # Else right before that post, during which nobody here needs what its reader then does:
            # two threads of one interpreter keep each other waiting.
            self._outbox.flush()

    def _pause(self) -> float | None:
        """For how long to wait for orders: seconds, None for ever."""
        if (self.stopping or self._retiring) and not self._open:
            return 0
        if not (self._open or self._looking):
            return _DRAIN_S if self.number == 0 else None
        now = time.monotonic_ns()
        if any(each.eager for each in self._to_post):
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

    def _cut(self, write: Write, memory: Memory) -> list[Piece] | str:
        """The pieces of a WRITE, or why there are none. Any thread.

        The caller's wherever the peer is known: ours may be copying the WRITE before.
        """
        try:
            return cut(write.source, write.destination, self._setup.regions, memory.regions)
        except Exception as error:  # noqa: BLE001 - a bad order harms its own WRITE alone
            return str(error)

    def _take(
        self, number: int, write: Write, memory: Memory | None, pieces: list[Piece] | str | None
    ) -> None:
        if self.stopping:
            self._report(number, WriteOutcome.FAILED, CLOSED)
            return
        peer = self._known.find(write.peer)
        if isinstance(peer, str):
            self._report(number, WriteOutcome.FAILED, peer)
            return
        if peer.memory is None:
            self._report(number, WriteOutcome.FAILED, peer.cause)
            return
        if pieces is None or peer.memory is not memory:
            pieces = self._cut(write, peer.memory)
        if isinstance(pieces, str):
            self._report(number, WriteOutcome.FAILED, pieces)
            return
        if not pieces:
            self._report(number, WriteOutcome.DONE)
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
            self.facing = each.write.peer
            step = each.post_next(
                self._nixl,
                self._known,
                self._setup.clock,
                self._setup.capabilities,
                self.touched,
                self._outbox.flush,
            )
            self.facing = None
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
            self.facing = each.write.peer
            if each.check(self._nixl, self._known):
                self._event_ns = time.monotonic_ns()
                self._settle(each)
        self.facing = None

    def _settle(self, each: OpenWrite) -> None:
        if not each.handles:
            self._posted.pop(each.number, None)
        if each.over:
            del self._open[each.number]
            self._report(each.number, each.outcome, each.cause)
            self._known.settle(each.peer)

    def _fetch(self) -> None:
        for sender, notices in self._nixl.notifications().items():
            for data in notices:
                self._event_ns = time.monotonic_ns()
                arrival = self.arrivals.take(sender, data)
                if arrival is not None:
                    self._outbox.arrived(arrival)
