"""The demo with two reference engines in two processes; needs NIXL, but neither vLLM nor torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from rich.progress import Progress

from pushkv.core.effects import ProducerAddress
from pushkv.core.errors import PushKVError
from pushkv.core.ids import EngineId, TransferId
from pushkv.observe.timeline import Timeline, read_cache, read_source_blocks, read_timelines
from pushkv.runtime import Runtime, RuntimeConfig
from pushkv.testing.reference_engine import (
    Generation,
    ReferenceCache,
    ReferenceEngine,
    Role,
    generate,
)
from pushkv.transport import load_transport

from .canary import flip_first_block
from .report import DemoReport, RequestReport

__all__ = ["PROMPT_TOKENS", "ReferenceProcess", "run_reference_demo"]

PROMPT_TOKENS = (5, 64, 300, 512, 600, 700, 1024, 1200, 1500, 2000)
OUTPUT_TOKENS = 16
BLOCK_COUNT = 1024
RESULT_S = 60.0


def _serve(pipe: Connection, name: str, transport: str, trace: Path | None) -> None:
    """The child's life: one cache, one runtime, one engine, until the pipe closes."""
    os.environ.setdefault("UCX_LOG_LEVEL", "warn")  # more would run into the progress bars
    cache = ReferenceCache(block_count=BLOCK_COUNT)
    config = RuntimeConfig(EngineId(name), cache.layout, trace_path=trace)
    runtime = Runtime(config, load_transport(transport, {}))
    runtime.start()
    engine = ReferenceEngine(cache, runtime.bridge)
    engine.start()
    sending = threading.Lock()

    def send(*message: object) -> None:
        with sending, contextlib.suppress(OSError):
            pipe.send(message)

    def done(transfer: TransferId, result: Future[Generation]) -> None:
        send(transfer, None if result.cancelled() else result.result())

    send(*runtime.address)
    try:
        while (order := pipe.recv()) is not None:
            result = engine.submit(*order)
            result.add_done_callback(partial(done, order[0]))
    except EOFError:
        pass  # the parent is gone: so are we
    runtime.stop()
    engine.stop()


