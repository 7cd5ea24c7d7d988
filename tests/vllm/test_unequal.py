"""Two real engines of vLLM of unequal shape; KV goes both ways.

They take minutes to start, so this runs by `make shapes` alone. Prefill is chunked and prefixes are
cached at both. What is compared is what the prefill engine would say itself.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from tests.vllm.models import write_sliding_model
from tests.vllm.shapes import LONG, PROMPTS, Case, Shape, Side, alone, hand_over, running

from pushkv.core.ids import NO_BLOCK
from pushkv.rank_plan import Ranks

pytestmark = LONG
module = pytest.mark.asyncio(loop_scope="module")

WARMED_UP = {"enforce_eager": False}
"""Only an engine that warms up has room for what one stage sends the next; vLLM for CPUs skips that
for eager ones, whose first step then ends them. Nothing is compiled (`TORCHDYNAMO_DISABLE`)."""

CASES = {
    "ranks": Case(Shape(128), Shape(32, Ranks(2))),
    "stages": Case(Shape(64, Ranks(1, 2), WARMED_UP), Shape(128)),
    "window": Case(Shape(128), Shape(64), write_sliding_model),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CASES)
async def sides(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Side]]:
    folder = tmp_path_factory.mktemp("unequal")
    async with running(folder, CASES[request.param]) as both:
        yield both
    traces = [side.traces[0].read_text() for side in both.values()]
    if request.param == "window":
        assert any(str(NO_BLOCK) in trace for trace in traces), "no block left a window"
    assert all(re.search(r'"start":[1-9]', trace) for trace in traces), "no prefix was cached"


@module
@pytest.mark.parametrize(("source", "target"), [("one", "two"), ("two", "one")])
@pytest.mark.parametrize("name", PROMPTS)
async def test_the_decode_engine_says_what_the_prefill_engine_would(
    sides: dict[str, Side], source: str, target: str, name: str
) -> None:
    tokens, transfer = PROMPTS[name], f"{source} to {target}: {name}"
    said = await hand_over(sides[source], sides[target], tokens, transfer)
    assert said == await alone(sides[source], tokens, transfer)
