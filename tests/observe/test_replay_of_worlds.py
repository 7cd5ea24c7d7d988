"""Whatever happens in a world, the traces of its endpoints are legal, and tell all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.core import test_random_world
from tests.core.test_random_world import STEPS, Chaos

from pushkv.core.capabilities import Capabilities
from pushkv.core.table import Rules
from pushkv.observe.replay import check_trace
from pushkv.observe.trace import TraceWriter
from pushkv.testing.reference_engine import ReferenceCache
from pushkv.testing.world import (
    STRONG,
    STRONG_UNBOUNDED,
    WEAK,
    WEAK_UNBOUNDED,
    Node,
    World,
    Write,
)
from pushkv.transport import Completion, WriteOutcome

LAYOUT = ReferenceCache(layers=1, block_count=2).layout


class TracedWorld(World):
    """Writes the trace of every life into one file per node, as engines do."""

    folder: Path

    def _start(self, node: Node) -> None:
        super()._start(node)
        machines = node.endpoint._machines
        worker = node.endpoint.sending._me
        rules = Rules(node.policy, node.capabilities)
        writer = TraceWriter(self.folder / node.name, worker, LAYOUT, rules)
        machines.observer, machines.lives = writer.step, writer.life
        self.writers = {**getattr(self, "writers", {}), node.name: writer}

    def crash(self, node: Node, *, silently: bool = False) -> None:
        self.writers[node.name].close()
        super().crash(node, silently=silently)

    def close(self, write: Write, outcome: str, *, source_idle: bool = False) -> None:
        node, effect = write.node, write.effect
        if node.alive and node.incarnation == write.incarnation:
            done = Completion(effect.attempt, effect.part.number, WriteOutcome(outcome))
            self.writers[node.name].completion(self.local(node), done)
        super().close(write, outcome, source_idle=source_idle)


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
    for name, writer in chaos.world.writers.items():
        writer.close()
        report = check_trace(tmp_path / name)
        assert report.illegal is None, f"{name}: {report.illegal}"
        steps += report.steps
    assert steps > STEPS
