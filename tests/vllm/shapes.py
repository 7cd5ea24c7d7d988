"""Pairs of real vLLM engines of unequal shape, for tests that `make shapes` runs.

The engines of a pair serve both roles, so that KV goes both ways between them. Each says of itself,
in its trace, what was delivered; what is compared is what an engine says that prefills by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen
from tests.vllm.harness import prefill, remote

from pushkv.demo.tiny_model import write_tiny_model
from pushkv.observe.replay import check_trace
from pushkv.rank_plan import Ranks

LONG = [
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.timeout(1_500),
    pytest.mark.skipif("PUSHKV_SHAPES" not in os.environ, reason="long: run by `make shapes`"),
]
"""Marks of a module of such tests."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENGINE_READY_TIMEOUT_S": "900",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
OUTPUTS = 12
PORTS_APART = 4
CACHED_TOKENS = 24_576
"""Tokens that an engine's KV cache holds, whatever its blocks: a prompt fills a small part."""


@frozen
class Shape:
    """How one engine is started.

    Attributes:
        block: Tokens per block.
        ranks: Its ranks, each in a process of its own where there are several.
        arguments: More of vLLM's `AsyncEngineArgs`.
        connect: Makes of the arguments of a `KVTransferConfig` others.
    """

    block: int = 128
    ranks: Ranks = Ranks()  # noqa: RUF009  - frozen
    arguments: Mapping[str, object] = field(factory=dict)
    connect: Callable[[dict[str, Any]], dict[str, Any]] = dict


@frozen
class Case:
    """Two engines of one model.

    Attributes:
        one: The first engine.
        two: The second.
        write_model: Writes the model into a folder.
    """

    one: Shape
    two: Shape
    write_model: Callable[[Path], object] = write_tiny_model


@frozen
class Side:
    """One engine that runs."""

    engine: Any
    ranks: Ranks
    port: int
    traces: tuple[Path, ...]

    @property
    def remote(self) -> dict[str, object]:
        """What a router says of where it is."""
        return {
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": self.ranks.tensor,
            "pp_size": self.ranks.pipeline,
        }

    def steps(self) -> Iterator[dict[str, Any]]:
        """The steps of its machines so far, from the traces of all of its ranks."""
        for trace in self.traces:
            for line in trace.read_text().splitlines():
                if line.endswith("}"):
                    yield json.loads(line)


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


def transfer_config(name: str, port: int, trace: Path) -> dict[str, Any]:
    """vLLM's `KVTransferConfig` of an engine, as keyword arguments."""
    return {
        "kv_connector": "PushKVConnector",
        "kv_role": "kv_both",
        "engine_id": name,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"port": port, "trace_path": str(trace)},
    }


def start(folder: Path, name: str, shape: Shape, port: int) -> Side:
    """Start an engine of the model in `folder`; blocks until it serves."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    count = shape.ranks.count
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
        str(rank % (os.cpu_count() or 1)) for rank in range(count)
    )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(count > 1))
    trace = folder / f"{name}.ndjson"
    arguments: dict[str, Any] = {
        "model": str(folder / "model"),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2_048,
        "max_num_batched_tokens": 512,
        "seed": 0,
        "block_size": shape.block,
        "num_gpu_blocks_override": CACHED_TOKENS // shape.block,
        "tensor_parallel_size": shape.ranks.tensor,
        "pipeline_parallel_size": shape.ranks.pipeline,
        "distributed_executor_backend": "mp" if count > 1 else "uni",
        "skip_tokenizer_init": True,
        "kv_transfer_config": KVTransferConfig(**shape.connect(transfer_config(name, port, trace))),
    }
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**(arguments | dict(shape.arguments))))
    traces = [trace] if count == 1 else [folder / f"{name}.{rank}.ndjson" for rank in range(count)]
    return Side(engine, shape.ranks, port, tuple(traces))


@asynccontextmanager
async def running(folder: Path, case: Case) -> AsyncIterator[dict[str, Side]]:
    """Both engines of a case, and in the end a look at their traces."""
    case.write_model(folder / "model")
    port = free_ports()
    both: dict[str, Side] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            both["one"] = start(folder, "one", case.one, port)
            both["two"] = start(folder, "two", case.two, port + case.one.ranks.count)
            yield both
        finally:
            for side in both.values():
                side.engine.shutdown()
    for trace in (trace for side in both.values() for trace in side.traces):
        report = check_trace(trace)
        assert report.illegal is None, f"{trace.name}: {report.illegal}"
        assert report.steps > 0


async def run(
    side: Side, tokens: list[int], outputs: int, name: str, params: object = None, **more: Any
) -> Any:
    """The final output of one request, sampled greedily."""
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
    """The same words for the same length, shorter prompts being no part of longer ones."""
    return random.Random(length).choices(range(3, 1_000), k=length)


async def hand_over(producer: Side, consumer: Side, tokens: list[int], transfer: str) -> list[int]:
    """Both legs at once. Returns what the consumer says, without a token prefilled there."""
    _, output = await asyncio.gather(
        run(producer, tokens, 1, f"p {transfer}", prefill(transfer)),
        run(consumer, tokens, OUTPUTS, f"d {transfer}", remote(transfer, **producer.remote)),
    )
    assert output.num_cached_tokens == len(tokens), "the decode engine prefilled here"
    for trace in consumer.traces:
        outcomes = [line for line in trace.read_text().splitlines() if f'"{transfer}"' in line]
        assert any('"type":"Delivered"' in line for line in outcomes), "not by a transfer"
        assert not any('"type":"NotDelivered"' in line for line in outcomes)
    return list(output.outputs[0].token_ids)


async def alone(side: Side, tokens: list[int], name: str, outputs: int = OUTPUTS) -> list[int]:
    """What an engine says without any KV from before."""
    output = await run(side, tokens, outputs, f"a {name}", cache_salt=name)
    assert not output.num_cached_tokens
    return list(output.outputs[0].token_ids)
