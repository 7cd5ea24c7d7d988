"""The smallest engine over a `Bridge`: it prefills for others, or decodes what others prefilled.

The cache is `pushkv.testing.reference_cache`: tokens depend on every byte of KV.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future

from attrs import define, field

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    ProducerAddress,
    Report,
    RetryDue,
    SourceReleased,
)
from pushkv.core.events import Arrived, Computed, Offered
from pushkv.core.ids import TransferId
from pushkv.runtime import Bridge
from pushkv.testing.reference_cache import ReferenceCache, prompt_digest

__all__ = ["TinyEngine"]

CHUNK_TOKENS = 64


@define(eq=False)
class Request:
    """A prompt, and what is to be done with it; `producer` is None where we prefill."""

    transfer: TransferId
    prompt: tuple[int, ...]
    tokens: int
    producer: ProducerAddress | None
    result: Future[tuple[int, ...]] = field(factory=Future)
    attempt: int = -1
    failures: int = 0


class TinyEngine:
    """One request at a time, in a thread of its own; transfers go on beside it.

    Attributes:
        prefilled: How many prompts were computed here.
    """

    def __init__(self, cache: ReferenceCache, bridge: Bridge) -> None:
        self.cache = cache
        self.prefilled = 0
        self._bridge = bridge
        self._waiting: deque[Request] = deque()
        self._receiving: dict[TransferId, Request] = {}
        self._pinned: dict[tuple[TransferId, int], tuple[int, ...]] = {}
        self._attempts = 0
        self._stops = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(
        self,
        transfer: str,
        prompt: tuple[int, ...],
        tokens: int = 0,
        producer: ProducerAddress | None = None,
    ) -> Future[tuple[int, ...]]:
        """Queue a request: prefill for another engine, or decode `tokens` with KV of `producer`."""
        request = Request(TransferId(transfer), prompt, tokens, producer)
        self._waiting.append(request)
        self._bridge.interrupt()
        return request.result

    def stop(self) -> None:
        """End the thread. Stop the runtime first: it answers what is open."""
        self._stops = True
        self._bridge.interrupt()
        self._thread.join()

    # -- the engine's thread

    def _run(self) -> None:
        while not self._stops:
            for report in self._bridge.take():
                self._hear(report)
            if not (self._waiting and self._begin(self._waiting[0])):
                self._bridge.wait(1.0)

    def _begin(self, request: Request) -> bool:
        """Whether there were blocks for it."""
        blocks = self.cache.allocate(len(request.prompt) + request.tokens)
        if blocks is None:
            return False
        self._waiting.popleft()
        if request.producer is not None:
            self._offer(request, blocks, request.producer)
        elif request.tokens:
            self._compute(request, blocks)
            self._decode(request, blocks)
        else:
            self._produce(request, blocks)
        return True

    def _produce(self, request: Request, blocks: tuple[int, ...]) -> None:
        self._bridge.submit(Arrived(request.transfer, prompt_digest(request.prompt)))
        self._pinned[request.transfer, -1] = blocks
        self._compute(request, blocks, tell=True)
        request.result.set_result(())

    def _compute(self, request: Request, blocks: tuple[int, ...], tell: bool = False) -> None:
        self.prefilled += 1
        length = len(request.prompt)
        for at, token in enumerate(request.prompt):
            self.cache.extend(blocks, at, token)
            done = at + 1
            if tell and (done == length or done % CHUNK_TOKENS == 0):
                self._bridge.submit(Computed(request.transfer, done, (blocks,), done == length))

    def _offer(self, request: Request, blocks: tuple[int, ...], producer: ProducerAddress) -> None:
        request.attempt, self._attempts = self._attempts, self._attempts + 1
        self._receiving[request.transfer] = request
        self._pinned[request.transfer, request.attempt] = blocks
        offer = Offered(
            transfer=request.transfer,
            attempt=request.attempt,
            producers=(producer,),
            blocks=(blocks[: self.cache.blocks_of(len(request.prompt))],),
            start=0,
            end=len(request.prompt),
            prompt_digest=prompt_digest(request.prompt),
            failures=request.failures,
        )
        self._bridge.submit(offer)

    def _hear(self, report: Report) -> None:
        """An outcome is for the request; blocks come back with `BlocksReleased` alone."""
        match report:
            case Delivered():
                request = self._receiving.pop(report.transfer)
                self._decode(request, self._pinned.pop((report.transfer, report.attempt)))
            case NotDelivered():
                request = self._receiving[report.transfer]
                request.failures += 1
                if not report.retry:
                    request.producer = None
                    self._waiting.append(self._receiving.pop(report.transfer))
            case RetryDue():
                self._waiting.append(self._receiving.pop(report.transfer))
            case BlocksReleased():
                self.cache.free.extend(self._pinned.pop((report.transfer, report.attempt), ()))
            case SourceReleased():
                self.cache.free.extend(self._pinned.pop((report.transfer, -1)))

    def _decode(self, request: Request, blocks: tuple[int, ...]) -> None:
        tokens: list[int] = []
        for at in range(len(request.prompt), len(request.prompt) + request.tokens):
            tokens.append(self.cache.next_token(blocks, at))
            self.cache.extend(blocks, at, tokens[-1])
        self.cache.free.extend(blocks)
        request.result.set_result(tuple(tokens))
