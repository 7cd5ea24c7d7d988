"""The agents of one transport: the one that peers write to, and the one that writes now.

The first lives as long as the transport, because peers hold its address. Over LIBFABRIC, where 255
agents can have written to one, new peers are given the address of another before that. Over UCX it
also writes, until it has taken down so many connections that another agent should: descriptors that
NIXL leaks come back only with the end of the agent that connected, at both sides. Over LIBFABRIC it
never writes: a post to a dead peer keeps its agent for ever, and what arrives must not wait for
that.

An agent that writes is replaced when it is worn, when it hangs, and when it lost a peer that it
cannot connect anew. One that is replaced finishes what it has; one that hangs is given up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from pushkv.core.ids import Worker
from pushkv.transport import Write, WriteOutcome

from ._guard import run_when_idle
from ._loop import CLOSED, AgentThread, Setup
from ._outbox import Outbox
from ._peers import RECONNECT_NS

__all__ = ["HUNG_MOST", "Agents"]

_log = logging.getLogger("pushkv.nixl")

HUNG_MOST = 8
"""So many agents may hang in the life of a transport: each keeps a thread and its registrations."""

_LOOKS = 4
"""A call hangs when it is seen that often, a quarter of the timeout apart. Looks are counted, and
no clock is asked, because a process that was stopped has not hung."""


class Agents:
    """All agents of one transport.

    Thread-safe. The lock is held for moments only: no call into NIXL is made under it.

    Attributes:
        receiver: The agent that new peers are to write to.
        made: How many agents were made after it.
        hung: Those that were given up.
    """

    def __init__(self, setup: Setup, outbox: Outbox, receiver_writes: bool) -> None:
        self._setup = setup
        self._outbox = outbox
        self._lock = threading.RLock()
        self._stopping = False
        self.receiver = AgentThread(setup, outbox)
        self._next_receiver: AgentThread | None = None
        self._old_receivers: list[AgentThread] = []
        self._looking = False
        self.made = 0
        self.hung: list[AgentThread] = []
        self._writer = self.receiver if receiver_writes else None
        self._made_ns = 0
        self._retired: list[AgentThread] = []
        self._memories: dict[Worker, bytes] = {}
        self._hung_ns: dict[Worker, int] = {}
        self._watch = Watch(self, setup.call_timeout_s / _LOOKS)

    # -- from the transport

    def add_peer(self, worker: Worker, data: bytes) -> None:
        """Learn a peer, or connect a lost one anew."""
        with self._lock:
            if self._stopping:
                return
            changed = self._memories.get(worker, data) != data
            self._memories[worker] = data
            self._hung_ns.pop(worker, None)
            writer = self._writer
            if (
                writer is not None
                and not self._setup.reconnects
                and worker in writer.added
                and (changed or writer.lost_ns(worker) is not None)
            ):
                self._replace(f"{worker} is to be connected anew")
            self._fit_writer(worker).add_peer(worker, data)
        self._watch.nudge()

    def remove_peer(self, worker: Worker) -> None:
        """Forget a peer."""
        with self._lock:
            self._memories.pop(worker, None)
            self._hung_ns.pop(worker, None)
            for thread in self._threads():
                if worker in thread.added:
                    thread.remove_peer(worker)

    def post(self, write: Write) -> None:
        """Order a WRITE."""
        with self._lock:
            number = self._outbox.owe(write)
            refused = self._refused(write.peer)
            if refused:
                self._outbox.report(number, WriteOutcome.FAILED, refused)
                self._outbox.flush()
                return
            writer = self._fit_writer(write.peer)
            data = self._memories.get(write.peer)
            if data is not None and write.peer not in writer.added:
                writer.add_peer(write.peer, data)
            writer.post(number, write)
        self._watch.nudge()

    def look(self, active: bool) -> None:
        """Look for arrivals, or stop."""
        with self._lock:
            self._looking = active
            for thread in self._receivers():
                thread.look(active)

    def memory(self) -> bytes:
        """What a new peer needs to write here; another agent's once many have written to one."""
        with self._lock:
            writers = len(self.receiver.arrivals.senders)
            crowded = not self._setup.reconnects and writers >= self._setup.connections_most
            if crowded and self._next_receiver is None and not self._stopping:
                new = self._next_receiver = AgentThread(self._setup, self._outbox)
                new.start()
                new.look(self._looking)
                _log.info("%d agents have written here: new peers write to another", writers)
            if self._next_receiver is not None and self._next_receiver.started.is_set():
                new, self._next_receiver = self._next_receiver, None
                if new.memory:
                    self._old_receivers.append(self.receiver)
                    self.receiver = new
            return self.receiver.memory

    @property
    def dropped(self) -> int:
        """Notices that were dropped so far."""
        with self._lock:
            return sum(thread.arrivals.dropped for thread in self._receivers())

    def stop(self) -> None:
        """Post nothing more; every agent ends once its posted handles are over."""
        with self._lock:
            self._stopping = True
            for thread in self._threads():
                thread.stop()
        self._watch.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait until all agents have ended; whether they have. A hung one never does."""
        until = time.monotonic() + timeout_s
        with self._lock:
            threads = [*self._threads(), self._watch]
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        return not self.hung and not any(thread.is_alive() for thread in threads)

    # -- under the lock

    def _threads(self) -> list[AgentThread]:
        """All agents but those that hang."""
        found = [*self._receivers(), *self._retired]
        if self._writer is not None and self._writer is not self.receiver:
            found.append(self._writer)
        return [thread for thread in found if not thread.guard.abandoned]

    def _receivers(self) -> list[AgentThread]:
        starting = [] if self._next_receiver is None else [self._next_receiver]
        return [self.receiver, *self._old_receivers, *starting]

    def _refused(self, peer: Worker) -> str:
        if self._stopping:
            return CLOSED
        if len(self.hung) >= HUNG_MOST:
            return f"NIXL hung {len(self.hung)} times: nothing is posted any more; restart"
        hung_ns = self._hung_ns.get(peer)
        if hung_ns is not None and time.monotonic_ns() < hung_ns + RECONNECT_NS:
            return "NIXL hung on this peer: nothing was posted"
        return ""

    def _fit_writer(self, peer: Worker) -> AgentThread:
        """The agent to write to `peer`; it may not know it yet."""
        writer, why = self._writer, ""
        if writer is None:
            why = "none writes yet"
        elif writer.worn and (self._setup.reconnects or peer not in writer.added):
            why = f"it has made or ended {self._setup.connections_most} connections"
        elif writer.error is not None and time.monotonic_ns() >= self._made_ns + RECONNECT_NS:
            why = "it did not start"
        else:
            lost_ns = writer.lost_ns(peer)
            if lost_ns is not None and time.monotonic_ns() >= lost_ns + RECONNECT_NS:
                why = f"it cannot connect {peer} anew"
        return self._replace(why) if writer is None or why else writer

    def _replace(self, why: str) -> AgentThread:
        old = self._writer
        self._retired = [thread for thread in self._retired if thread.is_alive()]
        if old is not None and not old.guard.abandoned:
            old.retire()
            if old is not self.receiver:
                self._retired.append(old)
        self.made += 1
        self._made_ns = time.monotonic_ns()
        writer = self._writer = AgentThread(self._setup, self._outbox, self.made)
        writer.start()
        _log.info("agent %d of %s writes from now on: %s", self.made, self._setup.worker, why)
        return writer

    # -- from the watch

    def busy(self) -> bool:
        """Whether a WRITE is open, or a call into NIXL is."""
        with self._lock:
            return self._outbox.owes or any(thread.guard.call for thread in self._threads())

    def calls(self) -> dict[AgentThread, int]:
        """The agents that are in a call into NIXL, and the number of that call."""
        with self._lock:
            return {thread: thread.guard.count for thread in self._threads() if thread.guard.call}

    def give_up(self, thread: AgentThread, count: int) -> None:
        """Give an agent up that is in call number `count`, unless it returned meanwhile.

        What it had posted is UNKNOWN for ever; what it had not goes to another agent, but for
        WRITEs to the peer that it hung on.
        """
        with self._lock:
            call, peer = thread.guard.call, thread.facing
            if not thread.guard.abandon(count):
                return
            thread.keep_for_ever()
            run_when_idle(thread.native_id or 0)
            self.hung.append(thread)
            if peer is not None:
                self._hung_ns[peer] = time.monotonic_ns()
            if self._writer is thread:
                self._writer = None
            _log.error(
                "NIXL did not return within %g s (%s, peer %s): agent %d is given up%s",
                self._setup.call_timeout_s,
                call,
                peer,
                thread.number,
                "" if thread.number else "; no arrival is seen any more: restart this process",
            )
            self._share_out(thread, peer, f"NIXL did not return from: {call}")
        self._outbox.flush()

    def _share_out(self, thread: AgentThread, peer: Worker | None, cause: str) -> None:
        for number in sorted(thread.owed):
            if number in thread.touched:
                self._outbox.report(number, WriteOutcome.UNKNOWN, cause, source_idle=False)
                continue
            write = self._outbox.withdraw(number)
            if write is None:
                continue
            if write.peer == peer or self._stopping:
                self._outbox.report(self._outbox.owe(write), WriteOutcome.FAILED, cause)
            else:
                self.post(write)


class Watch(threading.Thread):
    """Looks whether calls into NIXL return; sleeps while nothing is open. Started when needed."""

    def __init__(self, agents: Agents, tick_s: float) -> None:
        super().__init__(name="pushkv-nixl-watch", daemon=True)
        self._agents = agents
        self._tick_s = tick_s
        self._nudged = threading.Event()
        self._stopped = threading.Event()
        self._seen: dict[AgentThread, tuple[int, int]] = {}

    def nudge(self) -> None:
        """Something may be open from now on."""
        if self.ident is None and not self._stopped.is_set():
            self.start()
        self._nudged.set()

    def stop(self) -> None:
        """End."""
        self._stopped.set()
        self._nudged.set()

    def run(self) -> None:
        """Look."""
        while not self._stopped.is_set():
            self._nudged.wait()
            self._nudged.clear()
            while not self._stopped.is_set() and self._agents.busy():
                self._stopped.wait(self._tick_s)
                self._look(self._agents.give_up)

    def _look(self, give_up: Callable[[AgentThread, int], None]) -> None:
        seen: dict[AgentThread, tuple[int, int]] = {}
        for thread, count in self._agents.calls().items():
            before, looks = self._seen.get(thread, (0, 0))
            looks = looks + 1 if before == count else 1
            seen[thread] = count, looks
            if looks > _LOOKS:
                give_up(thread, count)
        self._seen = seen
