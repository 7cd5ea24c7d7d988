"""Many engines and faults in virtual time: nothing forbidden happens, and the seed decides all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import SystemRandom

import pytest
from typer.testing import CliRunner

from pushkv.cli.app import app
from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import TransferId
from pushkv.testing.swarm import Backend, Kind, SwarmReport, SwarmSettings, run_swarm
from pushkv.testing.swarm.pool import Holder, Pool, ViolationError

ROOT = Path(__file__).parents[2]
SEEDS = (2, 3, 102)
both_backends = pytest.mark.parametrize("backend", list(Backend))


def run(
    seed: int,
    backend: Backend,
    transfers: int = 150,
    engines: int = 10,
    weather: Kind = Kind.MIXED,
) -> SwarmReport:
    report = run_swarm(SwarmSettings(seed, transfers, engines, backend, weather))
    assert report.violation is None, f"{report.violation}\n{report.settings.command}"
    assert sum(report.outcomes.values()) == transfers, "each request has one outcome"
    return report


@both_backends
@pytest.mark.parametrize("seed", SEEDS)
def test_a_fixed_seed(seed: int, backend: Backend) -> None:
    report = run(seed, backend)
    assert report.outcomes["delivered"] > 20
    assert report.counters["writes done"] > 50
    assert len(report.rows) > 60


@both_backends
def test_a_crowd_is_live_at_once_and_bears_faults(backend: Backend) -> None:
    report = run(3, backend, 300, 10, Kind.CROWD)
    assert report.live_most >= 270
    assert report.outcomes["delivered"] > 100
    assert report.counters["writes failed"] > 0
    struck = ("crash", "stop", "connection lost", "path cut", "slow link")
    assert sum(report.counters.get(each, 0) for each in struck) > 3


@both_backends
def test_a_storm_ends_although_sources_drain_slowly(backend: Backend) -> None:
    report = run(18, backend, 60, 6, Kind.STORM)
    assert report.counters["connection lost"] > 3
    assert report.virtual_s > 90


def test_a_block_in_two_places_or_in_none_is_seen_at_once() -> None:
    pool = Pool("p0-0", 8, 1)
    pool.take(3, Holder("source", TransferId("t0")))
    pool.check()
    pool.check_all()
    holder = Holder("source", TransferId("t1"))
    taken = pool.take(2, holder)
    assert taken is not None
    pool.free[taken[0]] = None
    for check in (pool.check, pool.check_all):
        with pytest.raises(ViolationError, match="I4"):
            check()
    del pool.free[taken[0]], pool.held[holder]
    for check in (pool.check, pool.check_all):
        with pytest.raises(ViolationError, match="I4"):
            check()


def test_a_write_into_a_free_block_is_seen_by_who_takes_it() -> None:
    pool = Pool("d0-0", 4, 1)
    pool.memory[1, 3, 2] ^= 1
    with pytest.raises(ViolationError, match="block 3 was written while free"):
        pool.take(2, Holder("attempt", TransferId("t0"), 0))


def test_a_new_seed() -> None:
    seed = SystemRandom().randrange(1 << 31)
    print(f"pushkv swarm --seed {seed} --transfers 150 --engines 10")
    run(seed, Backend.ASYNCIO)


@both_backends
def test_the_same_seed_is_the_same_run_under_any_hash_seed(backend: Backend) -> None:
    command = [sys.executable, "-c", "from pushkv.cli import main; main()", "swarm"]
    command += ["--seed", "9", "--transfers", "40", "--engines", "6", "--backend", backend]
    outputs = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        outputs.append([line for line in done.stdout.splitlines() if "seconds in" not in line])
    assert outputs[0] == outputs[1]
    assert outputs[0][0].startswith("seed 9: pushkv swarm --seed 9 --transfers 40")
    assert "digest" in outputs[0][-1]


def test_another_seed_is_another_run() -> None:
    assert run(4, Backend.ASYNCIO, 20, 4).digest != run(5, Backend.ASYNCIO, 20, 4).digest


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    told = CliRunner().invoke(
        app, ["swarm", "--seed", "1", "--transfers", "10", "--engines", "2", "--json", str(path)]
    )
    assert told.exit_code == 0, told.output
    (found,) = json.loads(path.read_text())["runs"]
    assert found["violation"] is None
    assert found["command"] == (
        "pushkv swarm --seed 1 --transfers 10 --engines 2 --backend asyncio --weather mixed"
    )
    assert found["digest"] in told.output
    assert 1 <= found["live_most"] <= found["open_most"] <= 10


@pytest.mark.parametrize(
    ("name", "numbers"), [("seed", (-1, 1, 2)), ("transfers", (0, 0, 2)), ("engines", (0, 1, 1))]
)
def test_what_is_no_swarm_is_refused(name: str, numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} = "):
        SwarmSettings(*numbers)
