"""A few rows of the fault matrix, and a short soak; `make faults` and `make soak` do the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.lanes import OVER_UCX
from tests.matrix.moments import MOMENT_FAULTS
from tests.matrix.reference import REFERENCE_FAULTS, Stage, one_run
from tests.matrix.soak import soak

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(180)]

ROWS = (
    "P killed, at a random moment",
    "D killed, waiting",
    "P paused, waiting",
    "D ended, at a random moment",
    "retried at another prefill engine",
    "abort storm",
    "P killed, mid-WRITE",
    "D ended, mid-WRITE",
    "P killed, before the notification",
    "P preempted, in the middle of its prefill",
    "a transfer decoded three times",
)


@pytest.fixture(scope="module", params=OVER_UCX)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with Stage(request.param) as stage:
        yield stage


@pytest.mark.parametrize("fault", ROWS)
def test_everybody_is_right_and_nothing_is_lost(stage: Stage, fault: str) -> None:
    row = one_run(stage, fault, seed=7, faults={**REFERENCE_FAULTS, **MOMENT_FAULTS})
    assert row.is_green, row


def test_a_soak_finds_nothing_wrong_and_says_what_it_did() -> None:
    found = soak(2_000, seed=3, fault_rate=0.05, every_s=4.0)
    assert found.problems == []
    assert found.totals["delivered"] > 1_000
    assert found.totals["not_delivered_cancelled"] > 5
    assert found.totals["not_delivered_aborted"] > 5
    assert found.samples
