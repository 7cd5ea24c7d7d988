"""An engine that a test moves by hand: every event is the test's, every byte and block is checked.

It has the cache of the reference engine and a real runtime. Blocks that are free are poisoned, and
must still be so when they are taken: a byte that lands later than it may is seen (I1). What is
delivered is compared with what a lone engine computes (I2). Each attempt has one outcome, then one
release, and each source one release (I3). In the end every block is free, or quarantined where the
test says so (I4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from zlib import crc32

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    ProducerAddress,
    Report,
    RetryDue,
    SourceReleased,
    SourceYielded,
)
from pushkv.core.events import (
    Arrived,
    Cancelled,
    Computed,
    EngineEvent,
    Offered,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
    Proven,
    Readmitted,
    TakenBack,
    WriterGone,
)
from pushkv.core.ids import EngineId, TransferId, Worker
from pushkv.core.policy import Policy
from pushkv.observe.replay import check_trace
from pushkv.runtime import Runtime, RuntimeConfig
from pushkv.testing.reference_engine import ReferenceCache, prompt_digest
from pushkv.testing.transport_faults import TransportFaults

BLOCK_TOKENS = 16
BLOCKS = 64
BLOCK_BYTES = 2 * BLOCK_TOKENS * 64
LAYERS = 2
POISON = 0xDB
LONG_S = 20.0
"""How long a test waits for what must come to pass."""


async def until(condition: Callable[[], object], timeout_s: float = LONG_S) -> None:
    """Wait for `condition`, looking often."""
    with anyio.fail_after(timeout_s):
        while not condition():
            await anyio.sleep(0.002)


def prompt_of(transfer: str, length: int) -> tuple[int, ...]:
    """The prompt of a transfer: of its name."""
    return tuple((crc32(transfer.encode()) + at) % 50_000 for at in range(length))


@cache
def kv_of(transfer: str, length: int) -> NDArray[np.uint8]:
    """What a lone engine computes, of shape (layers, tokens, 64)."""
    alone = ReferenceCache(LAYERS, -(-length // BLOCK_TOKENS), BLOCK_TOKENS)
    blocks = tuple(range(alone.block_count))
    for at, token in enumerate(prompt_of(transfer, length)):
        alone.extend(blocks, at, token)
    return alone.bytes.reshape(LAYERS, -1, alone.bytes.shape[-1])[:, :length].copy()


@define
class _Attempt:
    transfer: str
    blocks: tuple[int, ...]
    start: int
    end: int
    outcome: Delivered | NotDelivered | None = None
    released: bool = False
    retry: bool = False


@define
class _Source:
    blocks: tuple[int, ...] = ()
    length: int = 0
    released: bool = False
    reason: str | None = None


@define(eq=False, slots=False)
class HandEngine:
    """One rank. `start` it; `stop` ends it and checks what is left."""

    name: str
    transport: TransportFaults
    policy: Policy
    trace: Path
    port: int = 0
    rank: int = 0
    write_budget_bytes: int = 1 << 20
    problems: list[str] = field(factory=list)
    attempts: dict[int, _Attempt] = field(factory=dict)
    sources: dict[str, _Source] = field(factory=dict)
    yields: Counter[str] = field(factory=Counter)
    statuses: dict[tuple[str, str], str] = field(factory=dict)
    rows: dict[str, int] = field(factory=dict)
    quarantined: int = 0
    """Blocks that nothing will ever prove to be safe: the test says so before `stop`."""

    def __attrs_post_init__(self) -> None:
        self.cache = ReferenceCache(LAYERS, BLOCKS, BLOCK_TOKENS)
        self.cache.bytes[:] = POISON
        config = RuntimeConfig(
            EngineId(self.name),
            self.cache.layout,
            rank=self.rank,
            listen_port=self.port,
            policy=self.policy,
            write_budget_bytes=self.write_budget_bytes,
            trace_path=self.trace,
        )
        self.runtime = Runtime(config, self.transport)
        self._next = 0
        self._read_to = 0
        self._is_up = False

    @property
    def address(self) -> ProducerAddress:
        return ProducerAddress(*self.runtime.address, self.rank, self.name)

    @property
    def worker(self) -> Worker:
        return Worker(self.runtime.config.engine, self.runtime.config.incarnation, self.rank)

    async def start(self) -> None:
        await anyio.to_thread.run_sync(self.runtime.start)
        self._is_up = True

    async def stop(self, timeout_s: float = 1.0) -> bool:
        """End it; whether everything drained. What went wrong is then in `problems`."""
        if not self._is_up:
            return True
        self._is_up = False
        drained = await anyio.to_thread.run_sync(self.runtime.stop, timeout_s)
        self.hear()
        self.check_end(drained)
        return drained

    # -- the consumer's side

    def offer(
        self,
        transfer: str,
        *producers: ProducerAddress,
        tokens: int = 32,
        start: int = 0,
        failures: int = 0,
        prompt: str = "",
    ) -> int:
        """Register blocks; returns the attempt's number. `prompt` is another transfer's, if any."""
        blocks = self._take(tokens - start)
        number, self._next = self._next, self._next + 1
        self.attempts[number] = _Attempt(transfer, blocks, start, tokens)
        self._submit(
            Offered(
                TransferId(transfer),
                number,
                producers,
                (blocks,),
                start,
                tokens,
                prompt_digest(prompt_of(prompt or transfer, tokens)),
                failures=failures,
            )
        )
        return number

    def cancel(self, transfer: str) -> None:
        self._submit(Cancelled(TransferId(transfer)))

    def take_back(self, transfer: str) -> None:
        self._submit(TakenBack(TransferId(transfer)))

    def readmit(self, transfer: str) -> None:
        self._submit(Readmitted(TransferId(transfer)))

    async def outcome(self, number: int) -> str:
        """ "delivered", or the reason why not."""
        attempt = self.attempts[number]
        await until(lambda: attempt.outcome is not None)
        found = attempt.outcome
        return str(found.reason) if isinstance(found, NotDelivered) else "delivered"

    async def released(self, *numbers: int) -> None:
        await until(lambda: all(self.attempts[number].released for number in numbers))

    async def retry_due(self, number: int) -> None:
        await until(lambda: self.attempts[number].retry)

    # -- the producer's side

    def arrive(self, transfer: str, tokens: int = 32) -> None:
        self._submit(Arrived(TransferId(transfer), prompt_digest(prompt_of(transfer, tokens))))
        self.sources[transfer] = _Source(length=tokens)

    def compute(self, transfer: str, tokens: int, *, final: bool = False, step: int = 0) -> None:
        """KV of the first `tokens` tokens exists; `final` where that is all."""
        source = self.sources[transfer]
        if not source.blocks:
            source.blocks = self._take(source.length)
        self._put(source.blocks, kv_of(transfer, source.length)[:, :tokens])
        self._submit(Computed(TransferId(transfer), tokens, (source.blocks,), final, step))

    def produce(self, transfer: str, tokens: int = 32) -> None:
        """The whole prefill at once."""
        self.arrive(transfer, tokens)
        self.compute(transfer, tokens, final=True)

    def abort(self, transfer: str) -> None:
        self._submit(PrefillAborted(TransferId(transfer)))

    def preempt(self, transfer: str) -> None:
        self._submit(PrefillPreempted(TransferId(transfer)))

    def resume(self, transfer: str) -> None:
        self._submit(PrefillResumed(TransferId(transfer)))

    async def source_released(self, *transfers: str) -> None:
        await until(lambda: all(self.sources[each].released for each in transfers))

    # -- proofs

    def proven(self, transfer: str) -> None:
        self._submit(Proven(TransferId(transfer)))

    def gone(self, worker: Worker) -> None:
        self._submit(WriterGone(worker))

    # -- what its trace says, as it is written

    def watch(self) -> None:
        """Read on in the trace: the status of each machine, and which rows have fired."""
        with self.trace.open("rb") as file:
            file.seek(self._read_to)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.splitlines():
            said = msgspec.json.decode(line)
            if said["kind"] != "step":
                continue
            self.rows[said["row"]] = self.rows.get(said["row"], 0) + 1
            for name in _names(said["key"]):
                self.statuses[said["machine"], name] = said["to"]

    async def fired(self, *rows: str) -> None:
        """Until each of these rows has fired here."""

        def have() -> bool:
            self.watch()
            return all(self.rows.get(row) for row in rows)

        try:
            await until(have)
        except TimeoutError:
            missing = [row for row in rows if not self.rows.get(row)]
            raise AssertionError(f"{self.name}: never fired: {missing}") from None

    async def stands(self, machine: str, transfer: str, status: str) -> None:
        """Until this machine stands there. A link's name is its peer's engine, or its port."""
        wanted = f"{machine}.{status}"

        def stands() -> bool:
            self.watch()
            return self.statuses.get((machine, transfer)) == wanted

        try:
            await until(stands)
        except TimeoutError:
            found = self.statuses.get((machine, transfer))
            raise AssertionError(f"{self.name}: {transfer} is {found}, not {wanted}") from None

    # -- inside

    def hear(self) -> None:
        """Take what the runtime reports."""
        for report in self.runtime.bridge.take():
            self._hear(report)

    def _submit(self, event: EngineEvent) -> None:
        self.runtime.bridge.submit(event)

    def _hear(self, report: Report) -> None:
        if isinstance(report, SourceReleased):
            source = self.sources[report.transfer]
            self._demand(not source.released, f"I3: {report} once more")
            source.released, source.reason = True, report.reason
            self._give_back(source.blocks)
            return
        if isinstance(report, SourceYielded):
            self.yields[report.transfer] += 1
            return
        attempt = self.attempts[report.attempt]
        match report:
            case Delivered() | NotDelivered():
                self._demand(attempt.outcome is None, f"I3: {report} after {attempt.outcome}")
                attempt.outcome = report
                if isinstance(report, Delivered):
                    self._demand_right(attempt)
            case BlocksReleased():
                self._demand(attempt.outcome is not None, f"I3: {report} before an outcome")
                self._demand(not attempt.released, f"I3: {report} once more")
                if isinstance(attempt.outcome, Delivered):
                    self._demand_right(attempt)
                attempt.released = True
                self._give_back(attempt.blocks)
            case RetryDue():
                attempt.retry = True

    def _demand(self, holds: bool, what: str) -> None:
        if not holds:
            self.problems.append(f"{self.name}: {what}")

    def _demand_right(self, attempt: _Attempt) -> None:
        right = kv_of(attempt.transfer, attempt.end)[:, attempt.start :]
        found = self._view(attempt.blocks)[:, : right.shape[1]]
        self._demand(bool(np.array_equal(right, found)), f"I2: wrong bytes of {attempt.transfer}")

    def _view(self, blocks: tuple[int, ...]) -> NDArray[np.uint8]:
        """A copy of these blocks, of shape (layers, tokens, 64)."""
        pages = self.cache.bytes[:, list(blocks)]
        return pages.reshape(LAYERS, -1, pages.shape[-1])

    def _put(self, blocks: tuple[int, ...], kv: NDArray[np.uint8]) -> None:
        for at in range(kv.shape[1]):
            self.cache.bytes[:, blocks[at // BLOCK_TOKENS], at % BLOCK_TOKENS] = kv[:, at]

    def _take(self, tokens: int) -> tuple[int, ...]:
        blocks = self.cache.allocate(tokens)
        assert blocks is not None, "the test's cache is too small"
        self._demand_poison(blocks)
        return blocks

    def _give_back(self, blocks: tuple[int, ...]) -> None:
        """To the pool, and at once poisoned: whoever still reads or writes there is seen."""
        self.cache.bytes[:, list(blocks)] = POISON
        self.cache.free.extend(blocks)

    def _demand_poison(self, blocks: list[int] | tuple[int, ...]) -> None:
        clean = bool(np.all(self.cache.bytes[:, list(blocks)] == POISON))
        self._demand(clean, "I1: a byte landed in a block that was free")

    def check_end(self, drained: bool) -> None:
        """What must hold once the runtime is over."""
        self._demand_poison(self.cache.free)
        for number, attempt in self.attempts.items():
            self._demand(attempt.outcome is not None, f"I3: attempt {number} has no outcome")
        lost = BLOCKS - len(self.cache.free)
        self._demand(len(set(self.cache.free)) == len(self.cache.free), "I4: a block is free twice")
        held = [each.transfer for each in self.attempts.values() if not each.released]
        held += [name for name, each in self.sources.items() if not each.released]
        self._demand(
            lost == self.quarantined, f"I4: {lost} blocks of {held}, not {self.quarantined}"
        )
        if not self.quarantined:
            self._demand(drained, "it did not drain")
        self.watch()
        report = check_trace(self.trace)
        self._demand(report.illegal is None, f"the trace is illegal: {report.illegal}")


def _names(key: object) -> tuple[str, ...]:
    """What a test calls a machine by: a transfer, an attempt of it, or who is at the other end."""
    if isinstance(key, list):
        return (str(key[0]),)
    assert isinstance(key, dict)
    if "transfer" in key:
        return key["transfer"], f"{key['transfer']}#{key['attempt']}"
    return (str(key["port"]) if "port" in key else str(key["engine"]),)
