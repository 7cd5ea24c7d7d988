"""The most telling faults on one warm pair of real vLLM engines; `make faults` runs them all."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from tests.matrix.__main__ import one_vllm_run
from tests.matrix.fleet import PAIR, Fleet, fleet

from pushkv.demo.systems import PUSHKV
from pushkv.demo.tiny_model import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(300)]

FAULTS = (
    "colliding names",
    "key missing in parameters",
    "decode leg alone, given up",
    "prefill leg given up while queued",
    "one of two clients with 3 samples leaves",
    "proxy killed during prefill",
    "prefill killed while it computes",  # last: it must start an engine again
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    directory = tmp_path_factory.mktemp("vllm-faults")
    model = write_tiny_model(directory / "model")
    async with fleet(PUSHKV, PAIR, model, directory / "logs") as found:
        yield found


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("fault", FAULTS)
async def test_pushkv_comes_out_of_it(pair: Fleet, fault: str) -> None:
    row = await one_vllm_run(pair, fault, seed=7_000 + 100 * FAULTS.index(fault))
    assert row.is_green, row