class ReferenceProcess:
    """A reference engine in a process of its own. One thread may use it."""

    def __init__(self, name: str, transport: str = "nixl", trace: Path | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, name, transport, trace), name=name, daemon=True
        )
        # A Ctrl-C between the child's birth and its orders would leave it with a traceback; it
        # inherits the mask, and does not need to hear of Ctrl-C: the parent ends it.
        unmasked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unmasked)
        theirs.close()
        self._name = name
        self._results: dict[TransferId, Future[Generation]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)

    def wait_ready(self, timeout_s: float = 60.0) -> ProducerAddress:
        """Where its control channel listens, once it does.

        Raises:
            PushKVError: It did not start.
        """
        try:
            if not self._pipe.poll(timeout_s):
                raise PushKVError(f"engine {self._name} did not start within {timeout_s:g} s")
            host, port = self._pipe.recv()
        except EOFError:
            raise PushKVError(f"engine {self._name} died while starting") from None
        self._reader.start()
        return ProducerAddress(host, port)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None, "started in the constructor"
        return self._process.pid

    def submit(
        self,
        transfer: TransferId,
        prompt: tuple[int, ...],
        role: Role,
        tokens_most: int = 1,
        producer: ProducerAddress | None = None,
    ) -> Future[Generation]:
        """As `ReferenceEngine.submit`, over there."""
        result: Future[Generation] = Future()
        self._results[transfer] = result
        self._pipe.send((transfer, prompt, role, tokens_most, producer))
        return result

    def _read(self) -> None:
        try:
            while True:
                transfer, generation = self._pipe.recv()
                result = self._results.pop(transfer)
                if generation is None:
                    result.cancel()
                else:
                    result.set_result(generation)
        except (EOFError, OSError):
            for result in list(self._results.values()):
                result.set_exception(PushKVError(f"engine {self._name} is gone"))

    def stop(self) -> None:
        """End it: politely, then not."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def run_reference_demo(dispatch: str, progress: Progress, transport: str = "nixl") -> DemoReport:
    """Push `PROMPT_TOKENS` concurrently and compare every token; seconds in all.

    Raises:
        ConfigurationError: No transport of that name is installed.
        PushKVError: An engine did not start or died.
    """
    load_transport(transport, {})  # an unknown one is told here, and not by a child that dies
    report = DemoReport("reference", dispatch)
    with tempfile.TemporaryDirectory(prefix="pushkv-demo-") as directory:
        traces = Path(directory, "prefill.ndjson"), Path(directory, "decode.ndjson")
        starting = progress.add_task("starting two engines", total=None)
        with contextlib.ExitStack() as engines:
            prefill = ReferenceProcess("prefill", transport, traces[0])
            engines.callback(prefill.stop)
            decode = ReferenceProcess("decode", transport, traces[1])
            engines.callback(decode.stop)
            address = prefill.wait_ready()
            decode.wait_ready()
            progress.update(starting, total=1, completed=1)
            _push(report, prefill, decode, address, progress)
            _canary(report, prefill, decode, address, traces[0])
        report.check_traces(traces)
        timelines = read_timelines(*traces)
        cache = read_cache(traces[0])
    for each in report.requests:
        each.timeline = timelines.get(TransferId(each.transfer), Timeline())
        each.bytes_expected = cache.bytes_of(each.prompt_tokens)
    return report


def _prompt(index: int, length: int) -> tuple[int, ...]:
    draw = random.Random(index)  # noqa: S311 - a prompt, not a secret
    return tuple(draw.randrange(50_000) for _ in range(length))


def _push(
    report: DemoReport,
    prefill: ReferenceProcess,
    decode: ReferenceProcess,
    address: ProducerAddress,
    progress: Progress,
) -> None:
    waiting: list[tuple[RequestReport, Future[Generation], tuple[int, ...]]] = []
    for index, length in enumerate(PROMPT_TOKENS):
        transfer = TransferId(f"demo-{index}")
        prompt = _prompt(index, length)
        one = RequestReport(transfer, length, time.monotonic_ns())
        report.requests.append(one)
        produced = prefill.submit(transfer, prompt, Role.PRODUCE)
        if report.dispatch == "sequential":
            produced.result(RESULT_S)
        result = decode.submit(transfer, prompt, Role.CONSUME, OUTPUT_TOKENS, address)
        waiting.append((one, result, prompt))
    task = progress.add_task("comparing tokens", total=len(waiting))
    alone = ReferenceCache(block_count=BLOCK_COUNT)
    for one, result, prompt in waiting:
        try:
            generation = result.result(RESULT_S)
        except (PushKVError, TimeoutError) as error:
            one.failure = str(error) or f"no answer within {RESULT_S:g} s"
        else:
            one.identical = generation.tokens == generate(alone, prompt, OUTPUT_TOKENS)
            one.first_token_at = generation.first_token_at
            report.local_prefills += generation.prefilled
        progress.advance(task)


def _canary(
    report: DemoReport,
    prefill: ReferenceProcess,
    decode: ReferenceProcess,
    address: ProducerAddress,
    trace: Path,
) -> None:
    """Flip a byte of finished KV at the producer before it is pushed: the tokens must differ."""
    transfer, prompt = TransferId("canary"), _prompt(-1, 100)
    prefill.submit(transfer, prompt, Role.PRODUCE).result(RESULT_S)
    flip_first_block(read_cache(trace), read_source_blocks(trace)[transfer], 0)
    result = decode.submit(transfer, prompt, Role.CONSUME, OUTPUT_TOKENS, address)
    right = generate(ReferenceCache(block_count=BLOCK_COUNT), prompt, OUTPUT_TOKENS)
    report.canary_changed = result.result(RESULT_S).tokens != right
