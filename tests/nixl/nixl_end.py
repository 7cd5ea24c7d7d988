"""One end of a transfer in a process of its own: real memory, real NIXL, ordered by a pipe."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import numpy as np

from pushkv.core.ids import AttemptId, EngineId, Incarnation, TransferId, Worker
from pushkv.transport import Arrival, Completion, Permit, Region, Write

ANSWER_S = 30.0
FOREVER = 2**62
Event = Completion | Arrival


class End:
    """What the child process does. Every public method may be called from the test's process."""

    def __init__(self, worker: Worker, size_bytes: int, options: dict[str, object]) -> None:
        from pushkv_nixl import NixlTransport

        self._handles = 0
        self._count_handles()
        self.worker = worker
        self.memory = np.zeros(size_bytes, np.uint8)
        self.base = self.memory.ctypes.data
        self.news = threading.Event()
        self.permit = Permit()
        self.permit.until_ns = FOREVER
        self.transport = NixlTransport(**options)  # type: ignore[arg-type]
        region = Region(self.base, size_bytes)
        self.transport.start(worker, [region], time.monotonic_ns, self.news.set)

    def info(self) -> tuple[Worker, int, bytes]:
        return self.worker, self.base, self.transport.memory()

    def add_peer(self, worker: Worker, memory: bytes) -> None:
        self.transport.add_peer(worker, memory)

    def remove_peer(self, worker: Worker) -> None:
        self.transport.remove_peer(worker)

    def fill(self, seed: int) -> None:
        period = 1_000_003  # a prime, so that no two blocks are alike
        content = np.random.default_rng(seed).integers(1, 256, period, np.uint8)
        self.memory[:] = np.resize(content, len(self.memory))

    def clear(self) -> None:
        self.memory[:] = 0

    def digest(self, offsets: Sequence[int], length: int) -> str:
        seen = hashlib.blake2b()
        for offset in offsets:
            seen.update(self.memory[offset : offset + length].tobytes())
        return seen.hexdigest()

    def zeros(self, offsets: Sequence[int], length: int) -> int:
        """How many of the segments are zero all over."""
        return sum(not self.memory[at : at + length].any() for at in offsets)

    def write(
        self,
        peer: Worker,
        attempt: int,
        source: Sequence[int],
        destination: Sequence[int],
        length: int,
        permit_ns: int | None = FOREVER,
        withdraw_at: int = 0,
    ) -> None:
        """Order a WRITE from offsets of ours to absolute addresses of the peer.

        `withdraw_at` = n takes the permit away while `ready` is asked for the n-th time.
        """
        permit = Permit()
        permit.until_ns = FOREVER if permit_ns is None else permit_ns
        asked = 0

        def ask() -> bool:
            nonlocal asked
            asked += 1
            if asked == withdraw_at:
                permit.until_ns = 0
            return True

        counts = np.full(len(source), length, np.uint64)
        ours = np.array([self.base + offset for offset in source], np.uint64)
        self.transport.post(
            Write(
                peer,
                attempt_id(peer, self.worker, attempt),
                attempt + 100,
                attempt + 200,
                np.stack([ours, counts], axis=1),
                np.stack([np.array(destination, np.uint64), counts], axis=1),
                permit,
                ask if withdraw_at else None,
            )
        )

    def now(self) -> int:
        return time.monotonic_ns()

    def events(self, count: int, timeout_s: float = 10.0) -> list[Event]:
        """`count` events, or those that came in time."""
        found: list[Event] = []
        end = time.monotonic() + timeout_s
        while len(found) < count and time.monotonic() < end:
            self.news.clear()
            found.extend(self.transport.poll())
            if len(found) < count:
                self.news.wait(max(0.0, min(1.0, end - time.monotonic())))
        return found

    def look(self, active: bool) -> None:
        self.transport.look_for_arrivals(active)

    def dropped(self) -> int:
        return self.transport.dropped_arrivals

    def notify(self, agent: str, payload: bytes) -> None:
        """Send a bare notification, as anybody could who has the peer's metadata."""
        agents = self.transport._agents
        assert agents is not None
        thread = agents.receiver
        thread._orders.put(lambda: thread._nixl._agent.genNotif(agent, payload, []))

    def die_when_written(self, offset: int) -> None:
        def watch() -> None:
            while not self.memory[offset]:
                time.sleep(0.0002)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()

    def handles(self) -> int:
        """NIXL's handles that were made and not released."""
        return self._handles

    def _count_handles(self) -> None:
        from pushkv_nixl._library import Agent

        prepare, release = Agent.prepare, Agent.release

        def prepared(agent: Agent, *arguments: Any) -> int:
            self._handles += 1
            return prepare(agent, *arguments)

        def released(agent: Agent, handle: int) -> None:
            release(agent, handle)
            self._handles -= 1

        Agent.prepare = prepared  # type: ignore[method-assign, assignment]
        Agent.release = released  # type: ignore[method-assign, assignment]

    def agents(self) -> tuple[int, int]:
        """How many agents took over from another, and how many hang."""
        agents = self.transport._agents
        assert agents is not None
        return agents.made, len(agents.hung)

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def modules(self) -> list[str]:
        return [name for name in sys.modules if isinstance(sys.modules[name], ModuleType)]

    def close(self, timeout_s: float) -> bool:
        return self.transport.close(timeout_s)


def attempt_id(consumer: Worker, producer: Worker, attempt: int) -> AttemptId:
    return AttemptId(
        consumer.engine,
        consumer.incarnation,
        consumer.rank,
        producer.rank,
        TransferId(f"transfer-{attempt}"),
        attempt,
    )


def _serve(
    connection: Connection,
    worker: Worker,
    size_bytes: int,
    options: dict[str, object],
    environment: dict[str, str],
    blocked: tuple[str, ...],
) -> None:
    os.environ.update(environment)
    for name in blocked:
        sys.modules[name] = None  # type: ignore[assignment]
    end = End(worker, size_bytes, options)
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(end, name)(*arguments)))
        except Exception as error:  # noqa: BLE001 - told to the test
            connection.send((False, repr(error)))


class RemoteEnd:
    """The test's handle on an `End`."""

    def __init__(
        self,
        engine: str,
        incarnation: int,
        *,
        rank: int = 0,
        size_bytes: int = 1 << 23,
        environment: dict[str, str] | None = None,
        blocked: tuple[str, ...] = (),
        **options: object,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        worker = Worker(EngineId(engine), Incarnation(incarnation), rank)
        self.process = context.Process(
            target=_serve,
            args=(theirs, worker, size_bytes, options, environment or {}, blocked),
            daemon=True,
        )
        self.process.start()
        theirs.close()
        self.worker, self.base, self.memory = worker, 0, b""

    def ready(self) -> RemoteEnd:
        """Wait until the transport stands."""
        self.worker, self.base, self.memory = self.call("info")
        return self

    def call(self, name: str, *arguments: object):
        self.connection.send((name, arguments))
        if not self.connection.poll(ANSWER_S):
            raise TimeoutError(f"{name} did not answer")
        fine, answer = self.connection.recv()
        if not fine:
            raise AssertionError(f"{name} raised {answer}")
        return answer

    def stop(self) -> None:
        self.connection.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def meet(*ends: RemoteEnd) -> None:
    """Tell each end about every other."""
    for one in ends:
        for other in ends:
            if one is not other:
                one.call("add_peer", other.worker, other.memory)
