"""Requests that are prefilled here for another engine: what the core hears, what blocks are held.

KV leaves while prefill runs: when a step is over, whole blocks that it filled are announced, so
that after the last step only what that one filled is left to be written. Exactly:

* vLLM says what a step will compute when it schedules the step, and may schedule the next one, or
  preempt the request, before that step is over. So a step that fills blocks carries a number out
  to the workers; only when the number is back, with the step's output, is KV in these blocks.
* A block that was announced may be read by a WRITE at any time, so it is pinned from then on, until
  `SourceReleased`; one whose request was preempted, until `SourceYielded`.
* Layer by layer (`Streaming.LAYERS`) the blocks are announced when their step is scheduled, with
  its number (`Computed.step`); the worker says which layers exist. When the last of them does, it
  also says that the prefill is over: what the engine samples then is nobody's.
* Preemption begins a new *life* of the request. It may get other blocks, so what was scheduled in
  an earlier life is never announced; what was written stays written, for the tokens are the same.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from math import lcm
from typing import Any

from attrs import define, field, frozen

from pushkv.core.events import (
    Computed,
    EngineEvent,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
)
from pushkv.core.ids import Blocks, TransferId

from .blocks import BlockPool, Pins, held, numbers

__all__ = ["Prefill", "Prefills", "Streaming"]


class Streaming(StrEnum):
    """When KV leaves."""

    WHOLE = "whole"
    """When the prompt is computed."""
    CHUNKS = "chunks"
    """When the step that computes a chunk is over."""
    LAYERS = "layers"
    """When a layer of the chunk is computed."""


@define
class Prefill:
    """A request that is prefilled here for another engine.

    Attributes:
        given: The transfer id without the indices of prompt and sample, for the response.
        repeated: Another request holds, or will hold, the very same KV under this transfer.
        tokens: Tokens of the prompt.
        life: How often it was preempted.
        announced_tokens: How many the core knows to be computed, in this life.
        is_preempted: The core was told that its blocks are gone, and not yet that it goes on.
        is_complete: A step that runs computes the last of it, and the workers will say so.
    """

    transfer: TransferId
    given: str
    repeated: bool
    tokens: int
    life: int = 0
    announced_tokens: int = 0
    is_preempted: bool = False
    is_complete: bool = False


@frozen
class _Filled:
    """What a step will have filled when it is over."""

    request_id: str
    life: int
    tokens: int
    blocks: Blocks


@define
class Prefills:
    """See the module. On the scheduler's thread.

    Args:
        groups: Indices of the KV cache groups that are transferred.
        block_tokens: Tokens per block of each of `groups`.
        streaming: When blocks are announced.
        submit: Tells the runtime.
    """

    groups: tuple[int, ...]
    block_tokens: tuple[int, ...]
    streaming: Streaming
    submit: Callable[[EngineEvent], None]
    _requests: dict[str, Prefill] = field(factory=dict, init=False)
    _pins: Pins[tuple[TransferId, int]] | None = field(default=None, init=False)
    _lives: dict[TransferId, deque[int]] = field(factory=dict, init=False)
    _steps: dict[int, tuple[_Filled, ...]] = field(factory=dict, init=False)
    _numbers: itertools.count[int] = field(factory=lambda: itertools.count(1), init=False)

    def bind_pool(self, pool: BlockPool) -> None:
        """VLLM's block pool exists."""
        self._pins = Pins(pool)

    @property
    def pins(self) -> Pins[tuple[TransferId, int]]:
        """Source blocks, by transfer and life."""
        assert self._pins is not None, "bind_gpu_block_pool was not called"
        return self._pins

    def expect(self, request_id: str, prefill: Prefill) -> None:
        """The request has come."""
        self._requests[request_id] = prefill

    # -- steps

    def scheduled(self, output: Any) -> tuple[int, tuple[Computed, ...]]:
        """A step is scheduled.

        Args:
            output: vLLM's `SchedulerOutput`.

        Returns:
            The number by which `over` must hear that the step is over, 0 if it need not; and what
            the workers are to tell the runtime when they have computed it.
        """
        if not self._requests:
            return 0, ()
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id)
        filled = () if self.streaming is Streaming.WHOLE else tuple(self._filled(output))
        if not filled:
            return 0, ()
        number = next(self._numbers)
        self._steps[number] = filled
        if self.streaming is not Streaming.LAYERS:
            return number, ()
        for each in filled:
            self._fill(each, number)
        return number, tuple(self._completed(filled, number))

    def _completed(self, filled: Iterable[_Filled], number: int) -> Iterator[Computed]:
        """What ends with this step."""
        for each in filled:
            prefill = self._requests[each.request_id]
            if each.tokens == prefill.tokens:
                prefill.is_complete = True
                yield Computed(prefill.transfer, each.tokens, each.blocks, True, number)

    def _filled(self, output: Any) -> Iterator[_Filled]:
        cached = output.scheduled_cached_reqs
        starts = itertools.chain(
            ((each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs),
            zip(cached.req_ids, cached.num_computed_tokens, strict=True),
        )
        whole = lcm(*self.block_tokens)
        for request_id, start in starts:
            prefill = self._requests.get(request_id)
            if prefill is None or prefill.repeated or prefill.is_complete:
                continue
            end = min(start + output.num_scheduled_tokens[request_id], prefill.tokens)
            if self.streaming is not Streaming.LAYERS or end < prefill.tokens:
                end -= end % whole
            if end > prefill.announced_tokens:
                table = output.kv_connector_block_state.get_block_ids(request_id)
                yield _Filled(request_id, prefill.life, end, self._blocks(table, end))

    def over(self, number: int) -> None:
        """The step of this number is over: what it was to fill is filled."""
        for filled in self._steps.pop(number, ()):
            self._fill(filled, 0)

    def _fill(self, filled: _Filled, step: int) -> None:
        prefill = self._requests.get(filled.request_id)
        if prefill is None or prefill.life != filled.life:
            return  # it ended, or its blocks were taken away, while the step ran
        if filled.tokens <= prefill.announced_tokens:
            return
        if prefill.is_preempted:
            prefill.is_preempted = False
            self.submit(PrefillResumed(prefill.transfer))
        prefill.announced_tokens = filled.tokens
        self._announce(prefill, filled.tokens, filled.blocks, final=False, step=step)

    def _preempted(self, request_id: str) -> None:
        prefill = self._requests.get(request_id)
        if prefill is None or prefill.is_complete:
            return  # what is complete stays pinned until nothing reads it
        prefill.life += 1
        if prefill.announced_tokens:
            prefill.announced_tokens, prefill.is_preempted = 0, True
            self.submit(PrefillPreempted(prefill.transfer))

    # -- ends

    def ended(self, request_id: str) -> Prefill | None:
        """VLLM is done with the request: it is none of ours any more."""
        return self._requests.pop(request_id, None)

    def hold(self, prefill: Prefill, table: Any) -> None:
        """The prompt's KV is complete: keep it until no WRITE reads it and none will.

        Nothing, where the workers say so.

        Args:
            prefill: What `ended` returned.
            table: Ids of its computed blocks, for each KV cache group of the engine.
        """
        if not prefill.is_complete:
            self._announce(prefill, prefill.tokens, self._blocks(table, prefill.tokens), final=True)

    def give_up(self, prefill: Prefill) -> None:
        """The prompt's KV will not be complete. What was announced may still be read."""
        if not prefill.is_complete:
            self.submit(PrefillAborted(prefill.transfer))

    def _announce(
        self, prefill: Prefill, tokens: int, blocks: Blocks, *, final: bool, step: int = 0
    ) -> None:
        key = (prefill.transfer, prefill.life)
        self.pins.extend(key, held(blocks, self.pins.pool))
        lives = self._lives.setdefault(prefill.transfer, deque())
        if prefill.life not in lives:
            lives.append(prefill.life)
        self.submit(Computed(prefill.transfer, tokens, blocks, final, step))

    def _blocks(self, table: Any, tokens: int) -> Blocks:
        return tuple(
            numbers(table[group][: -(-tokens // size)], self.pins.pool)
            for group, size in zip(self.groups, self.block_tokens, strict=True)
        )

    # -- reports

    def yielded(self, transfer: TransferId) -> None:
        """Nothing reads the blocks of the oldest life that was preempted."""
        lives = self._lives.get(transfer)
        if lives:
            self.pins.unpin((transfer, lives.popleft()))

    def released(self, transfer: TransferId) -> None:
        """Nothing reads any of the transfer's blocks."""
        for life in self._lives.pop(transfer, ()):
            self.pins.unpin((transfer, life))
