"""Every fault of `tests/matrix` at every moment, once, over LIBFABRIC's tcp provider."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.lanes import OVER_LIBFABRIC
from tests.matrix.reference import REFERENCE_FAULTS, Stage, one_run


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage(OVER_LIBFABRIC) as stage:
        yield stage


@pytest.mark.parametrize("fault", REFERENCE_FAULTS)
def test_everybody_is_right_and_nothing_is_lost(stage: Stage, fault: str) -> None:
    row = one_run(stage, fault, seed=7)
    assert row.is_green, row
