"""The reference engine: tokens that depend on every byte, and no block ever lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    ProducerAddress,
    RetryDue,
    SourceReleased,
)
from pushkv.core.errors import ConfigurationError
from pushkv.core.events import (
    Arrived,
    Cancelled,
    Computed,
    EngineEvent,
    Offered,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
    Readmitted,
    TakenBack,
)
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason
from pushkv.runtime import Bridge
from pushkv.testing.reference_cache import KV_BYTES, VOCABULARY
from pushkv.testing.reference_engine import (
    Generation,
    ReferenceCache,
    ReferenceEngine,
    Role,
    generate,
)

BLOCKS, BLOCK_TOKENS, LAYERS = 12, 4, 3
PROMPT = tuple(range(10, 24))
NEEDED = 5
"""Blocks of 14 prompt tokens and 4 more."""
PRODUCER = ProducerAddress("127.0.0.1", 1)
T = TransferId("t")


def make_cache(block_count: int = BLOCKS) -> ReferenceCache:
    return ReferenceCache(LAYERS, block_count, BLOCK_TOKENS)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.001)


class Rig:
    """An engine whose runtime is the test: it reads the events and makes the reports."""

    def __init__(self, block_count: int = BLOCKS, cache: ReferenceCache | None = None) -> None:
        self.cache = cache or make_cache(block_count)
        self.bridge = Bridge(lambda: None)
        self.engine = ReferenceEngine(self.cache, self.bridge, chunk_tokens=4)
        self.events: list[EngineEvent] = []

    def __enter__(self) -> Self:
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    @property
    def free(self) -> int:
        return len(self.cache.free)

    def next(self, kind: type[EngineEvent]) -> EngineEvent:
        """The next event of that kind."""
        found: list[EngineEvent] = []

        def seen() -> bool:
            self.events += self.bridge.events()
            found.extend(each for each in self.events if isinstance(each, kind))
            return bool(found)

        until(seen)
        self.events.remove(found[0])
        return found[0]

    def offered(self) -> Offered:
        event = self.next(Offered)
        assert isinstance(event, Offered)
        return event

    def write(self, offer: Offered) -> None:
        """What a producer would do: the prompt's KV, into the blocks offered."""
        (blocks,) = offer.blocks
        for at in range(offer.end):
            self.cache.extend(blocks, at, PROMPT[at])

    def conserved(self) -> bool:
        """Whether every block is free, and none twice."""
        return sorted(self.cache.free) == list(range(self.cache.block_count))


def right(count: int = 4) -> tuple[int, ...]:
    return generate(make_cache(), PROMPT, count)


class InterruptedCache(ReferenceCache):
    """Calls once, in the engine's thread, when it is about to compute what comes after `at`."""

    def __init__(self, at: int) -> None:
        super().__init__(LAYERS, BLOCKS, BLOCK_TOKENS)
        self._at_most = at
        self.call: Callable[[], None] = lambda: None

    def extend(self, blocks: tuple[int, ...], at: int, token: int) -> None:
        super().extend(blocks, at, token)
        if at == self._at_most:
            self._at_most = -1
            self.call()


# -- the tokens


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, LAYERS - 1),
    st.integers(0, len(PROMPT) - 1),
    st.integers(0, KV_BYTES - 1),
    st.integers(0, 7),
)
def test_one_flipped_bit_anywhere_in_the_prompt_changes_the_tokens(
    layer: int, at: int, byte: int, bit: int
) -> None:
    cache = make_cache()
    blocks = cache.allocate(len(PROMPT) + 4)
    assert blocks is not None
    for position, token in enumerate(PROMPT):
        cache.extend(blocks, position, token)
    cache.bytes[layer, blocks[at // BLOCK_TOKENS], at % BLOCK_TOKENS, byte] ^= 1 << bit
    tokens = []
    for position in range(len(PROMPT), len(PROMPT) + 4):
        tokens.append(cache.next_token(blocks, position))
        cache.extend(blocks, position, tokens[-1])
    assert tuple(tokens) != right()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20), st.integers(1, 6))
def test_local_gives_the_tokens_of_generate(prompt: list[int], count: int) -> None:
    with Rig() as rig:
        result = rig.engine.submit(T, tuple(prompt), Role.LOCAL, count)
        generation = result.result(10)
        assert generation.tokens == generate(make_cache(), tuple(prompt), count)
        assert generation.prefilled
        until(rig.conserved)


def test_what_lies_in_other_blocks_does_not_matter() -> None:
    cache = make_cache()
    cache.bytes[:] = 0xA5
    cache.free.reverse()
    assert generate(cache, PROMPT, 4) == right()
    assert sorted(cache.free) == list(range(BLOCKS))


