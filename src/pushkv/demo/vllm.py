"""The demo with real vLLM: a monolithic, a prefill and a decode server behind the proxy."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import httpx
from attrs import frozen
from rich.progress import Progress as Bars
from rich.progress import TaskID

from pushkv.core.errors import MissingDependencyError, PushKVError
from pushkv.core.ids import TransferId
from pushkv.observe.timeline import (
    Timeline,
    read_cache,
    read_source_blocks,
    read_timelines,
)

from .canary import flip_first_block
from .engines import vllm_server
from .pair import describe_pair
from .report import DemoReport, RequestReport
from .supervise import Progress, Server, run_servers
from .tiny_model import make_prompt, write_tiny_model

__all__ = ["PROMPT_TOKENS", "run_vllm_demo"]

PROMPT_TOKENS = (5, 64, 300, 512, 600, 700, 1024, 1200, 1500, 2000)
OUTPUT_TOKENS = 16
CANARY_TOKENS = 100
V_OFFSET_BYTES = 64 * 4 + 3
"""The highest byte of the first V: vLLM's CPU cache holds K and V of a token side by side, in this
model 64 float32 each. A huge V cannot be attended away, as a huge K can."""
REQUEST_S = 300.0


@frozen
class _Answer:
    tokens: tuple[int, ...]
    first_token_at: int


@frozen
class _Fleet:
    """Everything that runs, and where it writes."""

    servers: dict[str, Server]
    traces: tuple[Path, Path]

    def url(self, name: str) -> str:
        return self.servers[name].url + "/v1/completions"


def run_vllm_demo(dispatch: str, logs: Path | None, bars: Bars) -> DemoReport:
    """Push `PROMPT_TOKENS` concurrently between two vLLM servers and compare every token.

    Takes a minute or two, most of it starting three servers. Leaves no process behind.

    Raises:
        MissingDependencyError: vLLM is not installed.
        PushKVError: A server did not start or died.
    """
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "vLLM is not installed: `make demo` installs it where there is a wheel; "
            "`pushkv demo --engine reference` needs none"
        ) from error
    with tempfile.TemporaryDirectory(prefix="pushkv-demo-") as scratch:
        directory = Path(scratch) if logs is None else logs
        return anyio.run(_run, dispatch, directory, Path(scratch, "model"), bars)


async def _run(dispatch: str, directory: Path, model: Path, bars: Bars) -> DemoReport:
    report = DemoReport("vllm", dispatch)
    task = bars.add_task("writing a tiny model", total=None)
    await anyio.to_thread.run_sync(write_tiny_model, model)
    bars.update(task, total=1, completed=1)
    pair = describe_pair(dispatch, directory, model)
    specs = [vllm_server("monolithic", model, core=0), *pair.specs]
    async with run_servers(specs, directory, _show(bars)) as servers:
        fleet = _Fleet(servers, pair.traces)
        async with httpx.AsyncClient(timeout=REQUEST_S, trust_env=False) as client:
            await _push(report, fleet, client, bars)
            report.local_prefills = await _local_prefills(report, fleet, client)
            await _canary(report, fleet, client, bars)
    report.check_traces(pair.traces)
    timelines = read_timelines(*pair.traces)
    cache = read_cache(pair.traces[0])
    for each in report.requests:
        each.timeline = timelines.get(TransferId(each.transfer), Timeline())
        each.bytes_expected = cache.bytes_of(each.prompt_tokens)
    return report


def _show(bars: Bars) -> Callable[[Progress], None]:
    tasks: dict[str, TaskID] = {}

    def show(news: Progress) -> None:
        if news.name not in tasks:
            tasks[news.name] = bars.add_task(f"starting {news.name}", total=None)
        if news.ready:
            bars.update(tasks[news.name], total=1, completed=1)

    return show


async def _push(report: DemoReport, fleet: _Fleet, client: httpx.AsyncClient, bars: Bars) -> None:
    """Every prompt at once through the proxy; then the same from the monolithic engine."""
    answers: dict[int, _Answer] = {}
    pushing = bars.add_task("pushing KV from prefill to decode", total=len(PROMPT_TOKENS))
    report.requests = [RequestReport("", length, 0) for length in PROMPT_TOKENS]

    async def push(index: int) -> None:
        one = report.requests[index]
        one.started_at = time.monotonic_ns()
        try:
            answers[index] = await _complete(client, fleet.url("proxy"), index, one)
            one.first_token_at = answers[index].first_token_at
        except (httpx.HTTPError, PushKVError) as error:
            one.failure = str(error) or type(error).__name__
        bars.advance(pushing)

    async with anyio.create_task_group() as tasks:
        for index in range(len(PROMPT_TOKENS)):
            tasks.start_soon(push, index)
    comparing = bars.add_task("the same from the monolithic engine", total=len(answers))
    for index, answer in answers.items():
        alone = await _complete(client, fleet.url("monolithic"), index, None)
        report.requests[index].identical = answer.tokens == alone.tokens
        bars.advance(comparing)


async def _complete(
    client: httpx.AsyncClient, url: str, index: int, one: RequestReport | None
) -> _Answer:
    """Stream one completion; greedy, and never ended early."""
    prompt = make_prompt(PROMPT_TOKENS[index], seed=index)
    tokens: list[int] = []
    first = 0
    async with client.stream("POST", url, json=_body(prompt) | {"stream": True}) as response:
        if response.status_code != 200:
            await response.aread()
            raise PushKVError(f"{response.status_code}: {response.text[:200]}")
        if one is not None:
            one.transfer = response.headers["x-pushkv-transfer-id"]
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise PushKVError(str(event["error"]))
            first = first or time.monotonic_ns()
            tokens += event["choices"][0]["token_ids"] or []
    return _Answer(tuple(tokens), first)


def _body(prompt: str) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def _local_prefills(report: DemoReport, fleet: _Fleet, client: httpx.AsyncClient) -> int:
    """How many prompts the decode engine computed, by vLLM's own count of tokens.

    A prompt whose KV came from elsewhere counts as wholly external there, although vLLM computes
    its last token anew for the logits.
    """
    answer = await client.get(fleet.servers["decode"].url + "/metrics")
    computed = sum(
        float(line.rsplit(" ", 1)[1])
        for line in answer.text.splitlines()
        if line.startswith("vllm:prompt_tokens_by_source_total") and '"local_compute"' in line
    )
    local = 0
    for length in sorted(each.prompt_tokens for each in report.requests if not each.failure):
        if computed <= 0:
            break
        computed -= length
        local += 1
    return local


async def _canary(report: DemoReport, fleet: _Fleet, client: httpx.AsyncClient, bars: Bars) -> None:
    """Flip a byte of finished KV at the producer before it is pushed: the tokens must differ."""
    bars.add_task("flipping a byte of KV", total=1, completed=1)
    body = _body(make_prompt(CANARY_TOKENS, seed=1_000))

    async def tokens(name: str, more: dict[str, object]) -> tuple[list[int], object]:
        response = await client.post(fleet.url(name), json=body | more)
        if response.status_code != 200:
            raise PushKVError(f"{name}: {response.status_code}: {response.text[:200]}")
        answer = response.json()
        return answer["choices"][0]["token_ids"], answer.get("kv_transfer_params")

    right, _ = await tokens("monolithic", {})
    leg = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "canary"}
    _, params = await tokens("prefill", {"max_tokens": 1, "kv_transfer_params": leg})
    blocks = read_source_blocks(fleet.traces[0])[TransferId("canary")]
    flip_first_block(read_cache(fleet.traces[0]), blocks, V_OFFSET_BYTES)
    wrong, _ = await tokens("decode", {"kv_transfer_params": params})
    report.canary_changed = wrong != right
