"""The bridges of an engine's ranks as one, for an engine that shares a process with them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from attrs import evolve

from pushkv.core.effects import ProducerAddress, Report
from pushkv.core.events import EngineEvent, Offered
from pushkv.fold import RankFold
from pushkv.rank_plan import Ranks

from .bridge import Bridge

__all__ = ["RankBridges"]


class RankBridges:
    """What one engine says to all of its ranks, and what they say to it (R12).

    One thread of the engine calls everything but `interrupt`.

    Args:
        fold: Folds the ranks' reports.
        bridges: One per rank, in order. Their `on_report` is taken.
    """

    def __init__(self, fold: RankFold, bridges: Sequence[Bridge]) -> None:
        self._fold = fold
        self._bridges = tuple(bridges)
        self._news = threading.Event()
        self._engines: dict[ProducerAddress, tuple[Ranks, tuple[ProducerAddress, ...]]] = {}
        for bridge in self._bridges:
            bridge.on_report(self._news.set)

    def meet(self, ranks: Ranks, addresses: Sequence[ProducerAddress]) -> None:
        """Learn where the ranks of a producer are; an offer names its first one alone."""
        self._engines[addresses[0]] = ranks, tuple(addresses)

    def submit(self, event: EngineEvent) -> None:
        """Tell every rank; never blocks.

        Raises:
            ConfigurationError: The transfer's name fits in no message, or the engines do not fit.
            LocalProtocolError: `meet` was told other addresses than one per rank.
        """
        if isinstance(event, Offered):
            ranks, addresses = self._engines.get(event.producers[0], (Ranks(), event.producers))
            said = self._fold.offer(evolve(event, producers=addresses), ranks)
        else:
            said = self._fold.say(event)
        for rank, each in said:
            self._bridges[rank].submit(each)

    def take(self) -> list[Report]:
        """What the engine must hear, oldest first; never blocks."""
        self._news.clear()
        found: list[Report] = []
        for rank, bridge in enumerate(self._bridges):
            for report in bridge.take():
                heard = self._fold.hear(rank, report)
                found += heard.reports
                for other, event in heard.events:
                    self._bridges[other].submit(event)
        return found

    def wait(self, bound_s: float) -> None:
        """Wait for news up to `bound_s` seconds; `interrupt` ends it."""
        self._news.wait(bound_s)

    def interrupt(self) -> None:
        """End a `wait` now. Any thread; never blocks."""
        self._news.set()
