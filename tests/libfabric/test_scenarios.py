"""The scenarios of `tests/faults`, which run over UCX there, over LIBFABRIC's tcp provider."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from tests.faults.rig import Rig
from tests.faults.test_real_runs import SCENARIOS
from tests.lanes import OVER_LIBFABRIC

AT_ONCE = 8
"""Each engine starts with a lease of waiting: a successor may be written to here (R13)."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseException]:
    """What went wrong in each scenario; all are run once, some at a time."""
    return anyio.run(_run_all, tmp_path_factory.mktemp("traces"))


async def _run_all(folder: Path) -> dict[str, BaseException]:
    failures: dict[str, BaseException] = {}
    places = anyio.Semaphore(AT_ONCE)

    async def run(name: str) -> None:
        of_scenario = folder / name
        of_scenario.mkdir()
        async with places:
            try:
                async with Rig(of_scenario, OVER_LIBFABRIC, anyio.Lock()) as rig:
                    await SCENARIOS[name](rig)
            except Exception as error:  # noqa: BLE001 - of one scenario: its test raises it
                failures[name] = error

    async with anyio.create_task_group() as tasks:
        for name in SCENARIOS:
            tasks.start_soon(run, name)
    return failures


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario(name: str, failures: dict[str, BaseException]) -> None:
    if name in failures:
        raise failures[name]
