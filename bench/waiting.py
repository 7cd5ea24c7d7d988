"""What a decode engine that only waits for KV costs: CPU, and the time of whoever shares its core.

    python bench/waiting.py [--rounds 8] [--wait-s 10] [--json FILE]

One prefill server and a decode server for each value of `while_waiting`, all on core 0. A request
that no prefill was sent for makes a decode engine wait. Printed for each value: CPU of its
EngineCore and of its API server while it waits, in percent of a core; the time of a prefill at the
prefill server, over the time of one while nobody waits; and the time of another request at the
engine that waits. Medians; the order goes round, so that what else the machine does hits all alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import httpx

from pushkv.demo.engines import vllm_server
from pushkv.demo.supervise import Server, ServerSpec, free_ports, run_servers
from pushkv.demo.tiny_model import make_prompt, write_tiny_model

MODES = ("nobody", "sleep", "pause", "step")
CORE = 0
PREFILL_TOKENS = 512
OTHER_TOKENS = 5
LONG_S = 600


def describe(model: Path, control: int) -> list[ServerSpec]:
    """The servers, by the names of `MODES`."""

    def transfer(role: str, name: str, **options: object) -> dict[str, object]:
        extra = {"expected_s": LONG_S, "waiting_s": LONG_S, "transfer_s": LONG_S, **options}
        return {
            "kv_connector": "PushKVConnector",
            "kv_role": role,
            "engine_id": name,
            "kv_connector_extra_config": extra,
        }

    return [
        vllm_server("prefill", model, CORE, transfer("kv_producer", "prefill", port=control)),
        *(
            vllm_server(mode, model, CORE, transfer("kv_consumer", mode, while_waiting=mode))
            for mode in MODES[1:]
        ),
    ]


def pin(servers: dict[str, Server]) -> None:
    """Every thread of every server onto the one core."""
    for server in servers.values():
        for pid in processes(server.group):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(task.name), {CORE})


def processes(group: int) -> dict[int, str]:
    """The processes of a group, with their names."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                found[int(entry.name)] = (entry / "comm").read_text().strip()
    return found


def cpu_s(pid: int) -> float:
    """User and system time of a process and all its threads, in seconds, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


async def complete(client: httpx.AsyncClient, server: Server, body: dict[str, object]) -> float:
    """Seconds that a completion took."""
    began = time.perf_counter()
    answer = await client.post(f"{server.url}/v1/completions", json={"model": "tiny", **body})
    answer.raise_for_status()
    return time.perf_counter() - began


class Bench:
    """One run; results by mode."""

    def __init__(
        self, servers: dict[str, Server], client: httpx.AsyncClient, control: int, wait_s: float
    ) -> None:
        self.servers, self.client = servers, client
        self.control, self.wait_s = control, wait_s
        self.prefill_s: dict[str, list[float]] = {mode: [] for mode in MODES}
        self.other_s: dict[str, list[float]] = {mode: [] for mode in MODES[1:]}
        self.cpu: dict[str, dict[str, float]] = {}
        self.serial = 0

    def body(self, tokens: int, **more: object) -> dict[str, object]:
        """A prompt that nobody has seen."""
        self.serial += 1
        return {"prompt": make_prompt(tokens, self.serial), "max_tokens": 1, **more}

    @contextlib.asynccontextmanager
    async def waiting(self, mode: str) -> AsyncIterator[None]:
        """A request waits at the engine for KV that nobody makes."""
        if mode == "nobody":
            yield
            return
        params = {
            "do_remote_prefill": True,
            "remote_host": "127.0.0.1",
            "remote_port": self.control,
            "transfer_id": f"never-{self.serial}",
        }
        body = self.body(PREFILL_TOKENS, kv_transfer_params=params)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(complete, self.client, self.servers[mode], body)
            await anyio.sleep(0.5)
            yield
            tasks.cancel_scope.cancel()
        await anyio.sleep(0.3)

    async def measure_cpu(self, mode: str) -> None:
        """CPU of the two processes of one decode server."""
        async with self.waiting(mode):
            names = processes(self.servers[mode].group)
            before = {pid: cpu_s(pid) for pid in names}
            await anyio.sleep(self.wait_s)
            used = {pid: 100 * (cpu_s(pid) - before[pid]) / self.wait_s for pid in names}
        core = {pid for pid, name in names.items() if "Engine" in name}
        self.cpu[mode] = {
            "engine_core": sum(used[pid] for pid in core),
            "api_server": sum(value for pid, value in used.items() if pid not in core),
        }

    async def measure_times(self, mode: str, count: int = 3) -> None:
        """Prefills beside an engine that waits, and a short request at that engine."""
        async with self.waiting(mode):
            for _ in range(count):
                prefill = self.servers["prefill"]
                took = await complete(self.client, prefill, self.body(PREFILL_TOKENS))
                self.prefill_s[mode].append(took)
                if mode != "nobody":
                    other = self.servers[mode]
                    self.other_s[mode].append(
                        await complete(self.client, other, self.body(OTHER_TOKENS))
                    )

    def report(self) -> dict[str, dict[str, float]]:
        """One line per mode."""
        alone = statistics.median(self.prefill_s["nobody"])
        result = {"nobody": {"prefill_s": alone}}
        for mode in MODES[1:]:
            result[mode] = {
                **self.cpu[mode],
                "prefill_s": statistics.median(self.prefill_s[mode]),
                "slower": statistics.median(self.prefill_s[mode]) / alone - 1,
                "other_s": statistics.median(self.other_s[mode]),
            }
        return result


async def run(rounds: int, wait_s: float) -> dict[str, dict[str, float]]:
    """Start, measure, end."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model = write_tiny_model(directory / "model")
        (control,) = free_ports(1)
        async with (
            run_servers(describe(model, control), directory) as servers,
            httpx.AsyncClient(timeout=LONG_S, trust_env=False) as client,
        ):
            pin(servers)
            bench = Bench(servers, client, control, wait_s)
            for server in servers.values():
                for _ in range(3):
                    await complete(client, server, bench.body(PREFILL_TOKENS))
            for mode in MODES[1:]:
                await bench.measure_cpu(mode)
            for index in range(rounds):
                for mode in MODES[index % len(MODES) :] + MODES[: index % len(MODES)]:
                    await bench.measure_times(mode)
        return bench.report()


def show(result: dict[str, dict[str, float]]) -> None:
    """As a table."""
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("while waiting  EngineCore  API server   prefill beside it   another request")
    for mode in MODES[1:]:
        one = result[mode]
        print(
            f"{mode:13} {one['engine_core']:9.2f} % {one['api_server']:9.2f} %"
            f" {1000 * one['prefill_s']:10.1f} ms {100 * one['slower']:+5.1f} %"
            f" {1000 * one['other_s']:12.1f} ms"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--wait-s", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    measured = anyio.run(run, arguments.rounds, arguments.wait_s)
    show(measured)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")
