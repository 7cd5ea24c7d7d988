"""How to start real vLLM servers on CPU cores: monolithic, prefill and decode.

Only describes them; `pushkv.demo.supervise` runs them. vLLM is imported by the child alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pushkv.core.errors import ConfigurationError

from .supervise import ServerSpec, free_ports

__all__ = ["vllm_server"]


def vllm_server(
    name: str,
    model: Path,
    core: int,
    kv_transfer_config: Mapping[str, object] | None = None,
    *,
    port: int | None = None,
    kv_cache_gib: int = 1,
    max_model_len: int = 4096,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ServerSpec:
    """The OpenAI API server of vLLM on one CPU core.

    Args:
        name: Names the server and its log file.
        model: Directory of the model; also the name by which clients ask for it is ``tiny``.
        core: The core its model runs on.
        kv_transfer_config: As vLLM's option of that name; none for a monolithic engine.
        port: Where it listens; a free one if not given.
        kv_cache_gib: Size of its KV cache, in GiB.
        max_model_len: Longest context, in tokens.
        arguments: More options for the server.
        environment: More environment; wins over what is set here.

    Raises:
        ConfigurationError: `core` is negative or the configuration is not JSON.
    """
    if core < 0:
        raise ConfigurationError("core", core, "0 or more")
    port = free_ports(1)[0] if port is None else port
    command: list[str] = [
        # Not `vllm serve`: that asks for the metadata of a distribution called vllm, which the CPU
        # build does not have.
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *("--model", str(model), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--seed", "0", "--max-model-len", str(max_model_len)),
        "--enforce-eager",
        # Keeps the worker inside EngineCore: the default executor's shared-memory wake-up can stall
        # for seconds on a loaded machine with few cores.
        *("--distributed-executor-backend", "uni"),
        "--disable-uvicorn-access-log",
    ]
    if kv_transfer_config is not None:
        try:
            command += ["--kv-transfer-config", json.dumps(kv_transfer_config)]
        except TypeError as error:
            raise ConfigurationError("kv_transfer_config", kv_transfer_config, "JSON") from error
    return ServerSpec(
        name=name,
        command=[*command, *arguments],
        port=port,
        environment={
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # Without it the first request for logprobs compiles for many seconds.
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            **(environment or {}),
        },
    )
