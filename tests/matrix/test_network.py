"""Faults of networks and resources, each once; `python -m tests.matrix reference` does the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.matrix.network import NETWORK_FAULTS, impossible
from tests.matrix.reference import Stage, one_run

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """Over TCP, which a network can cut; shared memory it cannot."""
    with Stage("tcp") as stage:
        yield stage


@pytest.mark.parametrize("fault", NETWORK_FAULTS)
def test_everybody_is_right_and_nothing_is_lost(stage: Stage, fault: str) -> None:
    why = impossible(fault)
    if why:
        pytest.skip(why)
    row = one_run(stage, fault, seed=3, faults=NETWORK_FAULTS)
    assert row.is_green, row
