"""An engine of several ranks, each with a runtime of its own, as one engine (R12).

Attempts start and end at the engine: it says everything once, and hears one outcome and one release
of each attempt, and one release of each source. The first rank that fails decides, and its siblings
give up; blocks and sources are free when they are so at every rank.

`RankFold` moves no message: whoever owns it carries events to the ranks and reports from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    Report,
    RetryDue,
    SourceReleased,
    SourceYielded,
)
from pushkv.core.errors import LocalProtocolError
from pushkv.core.events import Cancelled, EngineEvent, Offered
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason
from pushkv.rank_plan import RankPlan, Ranks

__all__ = ["Heard", "RankFold", "Said"]

Said = tuple[int, EngineEvent]
"""An event and the rank that is to hear it."""


@frozen
class Heard:
    """What follows from a rank's report: for the engine, and for other ranks."""

    reports: tuple[Report, ...] = ()
    events: tuple[Said, ...] = ()


@define
class _Attempt:
    """What the ranks have said of an attempt.

    Attributes:
        told: The engine knows the outcome.
        delivered: Ranks whose part is in place.
        released: Ranks whose blocks nobody can write any more.
        retries: The rank whose backoff the engine waits for.
    """

    told: bool = False
    delivered: set[int] = field(factory=set)
    released: set[int] = field(factory=set)
    retries: int | None = None


@define
class _Source:
    """Ranks that need a source no more, and why it was given up; how often each has yielded it."""

    released: set[int] = field(factory=set)
    yields: Counter[int] = field(factory=Counter)
    reason: Reason | None = None


@define
class RankFold:
    """One engine's ranks. Not thread-safe; never blocks.

    Args:
        heads: Per KV cache group, KV heads of the whole model (`CacheLayout.heads`).
        ranks: The engine's ranks.
    """

    heads: tuple[int, ...]
    ranks: Ranks
    _attempts: dict[tuple[TransferId, int], _Attempt] = field(factory=dict)
    _retrying: dict[TransferId, int] = field(factory=dict)
    _sources: dict[TransferId, _Source] = field(factory=dict)

    def say(self, event: EngineEvent) -> Sequence[Said]:
        """What each rank must hear of an event that is no offer: the same."""
        assert not isinstance(event, Offered), "an offer goes through `offer`"
        if isinstance(event, Cancelled):
            self._no_retry(event.transfer)
        return [(rank, event) for rank in range(self.ranks.count)]

    def offer(self, offered: Offered, producer: Ranks) -> Sequence[Said]:
        """Each rank's part of an offer.

        Args:
            offered: With the addresses of all ranks of the producer.
            producer: Its ranks.

        Raises:
            LocalProtocolError: There is not one address per rank.
            ConfigurationError: The two engines cannot be mapped; names why.
        """
        addresses = {address.rank: address for address in offered.producers}
        if sorted(addresses) != list(range(producer.count)):
            raise LocalProtocolError(
                f"transfer {offered.transfer!r}: producers = {offered.producers}: expected the "
                f"addresses of ranks 0 to {producer.count - 1}"
            )
        plan = RankPlan(self.heads, producer, self.ranks)
        everyone = tuple(range(self.ranks.count))
        said = []
        for rank in everyone:
            serving = plan.producers_of(rank)
            part = evolve(
                offered,
                producers=tuple(addresses[each] for each in serving),
                consumer_ranks=everyone,
                served=tuple(plan.consumers_of(each) for each in serving),
            )
            said.append((rank, part))
        self._no_retry(offered.transfer)
        self._attempts[offered.transfer, offered.attempt] = _Attempt()
        return said

    def _no_retry(self, transfer: TransferId) -> None:
        """The engine does not wait for a backoff any more."""
        number = self._retrying.pop(transfer, None)
        attempt = None if number is None else self._attempts.get((transfer, number))
        if number is not None and attempt is not None:
            attempt.retries = None
            self._tidy(transfer, number)

    def _tidy(self, transfer: TransferId, number: int) -> None:
        attempt = self._attempts[transfer, number]
        released = len(attempt.released) == self.ranks.count
        if attempt.told and released and attempt.retries is None:
            del self._attempts[transfer, number]

    def hear(self, rank: int, report: Report) -> Heard:
        """What a rank's report means to the engine; what came too late, or twice, means nothing."""
        if isinstance(report, SourceReleased):
            return self._source_released(rank, report)
        if isinstance(report, SourceYielded):
            return self._source_yielded(rank, report)
        key = (report.transfer, report.attempt)
        attempt = self._attempts.get(key)
        if attempt is None:
            return Heard()
        heard = Heard()
        match report:
            case Delivered():
                attempt.delivered.add(rank)
                heard = self._delivered(attempt, report)
            case NotDelivered():
                heard = self._not_delivered(rank, attempt, report)
            case BlocksReleased():
                attempt.released.add(rank)
                if len(attempt.released) == self.ranks.count:
                    heard = Heard((report,))
            case RetryDue():
                if attempt.retries == rank:
                    attempt.retries = None
                    del self._retrying[report.transfer]
                    heard = Heard((report,))
        self._tidy(*key)
        return heard

    def _delivered(self, attempt: _Attempt, report: Delivered) -> Heard:
        if attempt.told or len(attempt.delivered) < self.ranks.count:
            return Heard()
        attempt.told = True
        return Heard((report,))

    def _not_delivered(self, rank: int, attempt: _Attempt, report: NotDelivered) -> Heard:
        if attempt.told:
            return Heard()
        attempt.told = True
        if report.retry:
            attempt.retries = rank
            self._retrying[report.transfer] = report.attempt
        give_up = Cancelled(report.transfer, Reason.SIBLING)
        others = [other for other in range(self.ranks.count) if other != rank]
        return Heard((report,), tuple((other, give_up) for other in others))

    def _source_yielded(self, rank: int, report: SourceYielded) -> Heard:
        source = self._sources.setdefault(report.transfer, _Source())
        source.yields[rank] += 1
        everywhere = min(source.yields[each] for each in range(self.ranks.count))
        return Heard((report,)) if source.yields[rank] <= everywhere else Heard()

    def _source_released(self, rank: int, report: SourceReleased) -> Heard:
        source = self._sources.setdefault(report.transfer, _Source())
        source.released.add(rank)
        source.reason = source.reason or report.reason
        if len(source.released) < self.ranks.count:
            return Heard()
        del self._sources[report.transfer]
        return Heard((SourceReleased(report.transfer, source.reason),))
