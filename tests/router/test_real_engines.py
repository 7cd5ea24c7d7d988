"""Real vLLM engines with pushkv behind the published router, which knows nothing of pushkv."""

from __future__ import annotations

from pathlib import Path

import anyio
import httpx
import pytest
from tests.router.router import router_server

from pushkv.demo.engines import vllm_server
from pushkv.demo.supervise import Server, ServerSpec, free_ports, run_servers
from pushkv.demo.tiny_model import make_prompt, write_tiny_model
from pushkv.observe.timeline import read_timelines

pytestmark = [pytest.mark.router, pytest.mark.vllm, pytest.mark.asyncio, pytest.mark.timeout(400)]

LENGTHS = (5, 300, 600, 1000, 1500)
OUTPUT_TOKENS = 12
BLOCK_TOKENS = 128


def engine(
    name: str, role: str, core: int, model: Path, trace: Path, push: bool, port: int
) -> ServerSpec:
    """A vLLM server with the connector."""
    extra = {"trace_path": str(trace), "advertise_push": push}
    config = {
        "kv_connector": "PushKVConnector",
        "kv_role": role,
        "engine_id": name,
        "kv_connector_extra_config": extra,
    }
    return vllm_server(name, model, core, config, port=port)


async def complete(client: httpx.AsyncClient, server: Server, index: int, n: int = 1) -> list[str]:
    """The texts of one greedy completion; each word of the model is one token."""
    body = {
        "model": "tiny",
        "prompt": make_prompt(LENGTHS[index], seed=index),
        "max_tokens": OUTPUT_TOKENS,
        "top_k": 1,  # as greedy as temperature 0, which vLLM refuses where n > 1
        "ignore_eos": True,
        "n": n,
    }
    response = await client.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


async def prompt_tokens(client: httpx.AsyncClient, decode: Server) -> dict[str, float]:
    """Where the decode engine had its prompts' KV from, in tokens, by its own count."""
    text = (await client.get(f"{decode.url}/metrics")).text
    name = "vllm:prompt_tokens_by_source_total"
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return {
        source: sum(float(line.rsplit(" ", 1)[1]) for line in lines if f'"{source}"' in line)
        for source in ("local_compute", "external_kv_transfer")
    }


@pytest.mark.parametrize("mode", ["sequential", "push"])
async def test_the_published_router_fronts_pushkv_unchanged(mode: str, tmp_path: Path) -> None:
    """Right tokens in both modes; early registrations in push mode alone, `n > 1` included."""
    model = write_tiny_model(tmp_path / "model")
    traces = tmp_path / "prefill.ndjson", tmp_path / "decode.ndjson"
    ports = free_ports(3)
    prefill = engine("prefill", "kv_producer", 0, model, traces[0], mode == "push", ports[0])
    decode = engine("decode", "kv_consumer", 1, model, traces[1], False, ports[1])
    urls = [f"http://127.0.0.1:{spec.port}" for spec in (prefill, decode)]
    router = router_server(urls[:1], urls[1:])
    specs = [vllm_server("alone", model, core=0, port=ports[2]), prefill, decode, router]
    async with (
        run_servers(specs, tmp_path) as servers,
        httpx.AsyncClient(timeout=120, trust_env=False) as client,
    ):
        right = [await complete(client, servers["alone"], index) for index in range(len(LENGTHS))]
        assert len({texts[0] for texts in right}) == len(LENGTHS)

        # The first tells the router how to dispatch; the rest go out at once.
        answers: dict[int, list[str]] = {0: await complete(client, servers["router"], 0)}

        async def ask(index: int) -> None:
            answers[index] = await complete(client, servers["router"], index)

        async with anyio.create_task_group() as tasks:
            for index in range(1, len(LENGTHS)):
                tasks.start_soon(ask, index)
        assert [answers[index] for index in range(len(LENGTHS))] == right
        samples = await complete(client, servers["router"], 2, n=2)
        assert samples == right[2] * 2

        delivered = len(LENGTHS) + len(samples)
        # The samples' prompt was there before: of it, only what the prefix cache lacks is pushed.
        missing = LENGTHS[2] % BLOCK_TOKENS
        assert await prompt_tokens(client, servers["decode"]) == {
            "local_compute": 0,
            "external_kv_transfer": sum(LENGTHS) + missing * len(samples),
        }
    timelines = list(read_timelines(*traces).values())
    assert sum(each.delivered_at is not None for each in timelines) == delivered
    early = sum(each.early for each in timelines)
    assert early == 0 if mode == "sequential" else early >= len(LENGTHS) - 1
