"""One real prefill and one real decode engine of vLLM on this machine, KV pushed between them.

They reach each other over TLS with a shared secret, at an address that is not loopback where the
machine has one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import socket
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from attrs import define, field
from prometheus_client.parser import text_string_to_metric_families
from tests.runtime.keys import own_address
from tests.vllm.harness import prefill, remote

from pushkv.cli.engines import Engine
from pushkv.demo.tiny_model import write_tiny_model
from pushkv.observe.replay import check_trace

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(300)]
module = pytest.mark.asyncio(loop_scope="module")

CHUNK_TOKENS = 256
"""Tokens per step."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
HOST = own_address() or "127.0.0.1"
OUTPUTS = 12
names = count()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scraped(port: int) -> Counter[tuple[str, str]]:
    """What an engine's metrics say now, by name and outcome, over all causes."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, sample.labels.get("outcome", "")] += int(sample.value)
    return found


def prompt(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 1_000), k=tokens)


@define
class Pair:
    """A prefill and a decode engine."""

    port: int
    traces: dict[str, Path]
    metrics: dict[str, int]
    engines: dict[str, Any] = field(factory=dict)
    processes: dict[str, list[Any]] = field(factory=dict)

    def kill(self, engine: str) -> None:
        """Ten seconds quicker than to ask; the ports and the memory go with the processes."""
        for process in self.processes[engine]:
            process.kill()
            process.join()

    async def run(
        self,
        engine: str,
        tokens: list[int],
        outputs: int = OUTPUTS,
        params: object = None,
        **more: Any,
    ) -> Any:
        """The final output of one request."""
        from vllm.sampling_params import RequestOutputKind

        from vllm import SamplingParams

        salt = more.pop("cache_salt", None)
        values = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **more}
        values["output_kind"] = RequestOutputKind.FINAL_ONLY
        sampling = SamplingParams(max_tokens=outputs, **values)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        given: dict[str, object] = {"prompt_token_ids": tokens}
        if salt is not None:
            given["cache_salt"] = salt
        stream = self.engines[engine].generate(given, sampling, f"request{next(names)}")
        return [output async for output in stream][-1]

    async def alone(self, tokens: list[int], **more: Any) -> list[list[int]]:
        """What one engine says, without any KV from before."""
        return said(await self.run("prefill", tokens, cache_salt=f"alone{next(names)}", **more))

    async def concurrent(self, transfer: str, tokens: list[int], **more: Any) -> Any:
        """Both legs at once. Returns the decode engine's output."""
        _, output = await asyncio.gather(
            self.run("prefill", tokens, 1, prefill(transfer), **more),
            self.run("decode", tokens, params=self.remote(transfer), **more),
        )
        return output

    def remote(self, transfer: str) -> dict[str, object]:
        return remote(transfer, remote_host=HOST, remote_port=self.port)

    def effects(self, engine: str, kind: str) -> list[dict[str, Any]]:
        """What the runtime of `engine` told it so far, from its trace."""
        lines = self.traces[engine].read_text().splitlines()
        return [
            effect
            for line in lines
            if line.endswith("}")
            for effect in json.loads(line).get("effects", ())
            if effect["type"] == kind
        ]

    async def until(self, engine: str, kind: str, transfer: str) -> dict[str, Any]:
        """The first effect of this kind about this transfer, when it is there."""
        while True:
            for effect in self.effects(engine, kind):
                if effect.get("transfer") == transfer:
                    return effect
            await asyncio.sleep(0.02)


def said(output: Any) -> list[list[int]]:
    return [list(each.token_ids) for each in sorted(output.outputs, key=lambda each: each.index)]


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory, environment: None) -> AsyncIterator[Pair]:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    folder = tmp_path_factory.mktemp("pair")
    write_tiny_model(folder / "model")
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(32))
    names = ("prefill", "decode")
    traces = {name: folder / f"{name}.ndjson" for name in names}
    both = Pair(free_port(), traces, {name: free_port() for name in names})
    roles = {"prefill": ("kv_producer", both.port, 0), "decode": ("kv_consumer", 0, 1)}
    for name, (role, port, core) in roles.items():
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(core % (os.cpu_count() or 1))
        transfer = KVTransferConfig(
            kv_connector="PushKVConnector",
            kv_role=role,
            engine_id=name,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "port": port,
                "listen_host": HOST,
                "shared_secret_path": str(secret),
                "trace_path": str(both.traces[name]),
                "metrics_port": both.metrics[name],
                "admin_socket": str(folder / f"{name}.sock"),
            },
        )
        both.engines[name] = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(folder / "model"),
                dtype="float32",
                enforce_eager=True,
                max_model_len=4_096,
                seed=0,
                distributed_executor_backend="uni",
                max_num_batched_tokens=CHUNK_TOKENS,
                skip_tokenizer_init=True,
                kv_transfer_config=transfer,
            )
        )
        manager = both.engines[name].engine_core.resources.engine_manager
        both.processes[name] = list(manager.processes)
    os.environ.pop("VLLM_CPU_OMP_THREADS_BIND")
    yield both
    for name, engine in both.engines.items():
        both.kill(name)
        engine.shutdown()
    for trace in both.traces.values():
        report = check_trace(trace)
        assert report.illegal is None, f"{trace.name}: {report.illegal}"
        assert report.steps > 0


