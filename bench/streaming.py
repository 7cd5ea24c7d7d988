"""What streaming leaves to be written when prefill is over, and where the time to decode goes.

    python bench/streaming.py [--prompts 5] [--chunks 8] [--json FILE]

Two prefill servers that differ in `streaming` alone, one decode server; prompts of so many chunks
go through either in turn, both legs at once. All instants are of the host's monotonic clock, from
the engines' traces; medians. Answers are compared with those of the decode server alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import anyio
import httpx

from pushkv.demo.engines import vllm_server
from pushkv.demo.supervise import Server, ServerSpec, free_ports, run_servers
from pushkv.demo.tiny_model import TinyModel, make_prompt, write_tiny_model
from pushkv.observe.trace import trace_lines

CHUNK_TOKENS = 256
MODES = ("streaming", "whole")
OUTPUT_TOKENS = 8
LONG_S = 600
SHAPE = TinyModel(layers=16, kv_heads=16, heads=16)
"""128 KiB of KV per token, as a model of 8 billion parameters has."""
INSTANTS = ("prefilled", "ordered", "written", "verdict", "delivered", "answered")
STEPS = {
    "ordered": "prefill is over -> its last WRITE is ordered",
    "written": "-> all WRITEs are done",
    "verdict": "-> COMPLETE is sent",
    "delivered": "-> the decode engine is told",
    "answered": "-> the client has its first token",
}


def describe(model: Path, directory: Path, controls: dict[str, int]) -> list[ServerSpec]:
    """The three servers; each engine writes a trace named after it."""

    def transfer(role: str, name: str, **options: object) -> dict[str, object]:
        trace = str(directory / f"{name}.ndjson")
        extra = {"trace_path": trace, "expected_s": LONG_S, "waiting_s": LONG_S, **options}
        return {
            "kv_connector": "PushKVConnector",
            "kv_role": role,
            "engine_id": name,
            "kv_connector_extra_config": extra,
        }

    chunked = ("--max-num-batched-tokens", str(CHUNK_TOKENS), "--no-enable-prefix-caching")
    producers = [
        vllm_server(
            mode,
            model,
            0,
            transfer("kv_producer", mode, port=controls[mode], streaming=mode == "streaming"),
            arguments=chunked,
        )
        for mode in MODES
    ]
    consumer = transfer("kv_consumer", "decode")
    return [
        *producers,
        vllm_server("decode", model, 1, consumer, arguments=("--no-enable-prefix-caching",)),
    ]


async def complete(client: httpx.AsyncClient, server: Server, body: dict[str, object]) -> str:
    """The text of a greedy completion."""
    body = {"model": "tiny", "temperature": 0, "ignore_eos": True, **body}
    answer = await client.post(f"{server.url}/v1/completions", json=body)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


async def transfer(
    client: httpx.AsyncClient,
    servers: dict[str, Server],
    mode: str,
    name: str,
    prompt: str,
    control: int,
    tokens: int,
) -> tuple[str, int]:
    """Both legs of one request; the decode leg's text, and when it was there."""
    texts: list[str] = []

    async def decode() -> None:
        params = {
            "do_remote_prefill": True,
            "remote_host": "127.0.0.1",
            "remote_port": control,
            "transfer_id": name,
        }
        body = {"prompt": prompt, "max_tokens": tokens, "kv_transfer_params": params}
        texts.append(await complete(client, servers["decode"], body))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(decode)
        params = {"do_remote_decode": True, "transfer_id": name}
        body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}
        tasks.start_soon(complete, client, servers[mode], body)
    return texts[0], time.monotonic_ns()


def instants(trace: Path) -> dict[str, dict[str, int]]:
    """Of each transfer, when what happened, as far as this engine knows."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for line in trace_lines(trace):
        one: dict[str, Any] = json.loads(line)
        if one["kind"] == "write" and one["outcome"] == "done":
            found[one["attempt"]["transfer"]]["written"] = one["t"]
        if one["kind"] != "step" or one["machine"] not in ("producer", "request"):
            continue
        transfer = one["key"][0] if isinstance(one["key"], list) else one["key"]
        if one["event"]["type"] == "Computed" and one["event"]["final"]:
            found[transfer]["prefilled"] = one["t"]
        for effect in one["effects"]:
            if effect["type"] == "PostWrite":
                found[transfer]["ordered"] = one["t"]
            elif effect["type"] == "Send" and effect["message"]["type"] == "Complete":
                found[transfer]["verdict"] = one["t"]
            elif effect["type"] == "Delivered":
                found[transfer]["delivered"] = one["t"]
    return found


async def run(prompts: int, chunks: int, directory: Path) -> dict[str, dict[str, float]]:
    """Start, measure, end. Milliseconds by mode and step, and the share of right answers."""
    tokens = chunks * CHUNK_TOKENS
    model = write_tiny_model(directory / "model", shape=SHAPE)
    controls = dict(zip(MODES, free_ports(2), strict=True))
    answered: dict[str, int] = {}
    right: dict[str, list[bool]] = {mode: [] for mode in MODES}
    async with (
        run_servers(describe(model, directory, controls), directory) as servers,
        httpx.AsyncClient(timeout=LONG_S, trust_env=False) as client,
    ):
        for index in range(-1, prompts):  # the first warms up
            prompt = make_prompt(tokens, index + 1, SHAPE)
            body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS}
            expected = await complete(client, servers["decode"], body)
            for mode in MODES if index % 2 else MODES[::-1]:
                name = f"{mode}-{index}"
                control = controls[mode]
                one = (client, servers, mode)
                text, _ = await transfer(*one, name, prompt, control, OUTPUT_TOKENS)
                right[mode].append(text == expected)
                first = f"{name}-first"
                _, answered[first] = await transfer(*one, first, prompt, control, 1)
        consumer = instants(directory / "decode.ndjson")
        result = {}
        for mode in MODES:
            producer = instants(directory / f"{mode}.ndjson")
            rows = [
                {**producer[name], **consumer[name], "answered": at}
                for name, at in answered.items()
                if name.startswith(mode) and "--1" not in name
            ]
            result[mode] = summary(rows)
            result[mode]["right"] = sum(right[mode]) / len(right[mode])
    return result


def summary(rows: list[dict[str, int]]) -> dict[str, float]:
    """Medians of the steps, in milliseconds."""
    found: dict[str, float] = {}
    for before, after in itertools.pairwise(INSTANTS):
        found[after] = statistics.median(each[after] - each[before] for each in rows) / 1e6
    exposed = (each["written"] - each["prefilled"] for each in rows)
    found["exposed"] = statistics.median(exposed) / 1e6
    return found


def show(result: dict[str, dict[str, float]]) -> None:
    """As a table."""
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; milliseconds")
    print(f"{'':48}{'streaming':>12}{'whole':>12}")
    for name, what in STEPS.items():
        print(f"{what:48}" + "".join(f"{result[mode][name]:12.2f}" for mode in MODES))
    exposed = [result[mode]["exposed"] for mode in MODES]
    print(f"{'exposed: prefill is over -> all is written':48}{exposed[0]:12.2f}{exposed[1]:12.2f}")
    print(f"ratio of the exposed times: {exposed[0] / exposed[1]:.2f}")
    for mode in MODES:
        print(f"{mode}: {100 * result[mode]['right']:.0f} % of the answers as without a transfer")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--directory", type=Path, help="keeps logs and traces; else they go")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        kept = arguments.directory or Path(scratch)
        measured = anyio.run(run, arguments.prompts, arguments.chunks, kept)
    show(measured)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")
