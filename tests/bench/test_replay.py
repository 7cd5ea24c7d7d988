"""A run over engines that only pretend: who gets what, in which order, and what is counted."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import anyio
import httpx
import pytest
from attrs import define, evolve, field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from pushkv.bench.fleet import describe_fleet
from pushkv.bench.replay import Bench, Load, Settings
from pushkv.bench.results import Results
from pushkv.bench.trace_file import TraceRow
from pushkv.bench.workload import parse_cell, parse_lengths
from pushkv.demo.supervise import Server

pytestmark = pytest.mark.asyncio
MODES = ("mono", "pull", "push", "push_sequential")


@define
class Engines:
    """Answer everything after a moment; `broken` engines answer 500."""

    broken: str = ""
    seconds: float = 0.0
    asked: list[tuple[str, int, tuple[int, ...]]] = field(factory=list)
    now: dict[str, int] = field(factory=dict)
    most: dict[str, int] = field(factory=dict)

    async def answer(self, request: Request) -> Response:
        name = str(request.path_params["name"])
        body = await request.json()
        self.asked.append((name, body["max_tokens"], tuple(body["prompt"])))
        self.now[name] = self.now.get(name, 0) + 1
        self.most[name] = max(self.most.get(name, 0), self.now[name])
        await anyio.sleep(self.seconds)
        self.now[name] -= 1
        status = 500 if name == self.broken else 200
        if not body.get("stream"):
            return JSONResponse({"kv_transfer_params": {"x": 1}}, status)
        return StreamingResponse(self._tokens(body["max_tokens"]), status)

    async def _tokens(self, count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield f"data: {json.dumps({'choices': [{'token_ids': [9]}]})}\n\n".encode()
        yield b"data: [DONE]\n\n"

    async def metrics(self, request: Request) -> Response:
        name = request.path_params["name"]
        total = sum(each == name for each, _, _ in self.asked)
        return PlainTextResponse(
            f"vllm:request_queue_time_seconds_count {total}\n"
            f"vllm:request_queue_time_seconds_sum {total * 0.5}\n"
            f'vllm:prompt_tokens_by_source_total{{source="local_compute"}} {total}\n'
        )

    async def run(self, settings: Settings, directory: Path) -> Results:
        app = Starlette(
            routes=[
                Route("/{name}/v1/completions", self.answer, methods=["POST"]),
                Route("/{name}/metrics", self.metrics),
            ]
        )
        fleet = describe_fleet(settings.modes, directory, directory)
        servers: Mapping[str, Server] = {
            spec.name: Server(
                spec.name, f"http://x/{spec.name}", os.getpgrp(), directory / "log", 0.0
            )
            for spec in fleet.specs
        }
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport) as client:
            return await Bench(settings, fleet, servers, client, lambda *_: None).run()


SETTINGS = Settings(
    [Load(parse_cell("300@50", parse_lengths("4")))],
    MODES,
    rounds=2,
    round_s=0.1,
    requests_min=3,
    idle_s=0.01,
    price_per_engine_hour=3_600.0,
)


async def test_every_mode_gets_the_same_load_and_warm_up_is_not_counted(tmp_path: Path) -> None:
    engines = Engines()
    results = await engines.run(SETTINGS, tmp_path)
    (cell,) = results.cells
    assert tuple(cell.modes) == tuple(results.idle_cpu_share) == MODES
    for mode, one in cell.modes.items():
        assert (one.n, one.completed, one.failed) == (10, 10, 0)
        assert one.ttft_s is not None
        assert one.excess_s == one.ttft_s.p50 - cell.prefill_only_s
        assert one.engines == (1 if mode == "mono" else 2)
        assert one.cost_per_request == pytest.approx(one.engines * one.duration_s / 10)
        assert set(one.queue_s.values()) == {0.5}
        assert one.computed_at_decode == (None if mode == "mono" else 10)  # over both rounds
    assert len(cell.prefill_only_each_s) == 2 * len(MODES)
    streamed = [prompt for name, tokens, prompt in engines.asked if tokens == 4 and name == "mono"]
    # Two warm-ups, ten requests, one before each of two turns, one before the first prefill alone.
    assert len(streamed) == 15


async def test_no_engine_sees_a_prompt_twice(tmp_path: Path) -> None:
    engines = Engines()
    await engines.run(SETTINGS, tmp_path)
    for name in {each for each, _, _ in engines.asked}:
        first_blocks = [prompt[:128] for each, _, prompt in engines.asked if each == name]
        seen = [one for one in first_blocks if len(one) == 128]
        assert len(seen) == len(set(seen)) > 10


async def test_shared_tokens_are_shared_in_every_round(tmp_path: Path) -> None:
    engines = Engines()
    load = Load(parse_cell("300@50+128", parse_lengths("4")))
    await engines.run(evolve(SETTINGS, loads=[load], modes=("pull",)), tmp_path)
    asked = [p for name, _, p in engines.asked if name.startswith("decode") and len(p) == 300]
    assert len({prompt[:128] for prompt in asked}) == 1
    assert len({prompt[128:256] for prompt in asked}) == len(asked)


async def test_modes_take_turns_and_each_begins_a_round(tmp_path: Path) -> None:
    engines = Engines()
    await engines.run(evolve(SETTINGS, modes=("mono", "pull")), tmp_path)
    phases: list[str] = []
    for name, tokens, prompt in engines.asked:
        if tokens == 4 and len(prompt) == 300 and (not phases or phases[-1] != name):
            phases.append(name)
    assert phases == ["mono", "decode-NixlConnector", "mono"]


async def test_failures_are_counted_as_failures(tmp_path: Path) -> None:
    engines = Engines(broken="prefill-NixlConnector")
    modes = (await engines.run(SETTINGS, tmp_path)).cells[0].modes
    pull = modes["pull"]
    assert (pull.n, pull.failed, pull.completed) == (10, 10, 0)
    assert pull.failures == {"prefill answered 500": 10}
    assert pull.ttft_s is None
    assert (pull.good_share, pull.cost_per_request) == (0.0, None)
    assert modes["push"].failed == 0


async def test_one_at_a_time_is_one_at_a_time_and_a_burst_is_not(tmp_path: Path) -> None:
    load = Load(parse_cell("300", parse_lengths("4")))
    engines = Engines(seconds=0.02)
    await engines.run(evolve(SETTINGS, loads=[load], modes=("mono",)), tmp_path)
    assert engines.most == {"mono": 1}
    rows = [TraceRow(1_000, 300, 4, (index,)) for index in range(8)]
    burst = Load(parse_cell("300", parse_lengths("4")), rows, 512)
    engines = Engines(seconds=0.02)
    results = await engines.run(evolve(SETTINGS, loads=[burst], modes=("mono",)), tmp_path)
    assert results.cells[0].modes["mono"].n == 8
    assert engines.most == {"mono": 4}


async def test_objectives_decide_what_is_good(tmp_path: Path) -> None:
    engines = Engines(seconds=0.05)
    settings = evolve(SETTINGS, modes=("mono",), slo_ttft_s=0.001)
    one = (await engines.run(settings, tmp_path)).cells[0].modes["mono"]
    assert (one.good_share, one.goodput_qps) == (0.0, 0.0)
    one = (await engines.run(evolve(settings, slo_ttft_s=60), tmp_path)).cells[0].modes["mono"]
    assert one.good_share == 1.0
    assert one.goodput_qps == pytest.approx(10 / one.duration_s)