def test_a_delivered_prompt_is_decoded_without_computing_it() -> None:
    with Rig() as rig:
        result = rig.engine.submit(T, PROMPT, Role.CONSUME, 4, PRODUCER)
        offer = rig.offered()
        assert (offer.start, offer.end, offer.attempt) == (0, len(PROMPT), 0)
        rig.write(offer)
        rig.bridge.report(Delivered(T, 0))
        rig.bridge.report(BlocksReleased(T, 0))
        generation = result.result(10)
        assert (generation.tokens, generation.prefilled) == (right(), False)
        until(rig.conserved)


def test_many_at_once_decode_as_if_alone() -> None:
    with Rig(64) as rig:
        prompts = [tuple(range(each, each + 3 + each)) for each in range(1, 9)]
        results = [
            rig.engine.submit(TransferId(str(index)), prompt, Role.LOCAL, 4)
            for index, prompt in enumerate(prompts)
        ]
        for prompt, result in zip(prompts, results, strict=True):
            assert result.result(10).tokens == generate(make_cache(), prompt, 4)
        until(rig.conserved)


# -- the blocks, after each kind of end


def test_a_failure_is_computed_on_other_blocks_until_the_old_ones_are_released() -> None:
    with Rig() as rig:
        result = rig.engine.submit(T, PROMPT, Role.CONSUME, 4, PRODUCER)
        rig.offered()
        rig.bridge.report(NotDelivered(T, 0, Reason.WAITED, False))
        generation = result.result(10)
        assert generation == Generation(right(), True, Reason.WAITED, generation.first_token_at)
        until(lambda: rig.free == BLOCKS - NEEDED)
        rig.bridge.report(BlocksReleased(T, 0))
        until(rig.conserved)


def test_a_retry_offers_fresh_blocks_and_counts_the_failures() -> None:
    with Rig() as rig:
        result = rig.engine.submit(T, PROMPT, Role.CONSUME, 4, PRODUCER)
        first = rig.offered()
        rig.bridge.report(NotDelivered(T, 0, Reason.WRITE, True))
        rig.bridge.report(RetryDue(T, 0))
        second = rig.offered()
        assert (second.attempt, second.failures) == (1, 1)
        assert not set(first.blocks[0]) & set(second.blocks[0])
        rig.write(second)
        rig.bridge.report(Delivered(T, 1))
        rig.bridge.report(BlocksReleased(T, 1))
        generation = result.result(10)
        assert (generation.tokens, generation.prefilled) == (right(), False)
        until(lambda: rig.free == BLOCKS - NEEDED)
        rig.bridge.report(BlocksReleased(T, 0))
        until(rig.conserved)


@pytest.mark.parametrize("phase", ["offered", "between attempts", "delivered"])
def test_a_cancelled_consumer_gives_its_blocks_back_on_release_alone(phase: str) -> None:
    with Rig() as rig:
        result = rig.engine.submit(T, PROMPT, Role.CONSUME, 4, PRODUCER)
        rig.offered()
        if phase == "between attempts":
            rig.bridge.report(NotDelivered(T, 0, Reason.WRITE, True))
        rig.engine.cancel(T)
        rig.next(Cancelled)
        until(result.cancelled)
        assert rig.free == BLOCKS - NEEDED
        if phase == "delivered":  # the report was on its way
            rig.bridge.report(Delivered(T, 0))
        rig.bridge.report(BlocksReleased(T, 0))
        until(rig.conserved)


@pytest.mark.parametrize("role", [Role.LOCAL, Role.CONSUME])
def test_a_request_cancelled_while_it_waits_or_runs_holds_nothing(role: Role) -> None:
    with Rig(NEEDED) as rig:
        blocker = rig.engine.submit(TransferId("blocker"), PROMPT, Role.CONSUME, 4, PRODUCER)
        rig.offered()
        result = rig.engine.submit(T, PROMPT, role, 4, PRODUCER)
        rig.engine.cancel(T)
        until(result.cancelled)
        rig.engine.cancel(TransferId("blocker"))
        until(blocker.cancelled)
        rig.bridge.report(BlocksReleased(TransferId("blocker"), 0))
        until(rig.conserved)


def test_a_late_report_of_an_old_attempt_does_not_touch_the_new_request_of_that_name() -> None:
    with Rig() as rig:
        rig.engine.submit(T, PROMPT, Role.CONSUME, 4, PRODUCER)
        rig.offered()
        rig.engine.cancel(T)
        result = rig.engine.submit(T, PROMPT, Role.CONSUME, 4, PRODUCER)
        offer = rig.offered()
        rig.bridge.report(Delivered(T, 0))  # its bytes are in the blocks of attempt 0
        rig.bridge.report(BlocksReleased(T, 0))
        until(lambda: rig.free == BLOCKS - NEEDED)
        assert not result.done(), "decoded from blocks that nobody has written"
        rig.write(offer)
        rig.bridge.report(Delivered(T, offer.attempt))
        assert result.result(10).tokens == right()
        until(rig.conserved)


