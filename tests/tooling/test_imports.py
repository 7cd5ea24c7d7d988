"""Importing pushkv costs none of the optional libraries."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIBRARIES = ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm", "torch", "vllm")
EXTRAS = ("httpx", "rich", "starlette", "typer", "uvicorn")


def loaded_by(module: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after importing `module`."""
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(ran.stdout)}


@pytest.mark.parametrize("module", ["pushkv", "pushkv_memory", "pushkv_nixl", "pushkv_vllm"])
def test_packages_load_without_the_libraries(module: str) -> None:
    loaded = loaded_by(module)
    assert module in loaded
    assert loaded.isdisjoint(LIBRARIES)


def test_pushkv_needs_no_extra() -> None:
    assert loaded_by("pushkv").isdisjoint(EXTRAS)
