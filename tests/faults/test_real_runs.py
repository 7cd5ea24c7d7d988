"""Every phase, fault and late message, over real NIXL: what must hold holds, and the rows fire.

The scenarios run side by side, each with its own engines, half of them over UCX as it comes and
half over TCP alone. Each says itself which rows it is there for. What holds in all of them is
checked by the engines (see `engine`) and by replaying every trace.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from attrs import define, field
from tests.lanes import OVER_UCX

from pushkv.check.coverage import rows_that_fire
from pushkv.observe.replay import check_trace

from . import links, outcomes, phases, processes, requests, visibility
from .rig import Rig, Scenario

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for module in (processes, phases, outcomes, visibility, requests, links)
    for scenario in module.SCENARIOS
}
AT_ONCE = 8
NOT_REACHED = {
    "link.suspect/Opened": "the next link would have to come within the milliseconds in which a "
    "suspected one is closed",
}
"""Rows that can fire and that no scenario fires on purpose, and why."""


@define
class Runs:
    """What came of all scenarios."""

    failures: dict[str, BaseException] = field(factory=dict)
    rows: set[str] = field(factory=set)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All scenarios, run once."""
    return anyio.run(_run_all, tmp_path_factory.mktemp("traces"))


async def _run_all(folder: Path) -> Runs:
    runs = Runs()
    starting, places = anyio.Lock(), anyio.Semaphore(AT_ONCE)

    async def run(name: str, lane: str) -> None:
        of_scenario = folder / name
        of_scenario.mkdir()
        async with places:
            try:
                async with Rig(of_scenario, lane, starting) as rig:
                    await SCENARIOS[name](rig)
            except Exception as error:  # noqa: BLE001 - of one scenario: its test raises it
                runs.failures[name] = error
        for trace in of_scenario.iterdir():
            runs.rows.update(check_trace(trace).rows)

    async with anyio.create_task_group() as tasks:
        for at, name in enumerate(SCENARIOS):
            tasks.start_soon(run, name, OVER_UCX[at % len(OVER_UCX)])
    return runs


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario(name: str, runs: Runs) -> None:
    if name in runs.failures:
        raise runs.failures[name]


def test_nine_rows_of_ten_that_can_fire_have_fired(runs: Runs) -> None:
    can_fire = rows_that_fire()
    missing = {row: NOT_REACHED.get(row, "unexpected") for row in can_fire - runs.rows}
    print(f"{len(can_fire) - len(missing)} of {len(can_fire)} rows; missing: {missing}")
    assert len(missing) <= len(can_fire) // 10, missing
