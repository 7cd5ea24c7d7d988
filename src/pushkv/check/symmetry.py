"""States that differ only in names: who is called what changes nothing of what may happen.

A *renaming* gives transfers, consumer engines and producer engines each other's names, such that
the configuration stays what it is: transfers have the same data, engines the same ranks. Whatever
may happen in a state may then happen in the renamed state, under the other names, and breaks the
same properties. So a search needs to look at one of all states that are renamings of each other.

Ranks of one engine are not interchangeable: a producer rank expects the consumer rank of its own
number before it hears of others, and members are gone through in the order of their ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product
from typing import Any

from attrs import evolve, fields, frozen, has

from pushkv.core.ids import AttemptId, Epoch
from pushkv.core.messages import Hello
from pushkv.model.writes import Writes

from . import hands
from .configurations import Configuration
from .hands import Hands
from .nodes import Node, Slot
from .snapshot import EndpointState, in_order
from .wires import PER_PAIR, Wire

__all__ = ["Names", "Renamer", "names"]


@frozen
class Names:
    """Who gets whose name; everybody has an entry."""

    transfers: dict[str, str]
    engines: dict[str, str]


def names(configuration: Configuration) -> tuple[Names, ...]:
    """All renamings that leave a configuration as it is, but for the one that changes nothing."""
    found = tuple(_all(configuration))
    same = [each for each in found if _same(configuration, each)]
    return tuple(each for each in same if not _idle(each))


def _all(configuration: Configuration) -> Iterator[Names]:
    transfers = tuple(each.name for each in configuration.transfers)
    consumers = tuple(dict.fromkeys(engine for engine, _ in configuration.consumers))
    producers = tuple(dict.fromkeys(engine for engine, _ in configuration.producers))
    assert len({*transfers, *consumers, *producers}) == sum(
        map(len, (transfers, consumers, producers))
    ), "a name stands for one thing"
    for one, two, three in product(
        permutations(transfers), permutations(consumers), permutations(producers)
    ):
        engines = dict(zip((*consumers, *producers), (*two, *three), strict=True))
        yield Names(dict(zip(transfers, one, strict=True)), engines)


def _same(configuration: Configuration, new: Names) -> bool:
    for workers in (configuration.consumers, configuration.producers):
        if {(new.engines[engine], rank) for engine, rank in workers} != set(workers):
            return False
    transfers = {each.name: each for each in configuration.transfers}
    for each in configuration.transfers:
        renamed = evolve(
            each,
            name=new.transfers[each.name],
            producer=new.engines[each.producer],
            again=each.again and new.engines[each.again],
            consumers=tuple(sorted(new.engines[engine] for engine in each.consumers)),
        )
        other = transfers[renamed.name]
        if renamed != evolve(other, consumers=tuple(sorted(other.consumers))):
            return False
    return True


def _idle(new: Names) -> bool:
    everybody = {**new.transfers, **new.engines}
    return all(old == name for old, name in everybody.items())


class Renamer:
    """Renames the parts of a state. What a state keeps in the order of names is put in order again.

    Args:
        new: Who gets whose name.
        configuration: In which they have them.
        slots: All workers, in the order of the states.
        pairs: The consumer and the producer of each connection, by position.
        token: The arrival token of an attempt.
    """

    def __init__(
        self,
        new: Names,
        configuration: Configuration,
        slots: tuple[Slot, ...],
        pairs: tuple[tuple[int, int], ...],
        token: Callable[[AttemptId], int],
    ) -> None:
        place = {(slot.engine, slot.rank): at for at, slot in enumerate(slots)}
        self.slots: tuple[int, ...] = tuple(
            place[new.engines[slot.engine], slot.rank] for slot in slots
        )
        at_pair = {pair: at for at, pair in enumerate(pairs)}
        self.pairs: tuple[int, ...] = tuple(
            at_pair[self.slots[one], self.slots[two]] for one, two in pairs
        )
        self._words = {**new.transfers, **new.engines}
        self._digests = {old.encode(): name.encode() for old, name in new.transfers.items()}
        self._rank = {each.name: at for at, each in enumerate(configuration.transfers)}
        self._walked = configuration.proofs
        self._token = token
        self._fields_of: dict[type, tuple[str, ...]] = {}
        self._special: dict[type, Callable[[Any], Any]] = {
            str: lambda value: self._words.get(value, value),
            bytes: lambda value: self._digests.get(value, value),
            tuple: lambda value: tuple(map(self, value)),
            Epoch: lambda value: Epoch(self._nonce(value.consumer), self._nonce(value.producer)),
            Wire: lambda value: evolve(self._fields(value), number=self._number(value.number)),
            Hello: lambda value: evolve(self._fields(value), nonce=self._nonce(value.nonce)),
            Node: self._node,
            EndpointState: self._endpoint,
            Writes: self._writes,
            Hands: lambda value: hands.in_order(self._fields(value)),
        }

    def __call__(self, value: Any) -> Any:
        """A part of a state, or of a part, under the other names."""
        kind = type(value)
        special = self._special.get(kind)
        if special is not None:
            return special(value)
        return self._fields(value) if has(kind) else value

    def _fields(self, value: Any) -> Any:
        kind = type(value)
        names = self._fields_of.get(kind)
        if names is None:
            names = self._fields_of[kind] = tuple(each.name for each in fields(kind))
        after = {name: self(getattr(value, name)) for name in names}
        if "arrival_token" in after:
            after["arrival_token"] = self._token(after["attempt"])
        return kind(**after)

    def _number(self, connection: int) -> int:
        pair, count = divmod(connection, PER_PAIR)
        return self.pairs[pair] * PER_PAIR + count

    def _nonce(self, nonce: int) -> int:
        connection, end = divmod(nonce, 2)
        return 2 * self._number(connection) + end

    def _node(self, node: Node) -> Node:
        after: Node = self._fields(node)
        return evolve(
            after,
            dialing=tuple(sorted(after.dialing)),
            offers_left=tuple(sorted(after.offers_left, key=lambda each: self._rank[each[0]])),
            prefills=tuple(sorted(after.prefills, key=lambda each: each.transfer)),
        )

    def _endpoint(self, state: EndpointState) -> EndpointState:
        after: EndpointState = self._fields(state)
        connections = tuple(
            (self._number(number), self._nonce(nonce), dialed, key)
            for number, nonce, dialed, key in after.connections
        )
        current = tuple((key, self._number(number)) for key, number in after.current)
        return in_order(
            evolve(after, connections=connections, current=current), walked=self._walked
        )

    def _writes(self, writes: Writes) -> Writes:
        after: Writes = self._fields(writes)
        return evolve(
            after,
            alive=tuple(sorted(after.alive)),
            flights=tuple(sorted(after.flights, key=lambda each: each.key)),
            arrivals=tuple(sorted(after.arrivals, key=lambda each: (each.target, each.key))),
        )
