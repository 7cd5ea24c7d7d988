"""A world whose endpoints write traces, as engines do."""

from __future__ import annotations

from pathlib import Path

from pushkv.core.table import Rules
from pushkv.observe.trace import TraceWriter
from pushkv.testing.reference_engine import ReferenceCache
from pushkv.testing.world import Node, World, Write
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
        writer = TraceWriter(self.folder / node.name, worker, LAYOUT, rules, node.name)
        machines.observer, machines.lives = writer.step, writer.life
        self.writers = {**getattr(self, "writers", {}), node.name: writer}

    def end(self) -> None:
        """Close all traces."""
        for writer in self.writers.values():
            writer.close()

    def crash(self, node: Node, *, silently: bool = False) -> None:
        self.writers[node.name].close()
        super().crash(node, silently=silently)

    def close(self, write: Write, outcome: str, *, source_idle: bool = False) -> None:
        node, effect = write.node, write.effect
        if node.alive and node.incarnation == write.incarnation:
            done = Completion(effect.attempt, effect.part.number, WriteOutcome(outcome))
            self.writers[node.name].completion(self.local(node), done)
        super().close(write, outcome, source_idle=source_idle)
