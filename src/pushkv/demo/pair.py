"""One prefill and one decode server of vLLM with pushkv between them, and the proxy before them."""

from __future__ import annotations

import sys
from pathlib import Path

from attrs import frozen

from .engines import vllm_server
from .supervise import ServerSpec, free_ports

__all__ = ["Pair", "describe_pair"]


@frozen
class Pair:
    """How to start a pair.

    Attributes:
        specs: Servers named ``prefill``, ``decode`` and ``proxy``.
        traces: Where the prefill and the decode engine write their traces.
    """

    specs: tuple[ServerSpec, ...]
    traces: tuple[Path, Path]


def describe_pair(dispatch: str, directory: Path, model: Path) -> Pair:
    """A pair on two cores, all its ports free a moment ago; removes older traces."""
    control, prefill, decode, proxy = free_ports(4)
    traces = directory / "prefill.ndjson", directory / "decode.ndjson"
    for trace in traces:
        trace.unlink(missing_ok=True)

    def transfer(role: str, engine: str, port: int, trace: Path) -> dict[str, object]:
        return {
            "kv_connector": "PushKVConnector",
            "kv_role": role,
            "engine_id": engine,
            "kv_connector_extra_config": {"port": port, "trace_path": str(trace)},
        }

    produce = transfer("kv_producer", "prefill", control, traces[0])
    consume = transfer("kv_consumer", "decode", 0, traces[1])
    command = [
        sys.executable,
        *("-m", "pushkv.demo.proxy", "--port", str(proxy), "--dispatch", dispatch),
        *("--prefill", f"http://127.0.0.1:{prefill},127.0.0.1,{control},prefill"),
        *("--decode", f"http://127.0.0.1:{decode}"),
    ]
    specs = (
        vllm_server("prefill", model, 0, produce, port=prefill),
        vllm_server("decode", model, 1, consume, port=decode),
        ServerSpec(name="proxy", command=command, port=proxy),
    )
    return Pair(specs, traces)
