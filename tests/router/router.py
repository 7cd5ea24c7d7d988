"""How to start the published vllm-router in front of prefill and decode servers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pushkv.demo.supervise import ServerSpec, free_ports


def router_program() -> Path:
    """``$PUSHKV_ROUTER``, or vllm-router beside this interpreter; skips the test without one."""
    beside = Path(sys.executable).parent / "vllm-router"
    program = Path(os.environ.get("PUSHKV_ROUTER", beside))
    if not program.exists():
        pytest.skip(f"{program} does not exist: run `make test-router`")
    return program


def router_server(prefill: Sequence[str], decode: Sequence[str]) -> ServerSpec:
    """The router, told that it fronts vLLM's own NIXL connector.

    It waits until every server answers ``/health``, takes them in turn, and does not retry. Where
    KV comes from it learns from the prefill servers' responses: it is given no control address.
    """
    port, metrics_port = free_ports(2)
    command = [
        str(router_program()),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(metrics_port)),
        *("--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"),
        *("--worker-startup-check-interval", "1", "--disable-retries"),
        *(argument for url in prefill for argument in ("--prefill", url)),
        *(argument for url in decode for argument in ("--decode", url)),
    ]
    return ServerSpec(name="router", command=command, port=port, start_timeout_s=60.0)
