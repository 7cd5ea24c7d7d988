"""Prefill engines that die, what a router does then, and what waits for a proof."""

from __future__ import annotations

from random import Random

from attrs import define, field

from .engine import Engine
from .requests import Try
from .timeline import nanoseconds
from .world import World

__all__ = ["Deaths"]


@define(eq=False)
class Deaths:
    """Kills prefill engines of a world at random instants, and counts what they leave behind."""

    world: World
    count: int = 0
    quarantined_most: int = 0
    quarantined_block_s: float = 0.0
    _random: Random = field(init=False)
    _since: tuple[int, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._random = Random(f"deaths {self.world.settings.seed}")  # noqa: S311
        self._since = (self.world.timeline.start, 0)
        self._next()

    def _next(self) -> None:
        rate = self.world.settings.faults.deaths_hz
        if rate:
            later = nanoseconds(self._random.expovariate(rate))
            self.world.timeline.after(later, self._die)

    def _die(self) -> None:
        """All at once: the process, its blocks and its connections; the router hears of it."""
        world = self.world
        if world.ended == len(world.requests):
            return
        engine = world.prefills[self._random.randrange(len(world.prefills))]
        life = world.handover.life(engine.name)
        self.count += 1
        lost = [
            one
            for one in world.tries.values()
            if one.prefill is engine and one is one.request.now and one.delivered_at < 0
        ]
        world.lost_sources.update(engine.pool.holders())
        engine.crash()
        world.handover.crashed(engine.name)
        settings = world.settings
        world.timeline.after(nanoseconds(settings.link.control_s), lambda: self._seen(lost))
        world.timeline.after(
            nanoseconds(settings.faults.proof_s), lambda: self._proven(engine, life)
        )
        self._next()

    def _seen(self, lost: list[Try]) -> None:
        for one in lost:
            if one is one.request.now and one.delivered_at < 0:
                self.world.try_again(one)
        self._note()

    def _proven(self, engine: Engine, life: int) -> None:
        self._note()
        self.world.handover.proven(engine.name, life)
        self._note()

    def _note(self) -> None:
        since, blocks = self._since
        now = self.world.timeline.now
        self.quarantined_block_s += blocks * (now - since) / 1e9
        self._since = (now, self.world.handover.quarantined())
        self.quarantined_most = max(self.quarantined_most, self._since[1])
