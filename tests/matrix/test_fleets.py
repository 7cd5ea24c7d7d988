"""A fleet that cannot be started costs itself, not the whole run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from tests.matrix import __main__ as matrix
from tests.matrix.rows import Row, Rows
from tests.matrix.vllm_faults import FAULTS as FAULTS_THERE_ARE

from pushkv.demo.supervise import ServerError
from pushkv.demo.systems import PUSHKV

FAULTS = ["duplicate request", "colliding names"]  # on the same kind of fleet


class Starts:
    """Fleets of which some fail, at their start or where the fault wants an engine again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: set[int], again: set[int]) -> None:
        self._failing, self._again = failing, again
        self.fleets = self.runs = 0
        monkeypatch.setattr(matrix, "fleet", self._fleet)
        monkeypatch.setattr(matrix, "one_vllm_run", self._run)

    @contextlib.asynccontextmanager
    async def _fleet(self, *arguments: object) -> AsyncIterator[None]:
        self.fleets += 1
        if self.fleets in self._failing:
            error = ServerError("decode", "died while starting", Path("none"))
            raise ExceptionGroup("of the task group that starts engines", [error])
        yield None

    async def _run(self, fleet: None, fault: str, seed: int) -> Row:
        self.runs += 1
        if self.runs in self._again:
            raise ServerError("prefill", "died while starting", Path("none"))
        return Row(fault, "pushkv", runs=1, recovered=1)


async def run(path: Path) -> Rows:
    """Two runs of each fault."""
    rows = Rows(path / "faults.json")
    await matrix.run_system(PUSHKV, FAULTS, 2, rows, path, path)
    return rows


@pytest.mark.asyncio
async def test_a_fleet_is_started_anew_and_the_run_of_the_fault_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts(monkeypatch, failing={1, 2, 4}, again={2})
    rows = await run(tmp_path)
    assert [rows.runs(fault, "pushkv") for fault in FAULTS] == [2, 2]
    assert (starts.fleets, starts.runs) == (5, 5)


@pytest.mark.asyncio
async def test_it_ends_where_no_fleet_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts(monkeypatch, failing={2, 3, 4, 5, 6}, again={3})
    with pytest.raises(ExceptionGroup, match="task group"):
        await run(tmp_path)
    assert starts.fleets == 3
    assert Rows(tmp_path / "faults.json").runs(FAULTS[0], "pushkv") == 2


class Refuses:
    """A fleet whose engine cannot be started again, in the middle of a fault."""

    system = PUSHKV

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def happens(self, scene: object) -> None:
        async with anyio.create_task_group():
            raise self._error


class Tells:
    def __init__(self, fleet: object) -> None: ...
    async def begin(self) -> None: ...


@pytest.mark.asyncio
async def test_an_engine_that_cannot_be_started_again_amid_a_fault_is_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuses = Refuses(ServerError("prefill", "died while starting", Path("none")))
    monkeypatch.setitem(FAULTS_THERE_ARE, "refuses", refuses)
    monkeypatch.setattr(matrix, "Telling", Tells)
    with pytest.RaisesGroup(ServerError, flatten_subgroups=True):
        await matrix.one_vllm_run(refuses, "refuses", 1)  # type: ignore[arg-type]
