"""A reference engine over NIXL in a process of its own, ordered by a pipe; may be killed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
from attrs import define, evolve
from tests.runtime.descriptors import few_descriptors
from tests.runtime.node import QUICK

from pushkv.core.effects import (
    Delivered,
    NotDelivered,
    PostWrite,
    ProducerAddress,
    Report,
    SourceReleased,
)
from pushkv.core.events import WriteDone, WriterGone
from pushkv.core.ids import EngineId, TransferId, Worker
from pushkv.core.machines import StepRecord
from pushkv.runtime import Runtime, RuntimeConfig
from pushkv.testing.reference_cache import KV_BYTES
from pushkv.testing.reference_engine import ReferenceCache, ReferenceEngine, Role
from pushkv.transport import load_transport
from pushkv_nixl import NixlTransport

ANSWER_S = 30.0
START_S = 120.0
"""A loaded machine takes its time to import NIXL in several processes at once."""
BLOCKS = 256
DEATH_BOUND_S = 0.5
PATTERN = 0xA5
BOUNDED = {"death_bound_s": DEATH_BOUND_S}


Failure = tuple[str, str, int | None, str]
"""Whether delivered or served, of which transfer, in which attempt, and why not."""


class _Lines(logging.StreamHandler):  # type: ignore[type-arg]
    """Keeps the structured lines about failures, and prints those that are warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[Failure] = []
        log = logging.getLogger("pushkv.transfers")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        fields = record.__dict__
        verb = "served" if " not served: " in record.getMessage() else "delivered"
        self.failures.append((verb, fields["transfer"], fields["attempt"], fields["cause"]))
        if record.levelno >= logging.WARNING:
            super().emit(record)


class _Engine(ReferenceEngine):
    """Keeps what it was told of failures; and which transfers were delivered."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.failures: list[Failure] = []
        self.delivered: set[str] = set()

    def _hear(self, report: Report) -> None:
        if isinstance(report, Delivered):
            self.delivered.add(report.transfer)
        elif isinstance(report, NotDelivered):
            about = (report.transfer, report.attempt, str(report.reason))
            self.failures.append(("delivered", *about))
        elif isinstance(report, SourceReleased) and report.reason is not None:
            self.failures.append(("served", report.transfer, None, str(report.reason)))
        super()._hear(report)


@define
class _Progress:
    """Of a transfer from here: parts that were posted, and parts that are done."""

    posted: int = 0
    done: int = 0


class _Child:
    """What the process does; each method may be called from the test's process."""

    def __init__(
        self,
        name: str,
        port: int,
        changes: Mapping[str, Any],
        layers: int,
        options: Mapping[str, Any],
        more: Mapping[str, Any],
    ) -> None:
        rest = dict(more)
        kv_bytes, chunk_tokens = rest.pop("kv_bytes", KV_BYTES), rest.pop("chunk_tokens", 256)
        self.cache = ReferenceCache(layers=layers, block_count=BLOCKS, kv_bytes=kv_bytes)
        self.lines = _Lines()
        self.progress_of: dict[str, _Progress] = {}
        policy = evolve(QUICK, **changes)
        config = RuntimeConfig(
            EngineId(name),
            self.cache.layout,
            listen_port=port,
            policy=policy,
            observer=self._watch,
            **rest,
        )
        self.runtime = Runtime(config, load_transport("nixl", options))
        self.runtime.start()
        self.engine = _Engine(self.cache, self.runtime.bridge, chunk_tokens)
        self.engine.start()
        self.results: dict[str, Any] = {}
        self.short = ExitStack()
        self.is_stopped = False

    def address(self) -> tuple[str, int]:
        return self.runtime.address

    def worker(self) -> Worker:
        config = self.runtime.config
        return Worker(config.engine, config.incarnation, config.rank)

    def gone(self, worker: Worker) -> None:
        """The test has seen that process die."""
        self.runtime.bridge.submit(WriterGone(worker))

    def submit(self, transfer: str, *order: Any) -> None:
        self.results[transfer] = self.engine.submit(TransferId(transfer), *order)

    def cancel(self, transfer: str) -> None:
        self.engine.cancel(TransferId(transfer))

    def result(self, transfer: str) -> Any:
        return self.results[transfer].result(ANSWER_S)

    def preempt(self, transfer: str) -> None:
        self.engine.preempt(TransferId(transfer))

    def preemptions(self) -> int:
        return self.engine.preemptions

    def _watch(self, record: StepRecord) -> None:
        """In the runtime's thread: how far each transfer from here has come."""
        for effect in record.effects:
            if isinstance(effect, PostWrite):
                self.progress_of.setdefault(effect.attempt.transfer, _Progress()).posted += 1
        if isinstance(record.event, WriteDone):
            self.progress_of[record.event.attempt.transfer].done += 1

    def progress(self, transfer: str) -> tuple[int, int, bool]:
        """Parts posted, parts done, and whether its prefill is over."""
        of = self.progress_of.get(transfer, _Progress())
        result = self.results.get(transfer)
        return of.posted, of.done, result is not None and result.done()

    def is_delivered(self, transfer: str) -> bool:
        return transfer in self.engine.delivered

    def stop_between_writes(
        self, victim: int, transfer: str, parts: int, within_s: float, prefilling: bool
    ) -> bool:
        """Send SIGSTOP to a process when so many parts are done and there is more to come.

        More is to come while prefill goes on; if that is not asked for, also while WRITEs are open.
        Returns whether it did; if to this process, then when that goes on.
        """
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            posted, done, over = self.progress(transfer)
            if over and (prefilling or done == posted):
                return False
            if done >= parts:
                os.kill(victim, signal.SIGSTOP)
                return True
            time.sleep(0.0001)
        return False

    def failures(self) -> tuple[list[Failure], list[Failure], dict[str, int]]:
        """What the engine was told, what the log says, and what the counters say, by cause."""
        if self.is_stopped:
            for report in self.runtime.bridge.take():
                self.engine._hear(report)
        counters = {
            name: count for name, count in self.runtime.counters.items() if name.startswith("not_")
        }
        return list(self.engine.failures), list(self.lines.failures), counters

    def free(self) -> int:
        return len(self.cache.free)

    def give_out_blocks(self) -> None:
        """Every free block is in use, as far as the transport may know; the engine is idle."""
        free = self.cache.free
        self.given_out = [free.pop() for _ in range(len(free))]
        self.cache.bytes[:, self.given_out] = PATTERN

    def take_blocks_back(self) -> int:
        """How many bytes of them have changed."""
        changed = np.count_nonzero(self.cache.bytes[:, self.given_out] != PATTERN)
        self.cache.free.extend(self.given_out)
        return int(changed)

    def written(self) -> bool:
        """Whether any byte of the cache differs from zero."""
        return bool(np.any(self.cache.bytes))

    def counters(self) -> dict[str, int]:
        return dict(self.runtime.counters)

    def open_writes(self) -> int:
        """WRITEs under way from here."""
        loop = self.runtime._loop
        return 0 if loop is None else loop._outbound.open_writes

    def agents(self) -> tuple[int, int]:
        """NIXL's agents so far: those that were made to write, and those that are written to."""
        transport = self.runtime._transport
        assert isinstance(transport, NixlTransport)
        agents = transport._agents
        assert agents is not None
        return agents.made, len(agents._receivers())

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def use_up_descriptors(self, leave: int) -> None:
        """Of the descriptors that this process may have, leave so many."""
        self.short.enter_context(few_descriptors(leave))

    def give_descriptors_back(self) -> None:
        self.short.close()

    def step_clock(self, step: int) -> None:
        """Where it was started with a clock that can be stepped: nanoseconds."""
        self.runtime.config.clock.step(step)  # type: ignore[attr-defined]

    def round_trips_ms(self, count: int, address: ProducerAddress) -> list[float]:
        """From the submission of one-block requests to their only token, in milliseconds."""
        taken = []
        for index in range(count):
            before = time.perf_counter()
            name = TransferId(f"trip-{index}")
            self.engine.submit(name, (1, 2, 3), Role.CONSUME, 1, address).result(ANSWER_S)
            taken.append(1e3 * (time.perf_counter() - before))
        return taken

    def stop(self, timeout_s: float) -> bool:
        stopped = self.runtime.stop(timeout_s)
        self.engine.stop()
        self.is_stopped = True
        return stopped


