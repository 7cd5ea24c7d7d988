"""Two real engines of vLLM of unequal shape; KV goes both ways.

Once one of them has two ranks, and once all attention is to a sliding window; blocks are of unequal
size both times. They take minutes to start, so this runs by `make shapes` alone. Prefill is chunked
and prefixes are cached at both. What is compared is what the prefill engine would say itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from attrs import frozen
from tests.vllm.harness import prefill, remote

from pushkv.core.ids import NO_BLOCK
from pushkv.demo.tiny_model import write_tiny_model
from pushkv.observe.replay import check_trace

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.timeout(1_500),
    pytest.mark.skipif("PUSHKV_SHAPES" not in os.environ, reason="long: run by `make shapes`"),
]
module = pytest.mark.asyncio(loop_scope="module")

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENGINE_READY_TIMEOUT_S": "900",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
OUTPUTS = 12
PORTS_APART = 4


@frozen
class Side:
    """One engine."""

    engine: Any
    ranks: int
    port: int
    traces: tuple[Path, ...]


def free_ports() -> int:
    """The first of a few ports in a row that nobody uses now."""
    for port in range(random.randrange(20_000, 30_000), 60_000, PORTS_APART):
        probes = [socket.socket() for _ in range(PORTS_APART)]
        try:
            for number, probe in enumerate(probes):
                probe.bind(("127.0.0.1", port + number))
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
        return port
    raise AssertionError("no port is free")


def start(folder: Path, name: str, ranks: int, block: int, port: int) -> Side:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    cores = "0|1" if ranks > 1 and (os.cpu_count() or 1) > 1 else "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(ranks > 1))
    trace = folder / f"{name}.ndjson"
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder / "model"),
            dtype="float32",
            enforce_eager=True,
            max_model_len=2_048,
            max_num_batched_tokens=512,
            seed=0,
            block_size=block,
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp" if ranks > 1 else "uni",
            skip_tokenizer_init=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="PushKVConnector",
                kv_role="kv_both",
                engine_id=name,
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"port": port, "trace_path": str(trace)},
            ),
        )
    )
    traces = [trace] if ranks == 1 else [folder / f"{name}.{rank}.ndjson" for rank in range(ranks)]
    return Side(engine, ranks, port, tuple(traces))


WINDOW = 200
SHAPES = {"ranks": ((1, 128), (2, 32)), "window": ((1, 128), (1, 64))}
"""Ranks and block size of both."""


def let_it_slide(config: Path) -> None:
    """The same weights with attention to the last few tokens only, in every layer."""
    values = json.loads(config.read_text())
    values |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config.write_text(json.dumps(values | {"sliding_window": WINDOW}))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SHAPES)
async def sides(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Side]]:
    folder = tmp_path_factory.mktemp("unequal")
    write_tiny_model(folder / "model")
    if request.param == "window":
        let_it_slide(folder / "model" / "config.json")
    one, two = SHAPES[request.param]
    port = free_ports()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        both = {
            "one": start(folder, "one", *one, port),
            "two": start(folder, "two", *two, port + 1),
        }
        yield both
        for side in both.values():
            side.engine.shutdown()
    if request.param == "window":
        assert any(str(NO_BLOCK) in each.traces[0].read_text() for each in both.values())
    for trace in (trace for side in both.values() for trace in side.traces):
        report = check_trace(trace)
        assert report.illegal is None, f"{trace.name}: {report.illegal}"
        assert report.steps > 0


async def run(
    side: Side, tokens: list[int], outputs: int, name: str, params: object = None, **more: Any
) -> Any:
    from vllm.sampling_params import RequestOutputKind

    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=outputs,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    if params is not None:
        sampling.extra_args = {"kv_transfer_params": params}
    stream = side.engine.generate({"prompt_token_ids": tokens, **more}, sampling, name)
    return [output async for output in stream][-1]


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 1_000), k=length)


PROMPTS = {
    "5": prompt(5),
    "128": prompt(128),
    "129": prompt(129),
    "1500": prompt(1_500),
    "900 of them again": prompt(1_500)[:900] + prompt(77),
}


@module
@pytest.mark.parametrize(("source", "target"), [("one", "two"), ("two", "one")])
@pytest.mark.parametrize("name", PROMPTS)
async def test_the_decode_engine_says_what_the_prefill_engine_would(
    sides: dict[str, Side], source: str, target: str, name: str
) -> None:
    producer, consumer = sides[source], sides[target]
    tokens, transfer = PROMPTS[name], f"{source} to {target}: {name}"
    where = {"remote_host": "127.0.0.1", "remote_port": producer.port, "tp_size": producer.ranks}
    _, output = await asyncio.gather(
        run(producer, tokens, 1, f"p {transfer}", prefill(transfer)),
        run(consumer, tokens, OUTPUTS, f"d {transfer}", remote(transfer, **where)),
    )
    assert output.num_cached_tokens == len(tokens), "the decode engine prefilled here"
    alone = await run(producer, tokens, OUTPUTS, f"a {transfer}", cache_salt=transfer)
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    for trace in consumer.traces:
        outcomes = [line for line in trace.read_text().splitlines() if f'"{transfer}"' in line]
        assert any('"type":"Delivered"' in line for line in outcomes), "not by a transfer"
        assert not any('"type":"NotDelivered"' in line for line in outcomes)
