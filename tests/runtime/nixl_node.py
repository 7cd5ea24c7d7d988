"""A reference engine over NIXL in a process of its own, ordered by a pipe; may be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
from attrs import evolve
from tests.runtime.descriptors import few_descriptors
from tests.runtime.node import QUICK

from pushkv.core.effects import ProducerAddress
from pushkv.core.events import WriterGone
from pushkv.core.ids import EngineId, TransferId, Worker
from pushkv.runtime import Runtime, RuntimeConfig
from pushkv.testing.reference_engine import ReferenceCache, ReferenceEngine, Role
from pushkv.transport import load_transport

ANSWER_S = 30.0
START_S = 120.0
"""A loaded machine takes its time to import NIXL in several processes at once."""
BLOCKS = 256
DEATH_BOUND_S = 0.5
PATTERN = 0xA5
BOUNDED = {"death_bound_s": DEATH_BOUND_S}


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
        self.cache = ReferenceCache(layers=layers, block_count=BLOCKS)
        policy = evolve(QUICK, **changes)
        config = RuntimeConfig(
            EngineId(name), self.cache.layout, listen_port=port, policy=policy, **more
        )
        self.runtime = Runtime(config, load_transport("nixl", options))
        self.runtime.start()
        self.engine = ReferenceEngine(self.cache, self.runtime.bridge)
        self.engine.start()
        self.results: dict[str, Any] = {}
        self.short = ExitStack()

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ready(self) -> NixlNode:
        self._answer("start", START_S)
        return self

    @property
    def address(self) -> ProducerAddress:
        return ProducerAddress(*self.call("address"))

    def call(self, name: str, *order: Any) -> Any:
        self._pipe.send((name, order))
        return self._answer(name)

    def _answer(self, name: str, within_s: float = ANSWER_S + 5) -> Any:
        if not self._pipe.poll(within_s):
            raise TimeoutError(f"{name} did not answer")
        fine, answer = self._pipe.recv()
        if not fine:
            raise AssertionError(f"{name} raised {answer}")
        return answer

    def pause(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
