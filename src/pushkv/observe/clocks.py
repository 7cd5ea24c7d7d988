"""One clock for the traces of several hosts, from the messages that passed between them.

A monotonic clock counts from its host's boot, so that those of two hosts have nothing in common.
But what is received was sent before. A message from A to B says that B's clock is ahead of A's by
at most the difference of both times, one from B to A by at least so much. Messages both ways leave
an interval; its middle is taken, and half of its width is how far that can be off. Traces that
begin with the same clock need none of this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

from attrs import frozen

from pushkv.core.errors import ConfigurationError

from .lives import EngineLife, MessageName

__all__ = ["Alignment", "align"]


@frozen
class Alignment:
    """How one engine's times become those of the first engine that it can be compared with.

    Attributes:
        group: Only times of one group can be compared.
        ahead: Nanoseconds to take off.
        error: Nanoseconds by which that may be wrong, at most.
    """

    group: int
    ahead: int
    error: int


def align(engines: Sequence[EngineLife]) -> list[Alignment]:
    """Where each engine's clock stands, in the order of `engines`.

    Raises:
        ConfigurationError: Messages contradict one another: one of the clocks is none, or they
            have drifted apart by more than a message takes.
    """
    clocks: dict[str, list[EngineLife]] = defaultdict(list)
    for index, engine in enumerate(engines):
        clocks[engine.clock or f"unknown {index}"].append(engine)
    hosts = list(clocks.values())
    gaps = []
    for one, other in combinations(range(len(hosts)), 2):
        gap = _gap(hosts[one], hosts[other])
        if gap is not None:
            gaps.append((gap[1], one, other, gap[0]))
    found = {index: Alignment(index, 0, 0) for index in range(len(hosts))}
    for error, one, other, ahead in sorted(gaps):
        _join(found, one, other, ahead, error)
    named = {id(engine): at for at, host in enumerate(hosts) for engine in host}
    return [found[named[id(engine)]] for engine in engines]


def _join(found: dict[int, Alignment], one: int, other: int, ahead: int, error: int) -> None:
    """Shift the whole group of `other` onto that of `one`; the surest pairs come first."""
    to, of = found[one], found[other]
    if to.group == of.group:
        return
    shift = to.ahead + ahead - of.ahead
    for at, each in list(found.items()):
        if each.group == of.group:
            within = each.error + of.error if at != other else 0
            found[at] = Alignment(to.group, each.ahead + shift, to.error + error + within)


def _first(times: Iterable[dict[MessageName, int]]) -> dict[MessageName, int]:
    first: dict[MessageName, int] = {}
    for each in times:
        for name, at in each.items():
            first[name] = min(at, first.get(name, at))
    return first


def _gap(one: list[EngineLife], other: list[EngineLife]) -> tuple[int, int] | None:
    """By how much `other` is ahead of `one`, and half of what is left open; None if unknown."""
    there = _flights(one, other)
    back = _flights(other, one)
    if not there or not back:
        return None
    most, least = min(there), -min(back)
    if least > most:
        names = " and ".join(str(each[0].path) for each in (one, other))
        raise ConfigurationError(
            "trace",
            names,
            f"clocks that keep step: by the messages between them the second is at least {least} "
            f"and at most {most} nanoseconds ahead. View each file alone",
        )
    return (most + least) // 2, (most - least + 1) // 2


def _flights(sender: list[EngineLife], receiver: list[EngineLife]) -> list[int]:
    """Received less sent. Of what was sent again the first of each counts, which is never less."""
    sent = _first(each.sent for each in sender)
    received = _first(each.received for each in receiver)
    return [received[name] - at for name, at in sent.items() if name in received]