def test_a_source_is_pinned_until_it_is_released() -> None:
    with Rig() as rig:
        result = rig.engine.submit(T, PROMPT, Role.PRODUCE)
        rig.next(Arrived)
        assert result.result(10) == Generation((), True)
        tokens = [rig.next(Computed) for _ in range(4)]
        assert [each.tokens for each in tokens if isinstance(each, Computed)] == [4, 8, 12, 14]
        assert rig.free == BLOCKS - 4
        rig.bridge.report(SourceReleased(T, None))
        until(rig.conserved)


def test_an_aborted_source_is_pinned_until_it_is_released() -> None:
    with Rig(NEEDED) as rig:
        rig.engine.submit(TransferId("blocker"), PROMPT, Role.CONSUME, 4, PRODUCER)
        rig.offered()
        result = rig.engine.submit(T, PROMPT, Role.PRODUCE)
        rig.next(Arrived)
        rig.engine.cancel(T)
        rig.next(PrefillAborted)
        until(result.cancelled)
        rig.bridge.report(SourceReleased(T, Reason.ABORTED))
        rig.engine.cancel(TransferId("blocker"))
        rig.bridge.report(BlocksReleased(TransferId("blocker"), 0))
        until(rig.conserved)


def test_a_source_that_is_released_before_its_prefill_is_over_is_not_pinned_for_ever() -> None:
    with Rig(NEEDED) as rig:
        blocker = TransferId("blocker")
        rig.engine.submit(blocker, PROMPT, Role.CONSUME, 4, PRODUCER)
        rig.offered()
        result = rig.engine.submit(T, PROMPT, Role.PRODUCE)
        rig.next(Arrived)
        rig.bridge.report(SourceReleased(T, Reason.CLOSED))
        until(lambda: not rig.bridge.wait(0))
        rig.engine.cancel(blocker)
        rig.bridge.report(BlocksReleased(blocker, 0))
        assert result.result(10) == Generation((), True)
        until(rig.conserved)


# -- too much, or wrong


def test_a_preempted_prefill_begins_again_on_other_blocks_and_keeps_the_old_ones() -> None:
    cache = InterruptedCache(at=5)
    with Rig(cache=cache) as rig:
        cache.call = lambda: rig.engine.preempt(T)
        result = rig.engine.submit(T, PROMPT, Role.PRODUCE)
        assert result.result(10).prefilled
        rig.events += rig.bridge.events()
        kinds = [type(each) for each in rig.events]
        assert kinds[0] is Arrived
        cut = kinds.index(PrefillPreempted)
        assert kinds[cut + 1] is PrefillResumed
        before, after = rig.events[1:cut], rig.events[cut + 2 :]
        computed = [each for each in (*before, *after) if isinstance(each, Computed)]
        assert [each.tokens for each in computed] == [4, 8, 4, 8, 12, 14]
        assert not set(computed[0].blocks[0]) & set(computed[-1].blocks[0])
        assert rig.free == BLOCKS - 2 * len(computed[0].blocks[0])
        assert rig.engine.preemptions == 1
        rig.bridge.report(SourceReleased(T, None))
        until(rig.conserved)


def test_a_prefill_is_not_preempted_where_there_are_no_other_blocks() -> None:
    cache = InterruptedCache(at=5)
    with Rig(cache=cache) as rig:
        taken = [cache.free.pop() for _ in range(BLOCKS - NEEDED)]
        cache.call = lambda: rig.engine.preempt(T)
        assert rig.engine.submit(T, PROMPT, Role.PRODUCE).result(10).prefilled
        assert rig.engine.preemptions == 0
        cache.free.extend(taken)
        rig.bridge.report(SourceReleased(T, None))
        until(rig.conserved)


def test_a_request_that_is_preempted_while_it_decodes_is_computed_here() -> None:
    cache = InterruptedCache(at=len(PROMPT) + 1)
    with Rig(cache=cache) as rig:
        result = rig.engine.submit(T, PROMPT, Role.CONSUME, 4, PRODUCER)
        offer = rig.offered()
        rig.write(offer)
        cache.call = lambda: rig.engine.preempt(T)
        rig.bridge.report(Delivered(T, offer.attempt))
        generation = result.result(10)
        assert (generation.tokens, generation.prefilled) == (right(), True)
        assert rig.engine.preemptions == 1
        until(rig.conserved)


