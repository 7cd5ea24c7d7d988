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

from attrs import define, field, frozen

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    ProducerAddress,
    Report,
    RetryDue,
    SourceReleased,
)
from pushkv.core.errors import ConfigurationError, PushKVError
from pushkv.core.events import (
    Arrived,
    Cancelled,
    Computed,
    Offered,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
    Readmitted,
    TakenBack,
)
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason
from pushkv.runtime import Bridge, RankBridges

from .reference_cache import VOCABULARY, ReferenceCache, generate, prompt_digest

__all__ = ["Generation", "ReferenceCache", "ReferenceEngine", "Role", "generate", "prompt_digest"]


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
    blocks_before: tuple[int, ...] = ()
    attempt: int = -1
    computed: int = 0
    prefilled: bool = False
    reason: Reason | None = None
    failures: int = 0
    first_token_at: int | None = None
    source_free: bool = False
    tokens: list[int] = field(factory=list)

    @property
    def length_most(self) -> int:
        """Positions it may need in the cache."""
        return len(self.prompt) + self.tokens_most


@frozen
class _Preemption:
    transfer: TransferId


class ReferenceEngine:
    """Runs requests in a thread of its own. Requests and orders may come from any thread.

    A request whose transfer fails is tried again as often as the policy allows, then computed here,
    on other blocks: its old ones come back with `BlocksReleased`, whenever that is.

    Attributes:
        preemptions: How many requests were preempted.
    """

    def __init__(
        self, cache: ReferenceCache, bridge: Bridge | RankBridges, chunk_tokens: int = 256
    ) -> None:
        self.cache = cache
        self._bridge = bridge
        self._chunk_tokens = chunk_tokens
        self.preemptions: int = 0
        self._inbox: deque[_Request | _Preemption | TransferId] = deque()
        self._waiting: deque[_Request] = deque()
        self._prefilling: deque[_Request] = deque()
        self._receiving: dict[TransferId, _Request] = {}
        self._decoding: list[_Request] = []
        self._live: set[tuple[TransferId, Role]] = set()
        self._pinned: dict[tuple[TransferId, int], tuple[int, ...]] = {}
        self._attempt = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="reference-engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; requests that are not done are cancelled."""
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
        """Queue a request; `producer` says where a `Role.CONSUME` gets its KV from.

        Returns:
            What becomes of it. Fails with a PushKVError where the transfer's name is taken or none.

        Raises:
            ConfigurationError: The request can never be run; names what is wrong with it.
        """
        request = _Request(transfer, prompt, role, tokens_most, producer)
        self._check(request)
        self._inbox.append(request)
        self._bridge.interrupt()
        return request.result

    def _check(self, request: _Request) -> None:
        """What would fail or wait for ever on the engine's thread is refused on the caller's."""
        prompt, most = request.prompt, self.cache.block_count
        if not prompt or not all(0 <= token < VOCABULARY for token in prompt):
            raise ConfigurationError(
                "prompt", prompt[:8], f"tokens from 0 to {VOCABULARY - 1}, at least one"
            )
        if request.tokens_most < 1:
            raise ConfigurationError("tokens_most", request.tokens_most, "at least 1")
        if self.cache.blocks_of(request.length_most) > most:
            raise ConfigurationError(
                "prompt and tokens_most",
                request.length_most,
                f"at most {most * self.cache.block_tokens}, which is all that the cache holds",
            )
        if request.role is Role.CONSUME and request.producer is None:
            raise ConfigurationError("producer", None, "where Role.CONSUME gets its KV from")

    def cancel(self, transfer: TransferId) -> None:
        """The client is gone: give the request up."""
        self._inbox.append(transfer)
        self._bridge.interrupt()

    def preempt(self, transfer: TransferId) -> None:
        """Take its blocks away from a request that runs: what it has is dropped, and made anew.

        A prefill begins again on other blocks: WRITEs may still read the ones it had, which come
        back with the source. Without other blocks nothing happens.
        """
        self._inbox.append(_Preemption(transfer))
        self._bridge.interrupt()

    # -- the engine's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                for report in self._bridge.take():
                    self._hear(report)
                while self._inbox:
                    self._admit(self._inbox.popleft())
                self._start_waiting()
                if not self._step():
                    self._bridge.wait(1.0)
        finally:
            left = [*self._waiting, *self._prefilling, *self._decoding, *self._receiving.values()]
            left += [item for item in self._inbox if isinstance(item, _Request)]
            for request in left:
                request.result.cancel()

    def _admit(self, item: _Request | _Preemption | TransferId) -> None:
        if isinstance(item, _Preemption):
            self._preempt(item.transfer)
            return
        if not isinstance(item, _Request):
            self._cancel(item)
            return
        key = (item.transfer, item.role)
        if item.role is not Role.LOCAL and key in self._live:
            item.result.set_exception(
                ConfigurationError("transfer", item.transfer, f"no name of a live {item.role}")
            )
            return
        if item.role is Role.PRODUCE and not self._tell(
            item, Arrived(item.transfer, prompt_digest(item.prompt))
        ):
            return
        self._live.add(key)
        self._waiting.append(item)

    def _tell(self, request: _Request, event: Arrived | Offered) -> bool:
        """Submit; what the bridge refuses harms its own request only."""
        try:
            self._bridge.submit(event)
        except PushKVError as error:
            request.result.set_exception(error)
            return False
        return True

    def _cancel(self, transfer: TransferId) -> None:
        for queue in (self._waiting, self._prefilling, self._decoding):
            for request in [each for each in queue if each.transfer == transfer]:
                queue.remove(request)
                if request.role is Role.PRODUCE:
                    self._pin_source(request)
                    self._bridge.submit(PrefillAborted(transfer))
                else:
                    self.cache.free.extend(request.blocks)
                    self._live.discard((transfer, request.role))
                request.result.cancel()
        receiving = self._receiving.pop(transfer, None)
        if receiving is not None:
            self._live.discard((transfer, Role.CONSUME))
            self._bridge.submit(Cancelled(transfer))
            receiving.result.cancel()

    def _preempt(self, transfer: TransferId) -> None:
        for queue in (self._prefilling, self._decoding):
            for request in [each for each in queue if each.transfer == transfer]:
                if request.role is Role.PRODUCE:
                    if len(self.cache.free) < len(request.blocks):
                        continue
                    self._bridge.submit(PrefillPreempted(transfer))
                    request.blocks_before += request.blocks
                else:
                    self.cache.free.extend(request.blocks)
                queue.remove(request)
                request.producer, request.blocks, request.computed = None, (), 0
                request.tokens.clear()
                self._waiting.appendleft(request)
                self.preemptions += 1
        if transfer in self._receiving:
            self._bridge.submit(TakenBack(transfer))
            self.preemptions += 1

    def _pin_source(self, request: _Request) -> None:
        """Its prefill is over; somebody may read the blocks until `SourceReleased`."""
        self._pinned[request.transfer, -1] = request.blocks_before + request.blocks
        if request.source_free:
            self._free_source(request.transfer)

    def _free_source(self, transfer: TransferId) -> None:
        self.cache.free.extend(self._pinned.pop((transfer, -1)))
        self._live.discard((transfer, Role.PRODUCE))

    def _start_waiting(self) -> None:
        """Admit in order, each only with all the blocks it will ever need."""
        while self._waiting:
            request = self._waiting[0]
            blocks = self.cache.allocate(request.length_most)
            if blocks is None:
                return
            self._waiting.popleft()
            request.blocks = blocks
            if request.role is Role.CONSUME and request.producer is not None:
                self._offer(request, request.producer)
            else:
                if request.blocks_before:
                    self._bridge.submit(PrefillResumed(request.transfer))
                self._prefilling.append(request)

    def _offer(self, request: _Request, producer: ProducerAddress) -> None:
        request.attempt, self._attempt = self._attempt, self._attempt + 1
        offer = Offered(
            transfer=request.transfer,
            attempt=request.attempt,
            producers=(producer,),
            blocks=(request.blocks,),
            start=0,
            end=len(request.prompt),
            prompt_digest=prompt_digest(request.prompt),
            failures=request.failures,
        )
        if self._tell(request, offer):
            self._receiving[request.transfer] = request
            self._pinned[request.transfer, request.attempt] = request.blocks
        else:
            self.cache.free.extend(request.blocks)
            self._live.discard((request.transfer, Role.CONSUME))

    def _hear(self, report: Report) -> None:
        """Outcome and release are two reports; blocks go back to the pool on release alone."""
        match report:
            case Delivered():
                request = self._received(report)
                if request is not None:
                    del self._pinned[report.transfer, report.attempt]
                    request.computed = len(request.prompt)
                    self._decoding.append(request)
            case NotDelivered():
                request = self._received(report)
                if request is not None:
                    self._compute_or_retry(request, report)
            case RetryDue():
                request = self._received(report)
                if request is not None:
                    self._waiting.appendleft(request)
            case BlocksReleased():
                self.cache.free.extend(self._pinned.pop((report.transfer, report.attempt), ()))
            case SourceReleased():
                if (report.transfer, -1) in self._pinned:
                    self._free_source(report.transfer)
                for request in (*self._waiting, *self._prefilling):
                    # Given up by a runtime that stops, while the prefill still writes there.
                    if (request.transfer, request.role) == (report.transfer, Role.PRODUCE):
                        request.source_free = True

    def _received(self, report: Delivered | NotDelivered | RetryDue) -> _Request | None:
        """The request that `report` concerns, unless it was cancelled or has a newer attempt."""
        request = self._receiving.get(report.transfer)
        if request is None or request.attempt != report.attempt:
            return None
        return self._receiving.pop(report.transfer)

    def _compute_or_retry(self, request: _Request, report: NotDelivered) -> None:
        request.blocks = ()
        request.reason = report.reason
        request.failures += report.reason is not Reason.PREEMPTED
        if report.reason is Reason.PREEMPTED:
            self._receiving[request.transfer] = request
            self._bridge.submit(Readmitted(request.transfer))
        elif report.retry:
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
                self._live.discard((request.transfer, request.role))
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
                self._pin_source(request)
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
