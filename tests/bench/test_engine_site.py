"""What is put before an engine's interpreter does what the environment asks for, and only that."""

from __future__ import annotations

import array
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pushkv.demo import engine_site
from pushkv.demo.engine_site.sitecustomize import DELAY, HOOKS, MARKS, TIMES

SITE = str(Path(engine_site.__file__).parent)
CONFIGURED = """
from nixl_cu13._api import nixlBind, nixl_agent, nixl_agent_config
config = nixlBind.nixlAgentConfig()
config.pthrDelay = 0
print(config.pthrDelay)
nixl_agent("alone", nixl_agent_config(backends=["UCX"]))  # takes the configuration
"""
FACTORY = """
class Connector:
    def start_load_kv(self, *, more=1):
        self.get_finished()
        return more

    def get_finished(self):
        raise OSError("as ever")

    def shutdown(self):
        return "not a hook"

class KVConnectorFactory:
    @classmethod
    def create_connector(cls, config):
        assert config == "config"
        return Connector()
"""
HOOKED = """
import time
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
one, two = (KVConnectorFactory.create_connector("config") for _ in range(2))
for connector in (one, two):
    for hook in (connector.get_finished, connector.start_load_kv):
        try:
            hook()
        except OSError:
            pass
one.get_finished = lambda: (sum(range(10**6)), time.sleep(0.05))
assert one.start_load_kv(more=3) == 3
assert one.shutdown() == "not a hook"
"""


def run(code: str, *path: str, **environment: str) -> str:
    """Standard output of a fresh interpreter."""
    found = os.pathsep.join(filter(None, (*path, os.environ.get("PYTHONPATH"))))
    clean = {k: v for k, v in os.environ.items() if k not in (DELAY, TIMES, MARKS)}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment, "PYTHONPATH": found},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


@pytest.mark.nixl
def test_the_progress_thread_gets_a_pause_where_asked_for() -> None:
    assert run(CONFIGURED, SITE, **{DELAY: "1234"}).splitlines()[0] == "1234"
    assert run(CONFIGURED, SITE).splitlines()[0] == "0"


def test_hooks_are_timed_once_each_for_the_outermost(tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "distributed" / "kv_transfer" / "kv_connector"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:3]):
        (folder / "__init__.py").touch()  # goes before the real one
    (package / "factory.py").write_text(FACTORY)
    times, marks = tmp_path / "times", tmp_path / "marks"
    run(HOOKED, SITE, str(tmp_path), **{TIMES: str(times), MARKS: str(marks)})
    totals = array.array("Q", times.read_bytes())
    by_name = {name: totals[3 * at : 3 * at + 3].tolist() for at, name in enumerate(HOOKS)}
    assert len(totals) == 3 * len(HOOKS)
    assert by_name["get_finished"][0] == 2
    assert by_name["start_load_kv"][0] == 3
    _, wall, cpu = by_name["start_load_kv"]
    assert wall > cpu > 0
    assert {name for name, each in by_name.items() if each[0]} == {"get_finished", "start_load_kv"}
    told = array.array("Q", marks.read_bytes())
    hooks, began, ended = told[0::3], told[1::3], told[2::3]
    assert [HOOKS[each] for each in hooks] == ["get_finished", "start_load_kv"] * 2 + [
        "start_load_kv"
    ]
    assert sum(ended[at] - began[at] for at in (1, 3, 4)) == wall
    assert all(first <= then for first, then in zip(ended, began[1:], strict=False))
    run(HOOKED, SITE, str(tmp_path))
    assert array.array("Q", times.read_bytes()) == totals


def test_hook_names_differ() -> None:
    assert len(set(HOOKS)) == len(HOOKS)