def test_a_request_that_is_preempted_while_it_waits_is_offered_again() -> None:
    with Rig() as rig:
        result = rig.engine.submit(T, PROMPT, Role.CONSUME, 4, PRODUCER)
        first = rig.offered()
        rig.engine.preempt(T)
        rig.next(TakenBack)
        rig.bridge.report(NotDelivered(T, first.attempt, Reason.PREEMPTED, False))
        rig.next(Readmitted)
        rig.bridge.report(BlocksReleased(T, first.attempt))
        rig.bridge.report(RetryDue(T, first.attempt))
        second = rig.offered()
        assert (second.attempt > first.attempt, second.failures) == (True, 0)
        rig.write(second)
        rig.bridge.report(Delivered(T, second.attempt))
        generation = result.result(10)
        assert (generation.tokens, generation.prefilled) == (right(), False)
        until(rig.conserved)


def test_when_the_cache_is_full_requests_wait_and_finish_in_order() -> None:
    with Rig(NEEDED) as rig:
        done: list[str] = []
        results = []
        for index in range(6):
            result = rig.engine.submit(TransferId(str(index)), PROMPT, Role.LOCAL, 4)
            result.add_done_callback(partial(_note, done, str(index)))
            results.append(result)
        for result in results:
            assert result.result(10).tokens == right()
        assert done == list("012345")
        until(rig.conserved)


def _note(done: list[str], name: str, _: object) -> None:
    done.append(name)


@pytest.mark.parametrize(
    ("prompt", "role", "tokens", "producer", "named"),
    [
        (tuple(range(48)), Role.LOCAL, 1, None, r"prompt and tokens_most = 49.*at most 48"),
        ((1,), Role.LOCAL, 10**9, None, r"prompt and tokens_most = 1000000001"),
        ((), Role.LOCAL, 1, None, r"prompt = \(\)"),
        ((-1,), Role.LOCAL, 1, None, r"prompt = \(-1,\)"),
        ((VOCABULARY,), Role.PRODUCE, 1, None, rf"prompt = \({VOCABULARY},\)"),
        ((1,), Role.LOCAL, 0, None, "tokens_most = 0"),
        ((1,), Role.CONSUME, 1, None, "producer = None"),
    ],
)
def test_a_request_that_can_never_be_run_is_refused_at_once(
    prompt: tuple[int, ...],
    role: Role,
    tokens: int,
    producer: ProducerAddress | None,
    named: str,
) -> None:
    with Rig() as rig:
        with pytest.raises(ConfigurationError, match=named):
            rig.engine.submit(T, prompt, role, tokens, producer)
        largest = tuple(range(47))
        assert len(rig.engine.submit(T, largest, Role.LOCAL).result(10).tokens) == 1


@pytest.mark.parametrize("role", [Role.PRODUCE, Role.CONSUME])
def test_a_name_that_no_message_holds_harms_its_own_request_only(role: Role) -> None:
    with Rig() as rig:
        bad = rig.engine.submit(TransferId("x" * 600), PROMPT, role, 4, PRODUCER)
        assert isinstance(bad.exception(10), ConfigurationError)
        good = rig.engine.submit(T, PROMPT, Role.LOCAL, 4)
        assert good.result(10).tokens == right()
        until(rig.conserved)


@pytest.mark.parametrize("role", [Role.PRODUCE, Role.CONSUME])
def test_a_name_is_taken_while_its_request_lives_and_free_after(role: Role) -> None:
    with Rig() as rig:
        first = rig.engine.submit(T, PROMPT, role, 4, PRODUCER)
        second = rig.engine.submit(T, PROMPT, role, 4, PRODUCER)
        assert "transfer = 't'" in str(second.exception(10))
        if role is Role.CONSUME:
            rig.write(rig.offered())
            rig.bridge.report(Delivered(T, 0))
        else:
            first.result(10)
            rig.bridge.report(SourceReleased(T, None))
        first.result(10)
        until(rig.conserved)
        third = rig.engine.submit(T, PROMPT, role, 4, PRODUCER)
        if role is Role.CONSUME:
            rig.write(rig.offered())
            rig.bridge.report(Delivered(T, 1))
        assert third.result(10).prefilled is (role is Role.PRODUCE)


def test_stopping_cancels_what_is_not_done() -> None:
    rig = Rig(NEEDED)
    with rig:
        waits = rig.engine.submit(T, PROMPT, Role.CONSUME, 4, PRODUCER)
        rig.offered()
        queued = rig.engine.submit(TransferId("u"), PROMPT, Role.LOCAL, 4)
    assert waits.cancelled()
    assert queued.cancelled()
