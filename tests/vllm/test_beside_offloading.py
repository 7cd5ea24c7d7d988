"""Two real engines whose `MultiConnector` has vLLM's offloading beside pushkv.

One asks pushkv first for a prompt's KV, the other the offloading. Run by `make shapes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from tests.vllm.harness import prefill, remote
from tests.vllm.shapes import (
    LONG,
    OUTPUTS,
    Case,
    Shape,
    Side,
    alone,
    hand_over,
    prompt,
    run,
    running,
)

pytestmark = LONG
module = pytest.mark.asyncio(loop_scope="module")

OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "tests.vllm.host_offload",
        "cpu_bytes_to_use": 256 << 20,
    },
}
TOKENS = prompt(1_500)
BOTH_WAYS = pytest.mark.parametrize(("source", "target"), [("one", "two"), ("two", "one")])


def push_first(transfer: dict[str, Any]) -> dict[str, Any]:
    return _beside(transfer, [_child(transfer), OFFLOADING])


def offloading_first(transfer: dict[str, Any]) -> dict[str, Any]:
    return _beside(transfer, [OFFLOADING, _child(transfer)])


def _child(transfer: dict[str, Any]) -> dict[str, Any]:
    """`MultiConnector` gives its children an engine id."""
    return {name: value for name, value in transfer.items() if name != "engine_id"}


def _beside(transfer: dict[str, Any], children: list[dict[str, Any]]) -> dict[str, Any]:
    extra = {"connectors": children}
    return transfer | {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sides(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Side]]:
    case = Case(Shape(128, connect=push_first), Shape(64, connect=offloading_first))
    async with running(tmp_path_factory.mktemp("beside"), case) as both:
        yield both


async def forget(side: Side) -> None:
    """Empty an engine's own prefix cache, which takes until nothing holds a block any more."""
    while not await side.engine.reset_prefix_cache():
        await asyncio.sleep(0.1)


async def offloaded(side: Side, name: str) -> list[int]:
    """What an engine says whose prefix cache is empty, without a transfer."""
    await forget(side)
    output = await run(side, TOKENS, OUTPUTS, name)
    assert output.num_cached_tokens > 1_400, "nothing was offloaded"
    return list(output.outputs[0].token_ids)


@module
@BOTH_WAYS
async def test_what_was_pushed_is_offloaded_too(
    sides: dict[str, Side], source: str, target: str
) -> None:
    producer, consumer, transfer = sides[source], sides[target], f"{source} to {target}"
    for side in (producer, consumer):
        await forget(side)
        await side.engine.reset_prefix_cache(reset_connector=True)
    said = await hand_over(producer, consumer, TOKENS, transfer)
    assert said == await alone(producer, TOKENS, transfer)
    assert said == await offloaded(consumer, f"again {transfer}")


@module
async def test_what_the_producer_had_offloaded_is_pushed(sides: dict[str, Side]) -> None:
    producer, consumer = sides["two"], sides["one"]
    assert await offloaded(producer, "before") == await offloaded(consumer, "before")
    await forget(producer)
    await forget(consumer)
    said = await hand_over(producer, consumer, TOKENS, "from the host")
    assert said == await alone(producer, TOKENS, "from the host")


@module
async def test_a_transfer_that_the_offloading_makes_needless_is_declined(
    sides: dict[str, Side],
) -> None:
    producer, consumer, transfer = sides["one"], sides["two"], "needless"
    said = await offloaded(consumer, "with it")
    await forget(consumer)
    _, output = await asyncio.gather(
        run(producer, TOKENS, 1, "p needless", prefill(transfer)),
        run(consumer, TOKENS, OUTPUTS, "d needless", remote(transfer, **producer.remote)),
    )
    assert 1_400 < output.num_cached_tokens < len(TOKENS)
    assert list(output.outputs[0].token_ids) == said
    while not any(
        effect["type"] == "SourceFreed" and effect["transfer"] == transfer
        for step in producer.steps()
        for effect in step.get("effects", ())
    ):
        await asyncio.sleep(0.1)
