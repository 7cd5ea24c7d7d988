"""The engine of examples/engine decodes what is right, whatever becomes of its WRITEs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pushkv.core.effects import ProducerAddress
from pushkv.core.ids import EngineId, seconds
from pushkv.core.policy import Policy
from pushkv.runtime import Runtime, RuntimeConfig
from pushkv.testing.reference_cache import ReferenceCache, generate
from pushkv.testing.transport_faults import Fate, TransportFaults
from pushkv_memory import MemoryFabric, MemoryTransport

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCKS, TOKENS = 64, 8
PROMPTS = {f"t{length}": tuple(range(7, 7 + length)) for length in (1, 16, 63, 130, 200)}
HASTY = Policy(
    retry_backoff=seconds(0.02),
    write_backoff=seconds(0.01),
    settle=seconds(0.3),
    hold=seconds(1),
)


@contextmanager
def engine(name: str, transport: Any) -> Iterator[tuple[Any, ProducerAddress]]:
    from tiny_engine import TinyEngine

    cache = ReferenceCache(layers=2, block_count=BLOCKS)
    runtime = Runtime(RuntimeConfig(EngineId(name), cache.layout, policy=HASTY), transport)
    runtime.start()
    tiny = TinyEngine(cache, runtime.bridge)
    try:
        yield tiny, ProducerAddress(*runtime.address)
    finally:
        runtime.stop()
        tiny.stop()


@pytest.mark.parametrize(
    "fates",
    [(), (Fate.FAILED,), (Fate.REFUSED,), (Fate.FAILED,) * 20, (Fate.UNKNOWN,)],
    ids=["none", "one fails", "one is refused", "all fail", "one is unknown"],
)
def test_every_token_is_right_and_every_block_comes_back(
    fates: tuple[Fate, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "engine"), *sys.path])
    fabric = MemoryFabric()
    faulty = TransportFaults(MemoryTransport(fabric))
    for transfer in PROMPTS:
        faulty.fate(transfer, *fates)
    with (
        engine("prefill", faulty) as (prefill, address),
        engine("decode", MemoryTransport(fabric)) as (decode, _),
    ):
        results = {}
        for transfer, prompt in PROMPTS.items():
            results[transfer] = decode.submit(transfer, prompt, TOKENS, address)
            prefill.submit(transfer, prompt)
        alone = ReferenceCache(layers=2, block_count=BLOCKS)
        for transfer, prompt in PROMPTS.items():
            assert results[transfer].result(20) == generate(alone, prompt, TOKENS)
        end = time.monotonic() + 20
        while len(decode.cache.free) < BLOCKS or len(prefill.cache.free) < BLOCKS:
            assert time.monotonic() < end, "blocks are lost"
            time.sleep(0.01)
        assert (decode.prefilled > 0) == (len(fates) > 10)
