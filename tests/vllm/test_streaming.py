"""KV that leaves while prefill runs, against the real scheduler: what is announced, when, and held.

The harness keeps what every block holds, as the steps write it, and refuses an announcement of KV
that is not there yet, or no more.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.harness import BLOCK, Engine, prefill

from pushkv.core.events import Computed, EngineEvent, PrefillPreempted, PrefillResumed
from pushkv_vllm import PushKVConnector

pytestmark = pytest.mark.vllm

CHUNK = 512
"""Tokens per step, as the harness sets it."""


@pytest.fixture(params=["direct", "relay"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Both halves in one process, or in two."""
    return bool(request.param == "direct")


def announced(engine: Engine) -> list[tuple[int, bool]]:
    return [(event.tokens, event.final) for event in engine.bridge.of(Computed)]


def told(engine: Engine) -> list[type[EngineEvent]]:
    return [type(event) for event in engine.bridge.submitted[1:]]


def forget_prefixes(engine: Engine) -> None:
    """So that a request that runs again gets other blocks."""
    engine.pool.cached_block_hash_to_block._cache.clear()


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_each_chunk_is_announced_when_its_step_is_over(direct: bool, ahead: int) -> None:
    engine = Engine(role="kv_producer", direct=direct, ahead=ahead, blocks=200)
    engine.add("a", 4 * CHUNK - 5, prefill())
    engine.run()
    assert announced(engine) == [
        (CHUNK, False),
        (2 * CHUNK, False),
        (3 * CHUNK, False),
        (4 * CHUNK - 5, True),
    ]
    assert engine.used == 4 * CHUNK // BLOCK


def test_nothing_is_announced_before_its_step_is_over() -> None:
    engine = Engine(role="kv_producer", ahead=1, blocks=200)
    engine.add("a", 3 * CHUNK, prefill())
    engine.step()
    assert announced(engine) == [], "scheduled, not computed"
    engine.step()
    assert announced(engine) == [(CHUNK, False)]


def test_a_chunk_that_ends_within_a_block_leaves_that_block_for_the_next(direct: bool) -> None:
    engine = Engine(role="kv_producer", direct=direct)
    engine.add("small", list(range(700, 800)))
    engine.add("a", 600, prefill())
    engine.run()
    first = (CHUNK - 100) // BLOCK * BLOCK
    assert announced(engine) == [(first, False), (600, True)]
    assert len(engine.bridge.of(Computed)[0].blocks[0]) == first // BLOCK


def test_it_can_be_switched_off(direct: bool) -> None:
    engine = Engine(role="kv_producer", direct=direct, streaming=False)
    engine.add("a", 2 * CHUNK, prefill())
    engine.run()
    assert announced(engine) == [(2 * CHUNK, True)]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_chunk_is_announced_when_its_step_is_scheduled(direct: bool, ahead: int) -> None:
    """Layer by layer: the harness looks at what is announced once its step is over."""
    engine = Engine(role="kv_producer", direct=direct, ahead=ahead, blocks=200, streaming="layers")
    engine.add("a", 4 * CHUNK - 5, prefill())
    engine.run()
    chunks = [(CHUNK, 1), (2 * CHUNK, 2), (3 * CHUNK, 3), (4 * CHUNK - 5, 4)]
    told = [(event.tokens, event.step) for event in engine.bridge.of(Computed)]
    assert told == [*chunks, chunks[-1]]
    assert [event.final for event in engine.bridge.of(Computed)] == [False] * 4 + [True]
    assert not engine.running
    assert engine.used == 4 * CHUNK // BLOCK


def test_a_chunk_whose_step_runs_when_it_is_preempted_stays_pinned() -> None:
    engine = Engine(role="kv_producer", ahead=1, blocks=200, streaming="layers")
    engine.add("a", 2 * CHUNK, prefill())
    engine.step()
    first = engine.bridge.of(Computed)[0]
    assert (first.step, engine.running[1]) == (1, [first]), "it is announced, and not computed"
    forget_prefixes(engine)
    engine.preempt()
    assert engine.used == CHUNK // BLOCK
    engine.run()
    assert not engine.running
    assert told(engine)[:3] == [Computed, PrefillPreempted, PrefillResumed]
    assert not set(engine.bridge.computed[0].blocks[0]) & set(first.blocks[0])
    engine.bridge.yield_source(first.transfer)
    engine.bridge.release_source(first.transfer)
    engine.add("b", 5)
    engine.run()
    assert engine.used == 0


