"""A small inference engine over a paged KV cache: shows and tests what a transfer does to tokens.

It has what any engine has: a block pool, a scheduler that mixes prefill chunks and decode steps,
and a cache in plain memory. It has no weights. The KV of a position is a hash of the token and of
the KV of the position before; the next token is a hash of *every* byte of KV so far. One wrong byte
anywhere in the prompt's cache changes the tokens.

It sits on the same `Bridge` as any other engine, and is the shortest example of how.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from enum import StrEnum
from hashlib import blake2b

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    ProducerAddress,
    Report,
    RetryDue,
    SourceReleased,
)
from pushkv.core.events import Arrived, Cancelled, Computed, Offered, PrefillAborted
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason
from pushkv.layout import CacheGroup, CacheLayout, CacheRegion
from pushkv.runtime import Bridge

__all__ = ["Generation", "ReferenceCache", "ReferenceEngine", "Role", "generate", "prompt_digest"]

KV_BYTES = 64
VOCABULARY = 50_000


def prompt_digest(prompt: tuple[int, ...]) -> bytes:
    """16 bytes that name a prompt."""
    return blake2b(np.array(prompt, dtype=np.int64).tobytes(), digest_size=16).digest()


class ReferenceCache:
    """A paged KV cache in host memory: shape (layers, blocks, block_tokens, 64), dtype uint8."""

    def __init__(self, layers: int = 8, block_count: int = 512, block_tokens: int = 16) -> None:
        shape = (layers, block_count, block_tokens, KV_BYTES)
        self.bytes: NDArray[np.uint8] = np.zeros(shape, dtype=np.uint8)
        self.block_tokens = block_tokens
        self.free = list(range(block_count))

    @property
    def layout(self) -> CacheLayout:
        """The cache's geometry, with addresses."""
        layers, count, tokens, _ = self.bytes.shape
        regions = tuple(
            CacheRegion(self.bytes[layer].ctypes.data, tokens * KV_BYTES, count)
            for layer in range(layers)
        )
        return CacheLayout((CacheGroup(tokens, regions),), "uint8", "NHD")

    def allocate(self, tokens: int) -> tuple[int, ...] | None:
        """Blocks for `tokens` positions, most recently freed first; None if there are too few."""
        count = -(-tokens // self.block_tokens)
        if count > len(self.free):
            return None
        return tuple(self.free.pop() for _ in range(count))

    def extend(self, blocks: tuple[int, ...], at: int, token: int) -> None:
        """Write the KV of `token` at position `at`."""
        before = self._at(blocks, at - 1).tobytes() if at else b""
        seed = before + token.to_bytes(8, "little")
        kv = b"".join(
            blake2b(seed, digest_size=KV_BYTES, salt=bytes([layer])).digest()
            for layer in range(self.bytes.shape[0])
        )
        self._at(blocks, at)[:] = np.frombuffer(kv, dtype=np.uint8).reshape(-1, KV_BYTES)

    def next_token(self, blocks: tuple[int, ...], length: int) -> int:
        """The token that follows: a function of every byte of the first `length` positions."""
        layers = self.bytes.shape[0]
        pages = self.bytes[:, list(blocks)].reshape(layers, -1, KV_BYTES)[:, :length]
        digest = blake2b(pages.tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % VOCABULARY

    def _at(self, blocks: tuple[int, ...], at: int) -> NDArray[np.uint8]:
        return self.bytes[:, blocks[at // self.block_tokens], at % self.block_tokens]


def generate(cache: ReferenceCache, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The `count` tokens that follow `prompt`, with nobody else in the cache: what is right."""
    blocks = cache.allocate(len(prompt) + count)
    assert blocks is not None, "the cache is too small for this prompt"
    for at, token in enumerate(prompt):
        cache.extend(blocks, at, token)
    tokens: list[int] = []
    for at in range(len(prompt), len(prompt) + count):
        tokens.append(cache.next_token(blocks, at))
        cache.extend(blocks, at, tokens[-1])
    cache.free.extend(blocks)
    return tuple(tokens)


class Role(StrEnum):
    """What is done with a request's prompt KV."""

    LOCAL = "local"
    """Computed and decoded here."""
    PRODUCE = "produce"
    """Computed here, decoded elsewhere."""
    CONSUME = "consume"
    """Computed elsewhere, decoded here."""


@frozen
class Generation:
    """What became of a request.

    Attributes:
        tokens: The tokens generated; none for `Role.PRODUCE`.
        prefilled: Whether the prompt's KV was computed here.
        reason: Why a transfer was not delivered, if it was not.
        first_token_at: When the first token was there, in nanoseconds of the monotonic clock.
    """

    tokens: tuple[int, ...]
    prefilled: bool
    reason: Reason | None = None
    first_token_at: int | None = None


@define(eq=False)
class _Request:
    transfer: TransferId
    prompt: tuple[int, ...]
    role: Role
    tokens_most: int
    producer: ProducerAddress | None
    result: Future[Generation] = field(factory=Future)
    blocks: tuple[int, ...] = ()
    computed: int = 0
    prefilled: bool = False
    reason: Reason | None = None
    failures: int = 0
    first_token_at: int | None = None
    tokens: list[int] = field(factory=list)


class ReferenceEngine:
    """Runs requests in a thread of its own. `submit`, `cancel` and `stop` may come from any thread.

    A request whose transfer fails is tried again as often as the policy allows, then computed here,
    on other blocks: its old ones come back with `BlocksReleased`, whenever that is.
    """

    def __init__(self, cache: ReferenceCache, bridge: Bridge, chunk_tokens: int = 256) -> None:
        self.cache = cache
        self._bridge = bridge
        self._chunk_tokens = chunk_tokens
        self._inbox: deque[_Request | TransferId] = deque()
        self._waiting: deque[_Request] = deque()
        self._prefilling: deque[_Request] = deque()
        self._receiving: dict[TransferId, _Request] = {}
        self._decoding: list[_Request] = []
        self._pinned: dict[tuple[TransferId, int], tuple[int, ...]] = {}
        self._attempt = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="reference-engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; requests that are not done never will be."""
        self._stopping = True
        self._bridge.interrupt()
        self._thread.join()

    def submit(
        self,
        transfer: TransferId,
        prompt: tuple[int, ...],
        role: Role,
        tokens_most: int = 1,
        producer: ProducerAddress | None = None,
    ) -> Future[Generation]:
        """Queue a request; `producer` says where a `Role.CONSUME` gets its KV from."""
        request = _Request(transfer, prompt, role, tokens_most, producer)
        self._inbox.append(request)
        self._bridge.interrupt()
        return request.result

    def cancel(self, transfer: TransferId) -> None:
        """The client is gone: give the request up."""
        self._inbox.append(transfer)
        self._bridge.interrupt()

    # -- the engine's thread

    def _run(self) -> None:
        while not self._stopping:
            for report in self._bridge.take():
                self._hear(report)
            while self._inbox:
                self._admit(self._inbox.popleft())
            self._start_waiting()
            if not self._step():
                self._bridge.wait(1.0)

    def _admit(self, item: _Request | TransferId) -> None:
        if isinstance(item, _Request):
            if item.role is Role.PRODUCE:
                self._bridge.submit(Arrived(item.transfer, prompt_digest(item.prompt)))
            self._waiting.append(item)
            return
        for queue in (self._waiting, self._prefilling, self._decoding):
            for request in [each for each in queue if each.transfer == item]:
                queue.remove(request)
                if request.role is Role.PRODUCE:
                    self._pinned[item, -1] = request.blocks
                    self._bridge.submit(PrefillAborted(item))
                else:
                    self.cache.free.extend(request.blocks)
                request.result.cancel()
        receiving = self._receiving.pop(item, None)
        if receiving is not None:
            self._bridge.submit(Cancelled(item))
            receiving.result.cancel()

    def _start_waiting(self) -> None:
        """Admit in order, each only with all the blocks it will ever need."""
        while self._waiting:
            request = self._waiting[0]
            blocks = self.cache.allocate(len(request.prompt) + request.tokens_most)
            if blocks is None:
                return
            self._waiting.popleft()
            request.blocks = blocks
            if request.role is Role.CONSUME and request.producer is not None:
                self._offer(request, request.producer)
            else:
                self._prefilling.append(request)

    def _offer(self, request: _Request, producer: ProducerAddress) -> None:
        attempt, self._attempt = self._attempt, self._attempt + 1
        self._receiving[request.transfer] = request
        self._pinned[request.transfer, attempt] = request.blocks
        self._bridge.submit(
            Offered(
                transfer=request.transfer,
                attempt=attempt,
                producers=(producer,),
                blocks=(request.blocks,),
                start=0,
                end=len(request.prompt),
                prompt_digest=prompt_digest(request.prompt),
                failures=request.failures,
            )
        )

    def _hear(self, report: Report) -> None:
        """Outcome and release are two reports; blocks go back to the pool on release alone."""
        match report:
            case Delivered():
                request = self._receiving.pop(report.transfer, None)
                if request is not None:
                    del self._pinned[report.transfer, report.attempt]
                    request.computed = len(request.prompt)
                    self._decoding.append(request)
            case NotDelivered():
                request = self._receiving.pop(report.transfer, None)
                if request is not None:
                    self._compute_or_retry(request, report)
            case BlocksReleased():
                self.cache.free.extend(self._pinned.pop((report.transfer, report.attempt), ()))
            case SourceReleased():
                self.cache.free.extend(self._pinned.pop((report.transfer, -1), ()))
            case RetryDue():
                request = self._receiving.pop(report.transfer, None)
                if request is not None:
                    self._waiting.appendleft(request)

    def _compute_or_retry(self, request: _Request, report: NotDelivered) -> None:
        request.blocks = ()
        request.reason = report.reason
        request.failures += 1
        if report.retry:
            self._receiving[request.transfer] = request
        else:
            request.producer = None
            self._waiting.appendleft(request)

    def _step(self) -> bool:
        """One chunk of one prefill, one token for everybody; whether there was anything to do."""
        if not self._prefilling and not self._decoding:
            return False
        if self._prefilling:
            self._prefill(self._prefilling[0])
        for request in list(self._decoding):
            length = len(request.prompt) + len(request.tokens)
            token = self.cache.next_token(request.blocks, length)
            request.tokens.append(token)
            request.first_token_at = request.first_token_at or time.monotonic_ns()
            if len(request.tokens) < request.tokens_most:
                self.cache.extend(request.blocks, length, token)
            else:
                self._decoding.remove(request)
                self.cache.free.extend(request.blocks)
                self._finish(request)
        return True

    def _prefill(self, request: _Request) -> None:
        end = min(request.computed + self._chunk_tokens, len(request.prompt))
        for at in range(request.computed, end):
            self.cache.extend(request.blocks, at, request.prompt[at])
        request.computed = end
        final = end == len(request.prompt)
        if request.role is Role.PRODUCE:
            done = end if final else end - end % self.cache.block_tokens
            self._bridge.submit(Computed(request.transfer, done, (request.blocks,), final))
        if final:
            self._prefilling.popleft()
            request.prefilled = True
            if request.role is Role.PRODUCE:
                self._pinned[request.transfer, -1] = request.blocks
                self._finish(request)
            else:
                self._decoding.append(request)

    def _finish(self, request: _Request) -> None:
        if not request.result.done():
            request.result.set_result(
                Generation(
                    tuple(request.tokens),
                    request.prefilled,
                    request.reason,
                    request.first_token_at,
                )
            )
