"""Whatever happens in a world, the traces of its endpoints are legal, and tell all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.core import test_random_world
from tests.core.test_random_world import STEPS, Chaos

from pushkv.core.capabilities import Capabilities
from pushkv.observe.replay import check_trace
from pushkv.testing.world import (
    STRONG,
    STRONG_UNBOUNDED,
    WEAK,
    WEAK_UNBOUNDED,
)

from .traced_world import TracedWorld


@pytest.mark.parametrize(
    "capabilities", [STRONG, STRONG_UNBOUNDED, WEAK, WEAK_UNBOUNDED], ids=lambda each: each.name
)
@pytest.mark.parametrize("seed", range(100, 103))
def test_the_traces_of_a_random_world_are_legal(
    seed: int, capabilities: Capabilities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_random_world, "World", TracedWorld)
    monkeypatch.setattr(TracedWorld, "folder", tmp_path, raising=False)
    chaos = Chaos(seed, capabilities)
    chaos.run(STEPS)
    chaos.peace()
    assert isinstance(chaos.world, TracedWorld)
    steps = 0
    chaos.world.end()
    for name in chaos.world.writers:
        report = check_trace(tmp_path / name)
        assert report.illegal is None, f"{name}: {report.illegal}"
        steps += report.steps
    assert steps > STEPS