def test_a_prefill_is_over_before_anything_is_sampled(
    monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    engine = Engine(role="kv_producer", direct=direct, blocks=200, streaming="layers")
    engine.add("a", 20, prefill())
    seen: list[list[tuple[int, bool]]] = []
    update = engine._update

    def look(*step: Any) -> None:
        seen.append(announced(engine))
        update(*step)

    monkeypatch.setattr(engine, "_update", look)
    engine.run()
    assert seen[0] == [(20, False), (20, True)], "the step's output has not been looked at"
    assert announced(engine) == seen[0], "and nobody says it twice"


def test_what_a_step_completes_outlives_an_abort_and_a_preemption(direct: bool) -> None:
    for taken in ("abort", "preempt"):
        engine = Engine(role="kv_producer", direct=direct, ahead=1, blocks=200, streaming="layers")
        engine.add("a", CHUNK, prefill())
        engine.step()
        forget_prefixes(engine)
        if taken == "abort":
            engine.abort("a")
        else:
            engine.preempt()
        engine.run()
        assert announced(engine) == [(CHUNK, False), (CHUNK, True)]
        assert told(engine) == [Computed, Computed]
        assert engine.used == CHUNK // BLOCK, "it is held for whoever wants it"
        engine.bridge.release_source(engine.bridge.of(Computed)[0].transfer)
        engine.add("b", 5)
        engine.run()
        assert engine.used == 0


def test_graphs_are_cut_where_layers_are_streamed_alone() -> None:
    assert PushKVConnector.requires_piecewise_for_cudagraph({"streaming": "layers"})
    assert not PushKVConnector.requires_piecewise_for_cudagraph({"streaming": True})
    assert not PushKVConnector.requires_piecewise_for_cudagraph({})


def test_a_prefix_that_is_cached_leaves_with_the_first_chunk() -> None:
    engine = Engine(role="kv_producer", blocks=200)
    engine.add("before", CHUNK)
    engine.run()
    engine.add("a", 2 * CHUNK + 100, prefill())
    engine.run()
    assert announced(engine) == [(2 * CHUNK, False), (2 * CHUNK + 100, True)]


def test_an_abort_keeps_what_was_announced_until_nothing_reads_it(direct: bool) -> None:
    engine = Engine(role="kv_producer", direct=direct, blocks=200)
    engine.add("a", 3 * CHUNK, prefill())
    engine.step()
    engine.step()
    engine.abort("a")
    engine.run()
    assert engine.used == announced(engine)[-1][0] // BLOCK > 0
    engine.bridge.release_source(engine.bridge.of(Computed)[0].transfer)
    engine.add("b", 5)
    engine.run()
    assert engine.used == 0


@pytest.mark.parametrize("yields", ["before it runs again", "when it is over"])
def test_a_preemption_keeps_the_blocks_until_nothing_reads_them(direct: bool, yields: str) -> None:
    engine = Engine(role="kv_producer", direct=direct, blocks=200)
    engine.add("a", 3 * CHUNK, prefill())
    engine.step()
    engine.step()
    first = engine.bridge.of(Computed)[0]
    forget_prefixes(engine)
    engine.preempt()
    held = CHUNK // BLOCK * len(engine.bridge.of(Computed)) if direct else 2 * CHUNK // BLOCK
    assert engine.used == held, "vLLM gave them up, the WRITEs did not"
    engine.step()
    if yields == "before it runs again":
        engine.bridge.yield_source(first.transfer)
    engine.run()
    over = engine.bridge.computed[0]
    assert not set(over.blocks[0]) & set(first.blocks[0]), "computed again, elsewhere"
    assert told(engine).count(PrefillPreempted) == told(engine).count(PrefillResumed) == 1
    if yields == "when it is over":
        assert engine.used == held + 3 * CHUNK // BLOCK
        engine.bridge.yield_source(first.transfer)
        engine.add("b", 5)
        engine.run()
    assert engine.used == 3 * CHUNK // BLOCK
    engine.bridge.release_source(first.transfer)
    engine.add("c", 5)
    engine.run()
    assert engine.used == 0


def test_what_a_preemption_overtook_is_never_announced() -> None:
    """The step is under way when its blocks are taken away."""
    engine = Engine(role="kv_producer", ahead=1, blocks=200)
    engine.add("a", 2 * CHUNK, prefill())
    engine.step()
    forget_prefixes(engine)
    engine.preempt()
    engine.step()
    assert announced(engine) == []
    engine.run()
    assert announced(engine) == [(CHUNK, False), (2 * CHUNK, True)]
    assert PrefillPreempted not in told(engine), "the core had heard of nothing yet"


def test_the_same_prompt_twice_is_announced_once() -> None:
    engine = Engine(role="kv_producer", blocks=200)
    engine.add("a", 2 * CHUNK, prefill())
    engine.add("b", 2 * CHUNK, prefill())
    engine.run()
    assert announced(engine) == [(CHUNK, False), (2 * CHUNK, True)]


def test_a_preempted_source_yields_to_others() -> None:
    """A pool that holds one prompt: who preempts gets the blocks once the WRITEs are over."""
    engine = Engine(role="kv_producer", blocks=2 * CHUNK // BLOCK + 1)
    engine.add("a", 2 * CHUNK, prefill())
    engine.step()
    engine.preempt()
    (first,) = engine.bridge.of(Computed)
    engine.abort("a")
    engine.add("b", list(range(500, 500 + CHUNK + BLOCK)))
    engine.step()
    engine.step()
    assert "b" not in engine.finish_reasons
    engine.bridge.release_source(first.transfer)
    engine.run()
    assert engine.finish_reasons["b"] == "length"
