"""CPU that an idle pair costs: ten seconds after ten transfers, over all processes and threads.

    python bench/idle.py reference
    python bench/idle.py vllm

For vLLM the API servers' share is printed apart, since it is neither pushkv's nor the engine's, and
a monolithic engine's beside the pair's, since vLLM's own threads are not quite idle either.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import anyio
import httpx

from pushkv.demo.engines import vllm_server
from pushkv.demo.pair import describe_pair
from pushkv.demo.reference import ReferenceProcess
from pushkv.demo.supervise import run_servers
from pushkv.demo.tiny_model import make_prompt, write_tiny_model
from pushkv.testing.reference_engine import Role

TRANSFERS = 10
SETTLE_S = 10.0
MEASURE_S = 30.0


def cpu_s(pid: int) -> float:
    """User and system time of a process and all its threads, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share(pids: list[int]) -> dict[int, float]:
    """Percent of one core that each process uses over `MEASURE_S` seconds."""
    before = {pid: cpu_s(pid) for pid in pids}
    time.sleep(MEASURE_S)
    return {pid: 100 * (cpu_s(pid) - before[pid]) / MEASURE_S for pid in pids}


def reference() -> None:
    """Two reference engines over NIXL."""
    prefill, decode = ReferenceProcess("prefill"), ReferenceProcess("decode")
    try:
        address = prefill.wait_ready()
        decode.wait_ready()
        for index in range(TRANSFERS):
            prompt = tuple(range(index, index + 500))
            prefill.submit(f"idle-{index}", prompt, Role.PRODUCE)
            decode.submit(f"idle-{index}", prompt, Role.CONSUME, 8, address).result(60)
        time.sleep(SETTLE_S)
        shares = share([prefill.pid, decode.pid])
        print(f"reference pair: {sum(shares.values()):.1f} % of a core")
    finally:
        prefill.stop()
        decode.stop()


def group_pids(group: int) -> dict[int, str]:
    """The processes of a group, with their names."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
            found[int(entry.name)] = (entry / "comm").read_text().strip()
    return found


async def vllm() -> None:
    """A prefill and a decode server of vLLM."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model = write_tiny_model(directory / "model")
        pair = describe_pair("concurrent", directory, model)
        specs = [vllm_server("monolithic", model, core=0), *pair.specs]
        async with (
            run_servers(specs, directory) as servers,
            httpx.AsyncClient(timeout=120) as client,
        ):
            for index in range(TRANSFERS):
                body = {"model": "tiny", "prompt": make_prompt(500, index), "max_tokens": 8}
                for name in ("proxy", "monolithic"):
                    answer = await client.post(servers[name].url + "/v1/completions", json=body)
                    answer.raise_for_status()
            await anyio.sleep(SETTLE_S)
            pids = {}
            for name in ("monolithic", "prefill", "decode"):
                for pid, command in group_pids(servers[name].group).items():
                    pids[pid] = f"{name} {command}"
            shares = share(list(pids))
            for pid, percent in sorted(shares.items()):
                print(f"  {pids[pid]:40} {percent:5.1f} %")
            cores = {pids[pid]: value for pid, value in shares.items() if "EngineCor" in pids[pid]}
            alone = sum(value for name, value in cores.items() if name.startswith("monolithic"))
            print(f"vLLM pair, engine cores: {sum(cores.values()) - alone:.1f} % of a core")
            print(f"one vLLM engine core without pushkv: {alone:.1f} %")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["reference", "vllm"])
    if parser.parse_args().engine == "reference":
        reference()
    else:
        anyio.run(vllm)