@module
@pytest.mark.parametrize("length", [5, 128, 129, 700, 1_500])
async def test_concurrent_dispatch_says_the_same(pair: Pair, length: int) -> None:
    tokens = prompt(length, seed=length)
    output = await pair.concurrent(f"concurrent{length}", tokens)
    assert output.num_cached_tokens == length, "the decode engine prefilled here"
    assert said(output) == await pair.alone(tokens)


@module
@pytest.mark.parametrize("length", [5, 128, 1_000])
async def test_sequential_dispatch_says_the_same(pair: Pair, length: int) -> None:
    tokens = prompt(length, seed=10_000 + length)
    first = await pair.run("prefill", tokens, 1, prefill(None))
    output = await pair.run("decode", tokens, params=first.kv_transfer_params)
    await pair.until("decode", "Delivered", first.kv_transfer_params["transfer_id"])
    assert said(output) == await pair.alone(tokens)


def writes(pair: Pair, transfer: str) -> int:
    """How many WRITEs the prefill engine has ordered for a transfer."""
    posts = pair.effects("prefill", "PostWrite")
    return sum(each["attempt"]["transfer"] == transfer for each in posts)


@module
@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_who_is_drained_serves_nobody_until_it_is_taken_back(pair: Pair, name: str) -> None:
    """The decode engine computes the prompt itself, whichever of the two is drained."""
    tokens = prompt(300, seed=17_000 + len(name))
    path = str(pair.traces[name].with_suffix(".sock"))
    engine = Engine(path, path, None)
    assert engine.drain(on=True).is_on
    output = await asyncio.wait_for(pair.concurrent(f"drained-{name}", tokens), 15)
    assert output.num_cached_tokens == 0
    assert said(output) == await pair.alone(tokens)
    assert not engine.drain(on=False).is_on
    output = await pair.concurrent(
        f"undrained-{name}", tokens := prompt(300, seed=18_000 + len(name))
    )
    assert output.num_cached_tokens == len(tokens)


@module
async def test_a_long_prompt_leaves_chunk_by_chunk(pair: Pair) -> None:
    tokens = prompt(8 * CHUNK_TOKENS, seed=15_000)
    output = await pair.concurrent("chunks", tokens)
    assert said(output) == await pair.alone(tokens)
    assert writes(pair, "chunks") == 8


@module
async def test_a_prefill_that_is_preempted_goes_on(pair: Pair) -> None:
    """What was written before stays written; vLLM computes the same tokens once more."""
    tokens = prompt(12 * CHUNK_TOKENS, seed=16_000)
    both = asyncio.create_task(pair.concurrent("preempted", tokens))
    while not writes(pair, "preempted"):
        await asyncio.sleep(0.01)
    with suppress(Exception):  # it preempts, and then refuses: blocks are pinned
        await pair.engines["prefill"].reset_prefix_cache(reset_running_requests=True)
    output = await both
    assert output.num_cached_tokens == len(tokens), "the decode engine prefilled here"
    assert said(output) == await pair.alone(tokens)
    trace = pair.traces["prefill"].read_text()
    assert '"type":"PrefillPreempted"' in trace
    assert writes(pair, "preempted") <= 13, "nothing is written twice"


@module
async def test_many_at_once_say_the_same(pair: Pair) -> None:
    prompts = [prompt(200 + 90 * index, seed=20_000 + index) for index in range(8)]
    outputs = await asyncio.gather(
        *(pair.concurrent(f"many{index}", tokens) for index, tokens in enumerate(prompts))
    )
    assert [each.num_cached_tokens for each in outputs] == [len(tokens) for tokens in prompts]
    for tokens, output in zip(prompts, outputs, strict=True):
        assert said(output) == await pair.alone(tokens)


@module
async def test_samples_say_the_same(pair: Pair) -> None:
    tokens = prompt(300, seed=30_000)
    # Not greedy, or there would be one sample; and no seed, of which vLLM 0.32 on CPU dies where a
    # prompt is computed in chunks.
    more = {"n": 3, "temperature": 1.0, "top_k": 1}
    output = await pair.concurrent("samples", tokens, **more)
    assert said(output) == await pair.alone(tokens, **more)
    for transfer in ("samples", "samples/0.1", "samples/0.2"):
        await pair.until("decode", "Delivered", transfer)