def _serve(pipe: Connection, prepare: Callable[[], None] | None, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if prepare is not None:
        prepare()
    child = _Child(*arguments)
    pipe.send((True, None))
    while True:
        try:
            name, order = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, getattr(child, name)(*order)))
        except Exception as error:  # noqa: BLE001 - told to the test
            pipe.send((False, repr(error)))


class NixlNode:
    """The test's handle; a context that leaves no process behind.

    `prepare` is called in the process before anything else; `environment` is added to its own.
    """

    def __init__(
        self,
        name: str,
        port: int = 0,
        changes: Mapping[str, Any] | None = None,
        layers: int = 2,
        options: Mapping[str, Any] | None = None,
        *,
        prepare: Callable[[], None] | None = None,
        environment: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        about = (name, port, changes or {}, layers, options or BOUNDED, more)
        arguments = (theirs, prepare, *about)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        # Not `patch.dict`: it puts the whole environment back, over what others have changed.
        os.environ.update(environment or {})
        try:
            self.process.start()
        finally:
            for each in environment or {}:
                os.environ.pop(each, None)
        theirs.close()
        self._owed: deque[str] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ready(self) -> NixlNode:
        self._receive("start", START_S)
        return self

    @property
    def address(self) -> ProducerAddress:
        return ProducerAddress(*self.call("address"))

    def call(self, name: str, *order: Any) -> Any:
        self.tell(name, *order)
        return self.answer()

    def tell(self, name: str, *order: Any) -> None:
        """Order something of a process that may be stopped; `answer` waits for it."""
        self._pipe.send((name, order))
        self._owed.append(name)

    def answer(self) -> Any:
        """What came of the last thing that was ordered; whatever came of those before is dropped.

        None where nothing is owed. After a timeout the answer is still owed, and waited for before
        the next one.
        """
        fine, answer, name = True, None, ""
        while self._owed:
            name = self._owed[0]
            fine, answer = self._receive(name, ANSWER_S + 5)
            self._owed.popleft()
        if not fine:
            raise AssertionError(f"{name} raised {answer}")
        return answer

    def _receive(self, name: str, within_s: float) -> tuple[bool, Any]:
        if not self._pipe.poll(within_s):
            raise TimeoutError(f"{name} did not answer")
        fine, answer = self._pipe.recv()
        return fine, answer

    def pause(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def stops_itself(self) -> bool:
        """Whether it does, rather than to answer everything that it was told."""
        assert self.process.pid is not None
        while self._owed:
            if os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG) is not None:
                return True
            if self._pipe.poll(0.001):
                self._receive(self._owed.popleft(), 0)
        return False

    def resume(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
