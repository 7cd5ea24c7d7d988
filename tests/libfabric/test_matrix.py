"""Every fault of `tests/matrix` at every moment, once, over LIBFABRIC's tcp provider."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.matrix.reference import LANES, REFERENCE_FAULTS, Stage, one_run

LANE = "libfabric"
LANES[LANE] = {"backend": "LIBFABRIC", "fabric": "tcp", "call_timeout_s": 2.0}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage(LANE) as stage:
        yield stage


@pytest.mark.parametrize("fault", REFERENCE_FAULTS)
def test_everybody_is_right_and_nothing_is_lost(stage: Stage, fault: str) -> None:
    row = one_run(stage, fault, seed=7)
    assert row.is_green, row