@module
async def test_abort_while_waiting_revokes_and_the_engine_goes_on(pair: Pair) -> None:
    tokens = prompt(500, seed=40_000)
    task = asyncio.create_task(pair.run("decode", tokens, params=pair.remote("orphan")))
    await asyncio.sleep(0.5)
    assert not task.done()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    released = await asyncio.wait_for(pair.until("decode", "BlocksReleased", "orphan"), 20)
    assert released
    output = await pair.concurrent("after-abort", tokens)
    assert output.num_cached_tokens == 500
    assert said(output) == await pair.alone(tokens)


@module
async def test_an_aborted_prefill_is_told_and_recomputed(pair: Pair) -> None:
    tokens = prompt(3_500, seed=50_000)
    decode = asyncio.create_task(pair.run("decode", tokens, params=pair.remote("given-up")))
    doomed = asyncio.create_task(pair.run("prefill", tokens, 1, prefill("given-up")))
    await asyncio.sleep(0.05)
    doomed.cancel()
    with suppress(asyncio.CancelledError):
        await doomed
    output = await asyncio.wait_for(decode, 60)
    failure = await pair.until("decode", "NotDelivered", "given-up")
    assert failure["reason"] == "aborted"
    assert said(output) == await pair.alone(tokens)


@module
async def test_another_prompt_under_the_same_transfer_id_is_never_served(pair: Pair) -> None:
    mine, theirs = prompt(300, seed=60_000), prompt(300, seed=60_001)
    _, output = await asyncio.gather(
        pair.run("prefill", theirs, 1, prefill("stolen")),
        pair.run("decode", mine, params=pair.remote("stolen")),
    )
    failure = await pair.until("decode", "NotDelivered", "stolen")
    assert failure["reason"] == "prompt_mismatch"
    assert said(output) == await pair.alone(mine)


@module
async def test_a_request_that_needs_no_transfer_lets_the_producer_go(pair: Pair) -> None:
    """Prompt logprobs make vLLM compute the whole prompt, wherever its KV may be had."""
    tokens = prompt(300, seed=65_000)
    _, output = await asyncio.gather(
        pair.run("prefill", tokens, 1, prefill("declined")),
        pair.run("decode", tokens, params=pair.remote("declined"), prompt_logprobs=1),
    )
    assert len(output.prompt_logprobs) == 300
    assert said(output) == await pair.alone(tokens)
    assert await asyncio.wait_for(pair.until("prefill", "SourceFreed", "declined"), 10)


@module
@pytest.mark.parametrize("key", ["remote_host", "remote_port", "transfer_id"])
async def test_a_missing_key_costs_a_prefill_here(pair: Pair, key: str) -> None:
    tokens = prompt(100, seed=70_000)
    params = {name: value for name, value in pair.remote("x").items() if name != key}
    output = await pair.run("decode", tokens, params=params)
    assert said(output) == await pair.alone(tokens)


@module
async def test_every_block_came_back(pair: Pair) -> None:
    """Last, about all the others: one outcome and one release for each attempt."""
    outcomes = [
        (each["transfer"], each["attempt"])
        for kind in ("Delivered", "NotDelivered")
        for each in pair.effects("decode", kind)
    ]
    released = [
        (each["transfer"], each["attempt"]) for each in pair.effects("decode", "BlocksReleased")
    ]
    assert len(outcomes) > 10
    assert len(set(outcomes)) == len(outcomes)
    assert sorted(released) == sorted(outcomes)


@module
async def test_metrics_count_what_the_trace_has(pair: Pair) -> None:
    """Of engines that take no step meanwhile."""
    found = await asyncio.to_thread(scraped, pair.metrics["decode"])
    assert found["pushkv_running", ""] == 1
    assert found["pushkv_exposed_blocks", ""] == found["pushkv_quarantined_blocks", ""] == 0
    assert found["pushkv_exposed_blocks_budget", ""] > 0
    drained = pair.traces["decode"].read_text().count('"cause":"refused_while_drained"')
    assert drained == 1
    for outcome, kind, more in (
        ("delivered", "Delivered", 0),
        ("not_delivered", "NotDelivered", 1),
    ):
        counted = found["pushkv_transfers_total", outcome]
        assert counted - more == len(pair.effects("decode", kind)) > 0
    found = await asyncio.to_thread(scraped, pair.metrics["prefill"])
    assert found["pushkv_transfers_total", "served"] > 0


@module
async def test_a_producer_that_dies_costs_a_prefill_here(pair: Pair) -> None:
    """The very last: the link is lost, a retry finds nobody; the client gets its tokens."""
    tokens = prompt(400, seed=80_000)
    expected = await pair.alone(tokens)
    waiting = asyncio.create_task(pair.run("decode", tokens, params=pair.remote("bereaved")))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    pair.kill("prefill")
    assert said(await asyncio.wait_for(waiting, 60)) == expected
    assert await pair.until("decode", "NotDelivered", "bereaved")
