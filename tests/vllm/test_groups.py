"""A data-parallel group of two engines behind two API servers, and one engine by itself.

KV goes both ways between each engine of the group and the single one. Run by `make shapes`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from attrs import evolve, frozen
from tests.vllm.harness import prefill, remote
from tests.vllm.shapes import ENVIRONMENT, LONG, OUTPUTS, free_ports, prompt, transfer_config

from pushkv.demo.engines import vllm_server
from pushkv.demo.supervise import Server, ServerSpec, launched, until_ready
from pushkv.demo.tiny_model import write_tiny_model
from pushkv.observe.replay import check_trace

pytestmark = LONG
module = pytest.mark.asyncio(loop_scope="module")

LENGTHS = (5, 300, 1_100)
RANK = "X-data-parallel-rank"
GROUP = ("--data-parallel-size", "2", "--api-server-count", "2", "--enable-log-requests")


@frozen
class Fleet:
    """The servers, where their engines listen, and what these wrote."""

    servers: dict[str, Server]
    ports: dict[str, int]
    traces: dict[str, Path]
    client: httpx.AsyncClient

    async def ask(
        self,
        server: str,
        tokens: list[int],
        outputs: int = OUTPUTS,
        params: object = None,
        rank: int | None = None,
        **more: object,
    ) -> dict[str, Any]:
        """The answer of one completion, over a connection of its own."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": outputs, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, **more}
        if params is not None:
            body["kv_transfer_params"] = params
        headers = {"Connection": "close"} | ({} if rank is None else {RANK: str(rank)})
        url = self.servers[server].url + "/v1/completions"
        answer = await self.client.post(url, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def alone(self, tokens: list[int], name: str) -> list[int]:
        """What the single engine says without any KV from before."""
        return said(await self.ask("single", tokens, cache_salt=name))

    def outcomes(self, engine: str, transfer: str) -> list[str]:
        """How the attempts of a transfer ended at an engine that decodes."""
        return [
            effect["type"]
            for line in self.traces[engine].read_text().splitlines()
            if line.endswith("}") and f'"{transfer}"' in line
            for effect in json.loads(line).get("effects", ())
            if effect["type"] in ("Delivered", "NotDelivered")
        ]


def said(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def server(name: str, model: Path, cores: str, port: int, trace: Path, *more: str) -> ServerSpec:
    spec = vllm_server(
        name,
        model,
        0,
        transfer_config(name, port, trace),
        max_model_len=2_048,
        arguments=("--num-gpu-blocks-override", "96", *more),
        environment=ENVIRONMENT
        | {
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "INFO",
        },
    )
    served = [
        "tests.vllm.serve" if each.startswith("vllm.entrypoints") else each for each in spec.command
    ]
    return evolve(spec, command=served, start_timeout_s=900.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("groups")
    model = write_tiny_model(folder / "model")
    port, last = free_ports(), str((os.cpu_count() or 1) - 1)
    ports = {"group_dp0": port, "group_dp1": port + 1, "single": port + 2}
    traces = {
        "group_dp0": folder / "group.ndjson",
        "group_dp1": folder / "group.1.ndjson",
        "single": folder / "single.ndjson",
    }
    specs = [
        server("group", model, f"0|{last}", port, traces["group_dp0"], *GROUP),
        server("single", model, last, port + 2, traces["single"]),
    ]
    with ExitStack() as running:
        started = [running.enter_context(launched(each, folder / "logs")) for each in specs]
        servers = {
            spec.name: await until_ready(spec, process, None)
            for spec, process in zip(specs, started, strict=True)
        }
        async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
            yield Fleet(servers, ports, traces, client)
    for trace in traces.values():
        report = check_trace(trace)
        assert report.illegal is None, f"{trace.name}: {report.illegal}"
        assert report.steps > 0


def where(fleet: Fleet, engine: str) -> dict[str, object]:
    """What a router that dispatches both legs at once says of a prefill engine."""
    return {
        "remote_host": "127.0.0.1",
        "remote_port": fleet.ports[engine],
        "remote_engine_id": engine,
    }


@module
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("rank", [0, 1])
async def test_each_engine_of_a_group_prefills_and_decodes(
    fleet: Fleet, rank: int, length: int
) -> None:
    tokens, engine = prompt(length + rank), f"group_dp{rank}"
    there, back = f"from {rank}: {length}", f"to {rank}: {length}"
    forth = await asyncio.gather(
        fleet.ask("group", tokens, 1, prefill(there), rank),
        fleet.ask("single", tokens, params=remote(there, **where(fleet, engine))),
    )
    assert fleet.outcomes("single", there) == ["Delivered"]
    assert said(forth[1]) == await fleet.alone(tokens, there)
    other = prompt(length + 10 + rank)
    reverse = await asyncio.gather(
        fleet.ask("single", other, 1, prefill(back)),
        fleet.ask("group", other, params=remote(back, **where(fleet, "single")), rank=rank),
    )
    assert fleet.outcomes(engine, back) == ["Delivered"]
    assert said(reverse[1]) == await fleet.alone(other, back)


@module
async def test_a_response_says_which_engine_has_the_kv(fleet: Fleet) -> None:
    engines = set()
    for number in range(8):
        tokens, transfer = prompt(200 + number), f"told {number}"
        first = await fleet.ask("group", tokens, 1, prefill(transfer), rank=number % 2)
        told = first["kv_transfer_params"]
        assert told["remote_port"] == fleet.ports[told["remote_engine_id"]]
        engines.add(told["remote_engine_id"])
        answer = await fleet.ask("single", tokens, params=told)
        assert fleet.outcomes("single", transfer) == ["Delivered"]
        assert said(answer) == await fleet.alone(tokens, transfer)
    assert engines == {"group_dp0", "group_dp1"}


@module
async def test_another_engine_of_the_group_is_not_taken_for_the_one_that_was_named(
    fleet: Fleet,
) -> None:
    tokens, transfer = prompt(400), "the wrong port"
    wrong = where(fleet, "group_dp0") | {"remote_port": fleet.ports["group_dp1"]}
    answer = await fleet.ask("single", tokens, params=remote(transfer, **wrong))
    assert said(answer) == await fleet.alone(tokens, transfer)
    assert set(fleet.outcomes("single", transfer)) == {"NotDelivered"}


@module
async def test_both_api_servers_answered(fleet: Fleet) -> None:
    text = fleet.servers["group"].log_path.read_text()
    seen = re.findall(r"(ApiServer_\d).* Received request", text)
    assert set(seen) == {"ApiServer_0", "ApiServer_1"}
