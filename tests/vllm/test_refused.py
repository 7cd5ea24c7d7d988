"""A real engine with a cache that is not served stops at start, and says why. By `make shapes`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.vllm.models import write_state_model
from tests.vllm.shapes import ENVIRONMENT, LONG, transfer_config

pytestmark = LONG


def test_state_beside_attention_is_refused(tmp_path: Path) -> None:
    write_state_model(tmp_path / "model")
    transfer = transfer_config("engine", 0, tmp_path / "trace.ndjson")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "tests.vllm.serve", "--model", str(tmp_path / "model")),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
            *("--load-format", "dummy", "--distributed-executor-backend", "uni"),
            *("--kv-transfer-config", json.dumps(transfer)),
        ],
        env={
            **os.environ,
            **ENVIRONMENT,
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode != 0
    assert "KV cache group = 'Mamba" in ended.stdout
