"""Where the time to the first token goes, from the client's request to its answer.

    python bench/first_token.py [--prompts 20] [--tokens 512] [--json FILE]

A prefill server on core 0, a decode server on core 1, one request at a time, both legs at once, and
one output token. All instants are of the host's monotonic clock: from the engines' traces, and from
the marks that their hooks leave (`PUSHKV_HOOK_MARKS`). Medians of each stage, and of what the
prefill server alone takes for such a prompt.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import anyio
import httpx
from attrs import frozen
from streaming import LONG_S, SHAPE, complete, instants, transfer

from pushkv.demo import engine_site
from pushkv.demo.engine_site.sitecustomize import HOOKS, MARKS
from pushkv.demo.engines import vllm_server
from pushkv.demo.supervise import ServerSpec, free_ports, run_servers
from pushkv.demo.tiny_model import make_prompt, write_tiny_model

STAGES = {
    "prefill begins": "engine: HTTP, tokenizer, scheduler, until the model runs",
    "prefill ends": "engine: the model, for the prompt",
    "prefilled": "engine: sampling, until the request has finished",
    "ordered": "pushkv: prefill is over -> the WRITE is ordered",
    "written": "pushkv: the WRITE",
    "verdict": "pushkv: COMPLETE is sent",
    "delivered": "pushkv: COMPLETE crosses, the decode engine is told",
    "engine steps": "engine: its loop wakes",
    "decode begins": "engine: the empty step that takes the news, then the scheduler",
    "decode ends": "engine: the model, for one token",
    "answered": "engine: sampling, API server, HTTP",
}
"""What ends each stage; the first begins when the client sends."""
PUSHKVS = ("ordered", "written", "verdict", "delivered", "engine steps")


@frozen
class Marks:
    """When the calls of an engine's hooks were, in nanoseconds, by name and oldest first.

    Attributes:
        steps: Beginnings of `build_connector_meta`: the scheduler is done, one for each step.
        layers: Beginnings of `wait_for_layer_load`: the model is about to run a layer.
        saved: Ends of `save_kv_layer`: it has.
    """

    steps: Sequence[int]
    layers: Sequence[int]
    saved: Sequence[int]

    def step_after(self, instant: int) -> int:
        """When the first step after an instant was scheduled."""
        return self.steps[bisect_right(self.steps, instant)]

    def model_before(self, instant: int) -> tuple[int, int]:
        """When the last run of the model before an instant began and ended."""
        ended = self.saved[bisect_right(self.saved, instant) - 1]
        scheduled = self.steps[bisect_right(self.steps, ended) - 1]
        return self.layers[bisect_right(self.layers, scheduled)], ended


def read_marks(path: Path) -> Marks:
    """What an engine left."""
    numbers = array.array("Q", path.read_bytes())
    calls = list(zip(numbers[0::3], numbers[1::3], numbers[2::3], strict=True))

    def of(name: str) -> list[tuple[int, int, int]]:
        return [each for each in calls if HOOKS[each[0]] == name]

    return Marks(
        [began for _, began, _ in of("build_connector_meta")],
        [began for _, began, _ in of("wait_for_layer_load")],
        [ended for _, _, ended in of("save_kv_layer")],
    )


def describe(model: Path, directory: Path, control: int) -> list[ServerSpec]:
    """The two servers; each leaves a trace and marks."""
    site = str(Path(engine_site.__file__).parent)
    path = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))

    def server(name: str, core: int, role: str, port: int) -> ServerSpec:
        extra = {"trace_path": str(directory / f"{name}.ndjson"), "port": port}
        config = {
            "kv_connector": "PushKVConnector",
            "kv_role": role,
            "engine_id": name,
            "kv_connector_extra_config": {**extra, "expected_s": LONG_S, "waiting_s": LONG_S},
        }
        return vllm_server(
            name,
            model,
            core,
            config,
            arguments=("--no-enable-prefix-caching",),
            environment={"PYTHONPATH": path, MARKS: str(directory / f"{name}.marks")},
        )

    return [
        server("prefill", 0, "kv_producer", control),
        server("decode", 1, "kv_consumer", 0),
    ]


async def run(prompts: int, tokens: int, directory: Path) -> dict[str, object]:
    """Start, measure, end. Medians in milliseconds."""
    model = write_tiny_model(directory / "model", shape=SHAPE)
    (control,) = free_ports(1)
    sent: dict[str, int] = {}
    answered: dict[str, int] = {}
    alone: list[float] = []
    async with (
        run_servers(describe(model, directory, control), directory) as servers,
        httpx.AsyncClient(timeout=LONG_S, trust_env=False) as client,
    ):
        for index in range(-3, prompts):  # the first ones warm up
            body = {"prompt": make_prompt(tokens, 2 * index + 10, SHAPE), "max_tokens": 1}
            began = time.monotonic_ns()
            await complete(client, servers["prefill"], body)
            took = time.monotonic_ns() - began
            prompt, name = make_prompt(tokens, 2 * index + 11, SHAPE), f"first-{index}"
            began = time.monotonic_ns()
            _, ended = await transfer(client, servers, "prefill", name, prompt, control, 1)
            if index >= 0:
                alone.append(took / 1e6)
                sent[name], answered[name] = began, ended
    rows = [found for _, found in sorted(stages(directory, sent, answered).items())]
    medians = {
        name: statistics.median(after[name] - before for after, before in _pairs(rows, name)) / 1e6
        for name in STAGES
    }
    whole = [(row["answered"] - row["sent"]) / 1e6 for row in rows]
    return {
        "tokens": tokens,
        "prompts": len(rows),
        "stages_ms": medians,
        "first_token_ms": statistics.median(whole),
        "prefill_alone_ms": statistics.median(alone),
        "load_average": os.getloadavg()[0],
    }


def stages(
    directory: Path, sent: dict[str, int], answered: dict[str, int]
) -> dict[str, dict[str, int]]:
    """Of each request, when each stage ended."""
    producer, consumer = (instants(directory / f"{name}.ndjson") for name in ("prefill", "decode"))
    prefill, decode = (read_marks(directory / f"{name}.marks") for name in ("prefill", "decode"))
    found = {}
    for name, began in sent.items():
        row = {**producer[name], **consumer[name], "sent": began, "answered": answered[name]}
        row["prefill begins"], row["prefill ends"] = prefill.model_before(row["prefilled"])
        row["engine steps"] = decode.step_after(row["delivered"])
        row["decode begins"], row["decode ends"] = decode.model_before(row["answered"])
        found[name] = row
    return found


def _pairs(rows: list[dict[str, int]], name: str) -> list[tuple[dict[str, int], int]]:
    names = ["sent", *STAGES]
    before = names[names.index(name) - 1]
    return [(row, row[before]) for row in rows]


def show(result: dict[str, object]) -> None:
    """As a table."""
    medians = result["stages_ms"]
    assert isinstance(medians, dict)
    print(f"load average {result['load_average']:.1f} on {os.cpu_count()} cores; milliseconds")
    for name, what in STAGES.items():
        print(f"{what:64}{medians[name]:10.2f}")
    print(f"{'the client has its first token after':64}{result['first_token_ms']:10.2f}")
    print(f"{'of which pushkv':64}{sum(medians[name] for name in PUSHKVS):10.2f}")
    print(f"{'prefill server alone':64}{result['prefill_alone_ms']:10.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--directory", type=Path, help="keeps logs, traces and marks; else they go")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        kept = arguments.directory or Path(scratch)
        kept.mkdir(parents=True, exist_ok=True)
        measured = anyio.run(run, arguments.prompts, arguments.tokens, kept)
    show(measured)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")
