"""Every public name has a type that the type checkers of others see, without guessing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "pushkv": "src",
    "pushkv_memory": "transports",
    "pushkv_nixl": "transports",
    "pushkv_vllm": "adapters",
}


def begin(package: str, folders: list[Path], at: Path = ROOT) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(map(str, folders))
    command = [sys.executable, "-m", "pyright", "--verifytypes", package, "--ignoreexternal"]
    environment = {**os.environ, "PYTHONPATH": path, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    return subprocess.Popen(
        [*command, "--outputjson", "--pythonpath", sys.executable],
        stdout=subprocess.PIPE,
        env=environment,
        cwd=at,
    )


def found(process: subprocess.Popen[bytes]) -> tuple[int, list[str]]:
    """How many public names there are, and what is wrong with which."""
    told = json.loads(process.communicate()[0])["typeCompleteness"]
    wrong = [
        f"{symbol['name']}: {line['message']}"
        for symbol in told["symbols"]
        if symbol["isExported"]
        for line in symbol["diagnostics"]
        if line["severity"] == "error"
    ]
    return sum(told["exportedSymbolCounts"].values()), wrong


@pytest.mark.skipif(find_spec("pyright") is None, reason="pyright is not installed")
@pytest.mark.skipif("PUSHKV_TYPES" not in os.environ, reason="long: run by `make types`")
def test_every_public_name_has_a_type(tmp_path: Path) -> None:
    guessed = tmp_path / "guessed"
    guessed.mkdir()
    (guessed / "__init__.py").write_text("def f(a, b: int) -> int: return b\nx = str(f(1, 2))\n")
    (guessed / "py.typed").touch()
    folders = [ROOT / folder for folder in dict.fromkeys(PACKAGES.values())]
    running = {package: begin(package, folders) for package in PACKAGES}
    names, wrong = found(begin("guessed", [tmp_path], tmp_path))
    assert names == 2
    assert {line.partition(":")[0] for line in wrong} == {"guessed.f", "guessed.x"}
    for package, process in running.items():
        names, wrong = found(process)
        assert names > 20, package
        assert wrong == []
