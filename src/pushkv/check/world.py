"""The whole world as a tuple of small numbers, and what each move makes of it.

Every part of the world (a process, the wires between two, the WRITEs, a consumer's memory) is kept
once and named by a number; a state is the tuple of these numbers. What a move does to one part is
worked out once and looked up ever after.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from attrs import define, field, frozen

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    Effect,
    Hangup,
    NotDelivered,
    PostWrite,
    Transmit,
    WithdrawWrites,
)
from pushkv.core.ids import AttemptId, TransferId
from pushkv.core.messages import Message
from pushkv.model import writes as model
from pushkv.model.blocks import BlockMemory

from . import hands as in_hand
from . import memory as blocks
from . import moves, wires
from .configurations import FAULTS, Configuration, Transfer
from .hands import Hands, Ordered
from .moves import TIME, Move
from .nodes import Node, Nodes, Slot, Step
from .symmetry import Renamer, names
from .wires import CONSUMER, PER_PAIR, PRODUCER, End, Pair

__all__ = ["Broken", "Draft", "State", "Successor", "World"]

State = tuple[int, ...]
Broken = tuple[tuple[str, str], ...]
Successor = tuple[Move, State, Broken]

P = TypeVar("P", bound=Hashable)


class Parts(Generic[P]):
    """All values one part of the world has had, each under a number."""

    def __init__(self) -> None:
        self._numbers: dict[P, int] = {}
        self._values: list[P] = []

    def number(self, value: P) -> int:
        """The number of a value."""
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self._values)
            self._values.append(value)
        return found

    def digests(self) -> list[bytes]:
        """A digest of each value, by number."""
        return [blake2b(repr(value).encode(), digest_size=8).digest() for value in self._values]

    def __getitem__(self, number: int) -> P:
        return self._values[number]

    def __iter__(self) -> Iterator[P]:
        return iter(self._values)

    def refill(self, values: Iterable[P]) -> None:
        """These values, under the numbers 0, 1, …, and no others."""
        self._values = list(values)
        self._numbers = {value: number for number, value in enumerate(self._values)}


@frozen
class _Answer:
    """What a question about one part came to: its new number, and what it left to do."""

    number: int
    effects: tuple[Effect, ...]
    numbers: tuple[int, ...]
    broken: Broken


def _is(wanted: tuple[str, int], move: Move) -> bool:
    return wanted == (move.kind, move.at)


def _goes_on(move: Move) -> bool:
    return move.kind in ("connect", "deliver") and not move.cost


class World:
    """The composition of one configuration."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.nodes: Nodes = Nodes(configuration)
        self.slots: tuple[Slot, ...] = (
            *(Slot(engine, rank, consumer=True) for engine, rank in configuration.consumers),
            *(Slot(engine, rank, consumer=False) for engine, rank in configuration.producers),
        )
        many = len(configuration.consumers)
        self.pairs: tuple[tuple[int, int], ...] = tuple(
            (consumer, producer)
            for consumer in range(many)
            for producer in range(many, len(self.slots))
        )
        self.transfers: dict[str, Transfer] = {each.name: each for each in configuration.transfers}
        self.faults: tuple[str, ...] = tuple(name for name in FAULTS if configuration.budget(name))
        self._fault = {name: index for index, name in enumerate(self.faults)}
        self.pair_at: int = len(self.slots)
        self.hands_at: int = self.pair_at + len(self.pairs)
        self.memory_at: int = self.hands_at + 1
        self.budget_at: int = self.memory_at + many
        self.node_parts: Parts[Node] = Parts()
        self.pair_parts: Parts[Pair] = Parts()
        self.hands_parts: Parts[Hands] = Parts()
        self.memory_parts: Parts[BlockMemory] = Parts()
        self.budget_parts: Parts[tuple[int, ...]] = Parts()
        self.effect_parts: Parts[Effect] = Parts()
        self.message_parts: Parts[Message] = Parts()
        self.answers: dict[tuple[Hashable, ...], _Answer] = {}
        self.known: dict[tuple[Hashable, ...], int] = {}
        self.heads: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.landings: dict[tuple[int, int], tuple[int, tuple[model.Event, ...]]] = {}
        self._moves: dict[tuple[str, int, int], tuple[Move, ...]] = {}
        self._older: dict[tuple[str, int], int] = {}
        self.renamings: tuple[Renaming, ...] = tuple(
            Renaming(self, Renamer(new, configuration, self.slots, self.pairs, self.nodes.token))
            for new in names(configuration)
        )

    # -- states

    def initial(self) -> State:
        """Everybody has been up for long; nobody has asked for anything but in the prelude."""
        state = self._idle()
        for wanted in self.configuration.prelude:
            state = self._first(state, partial(_is, wanted))
            after = self._first(state, _goes_on)
            while after != state:
                state, after = after, self._first(after, _goes_on)
        return state

    def _first(self, state: State, wanted: Callable[[Move], bool]) -> State:
        """What the first possible move of those wanted makes of a state; itself for none."""
        for move, after, broken in self.successors(state):
            if wanted(move):
                assert not broken, f"the prelude breaks {broken}"
                return after
        return state

    def _idle(self) -> State:
        configuration = self.configuration
        nodes = [self.node_parts.number(self.nodes.started_long_ago(slot)) for slot in self.slots]
        hands = Hands(model.Writes(configuration.capabilities))
        for slot in self.slots:
            hands = in_hand.started(hands, slot.worker(1))
        ranks = len({rank for _, rank in configuration.producers})
        memory = blocks.begin(configuration.blocks, ranks, blocks.OTHERS)
        budget = tuple(configuration.budget(name) for name in self.faults)
        return (
            *nodes,
            *(self.pair_parts.number(Pair()) for _ in self.pairs),
            self.hands_parts.number(hands),
            *(self.memory_parts.number(memory) for _ in configuration.consumers),
            self.budget_parts.number(budget),
        )

    def node(self, state: State | list[int], at: int) -> Node:
        """The process at a slot."""
        return self.node_parts[state[at]]

    def pair(self, state: State | list[int], at: int) -> Pair:
        """The wires of a pair of workers."""
        return self.pair_parts[state[self.pair_at + at]]

    def hands(self, state: State | list[int]) -> Hands:
        """All WRITEs."""
        return self.hands_parts[state[self.hands_at]]

    def memory(self, state: State | list[int], at: int) -> BlockMemory:
        """A consumer's blocks."""
        return self.memory_parts[state[self.memory_at + at]]

    def canonical(self, state: State) -> State:
        """The one that stands for all states that are renamings of `state`; see `symmetry`."""
        return min((state, *(renamed(state) for renamed in self.renamings)))

    # -- moves

    def moves(self, state: State) -> list[Move]:
        """What may be possible, in a fixed order."""
        found: list[Move] = []
        for at in range(len(self.slots)):
            found += self._of_node(at, state[at])
        for at in range(len(self.pairs)):
            found += self._of_pair(at, state[self.pair_at + at])
        found += self._of_hands(state[self.hands_at])
        found.append(TIME)
        return found

    def _of_node(self, at: int, number: int) -> tuple[Move, ...]:
        key = ("node", at, number)
        known = self._moves.get(key)
        if known is None:
            node = self.node_parts[number]
            known = moves.of_node(self.configuration, self.nodes, self.slots[at], at, node)
            self._moves[key] = known
        return known

    def _of_pair(self, at: int, number: int) -> tuple[Move, ...]:
        key = ("pair", at, number)
        known = self._moves.get(key)
        if known is None:
            known = self._moves[key] = moves.of_pair(
                self.configuration, at, self.pair_parts[number]
            )
        return known

    def _of_hands(self, number: int) -> tuple[Move, ...]:
        key = ("hands", 0, number)
        known = self._moves.get(key)
        if known is None:
            known = self._moves[key] = moves.of_hands(self.hands_parts[number])
        return known

    def successors(self, state: State) -> list[Successor]:
        """All that may follow, and what each breaks."""
        from .handlers import HANDLERS

        budget = self.budget_parts[state[self.budget_at]]
        free = self.configuration.free
        found: list[Successor] = []
        for move in self.moves(state):
            spends = bool(move.cost) and move.cost not in free
            if spends and (move.cost not in self._fault or not budget[self._fault[move.cost]]):
                continue
            draft = Draft(self, list(state))
            if not HANDLERS[move.kind](draft, move):
                continue
            if spends:
                draft.ids[self.budget_at] = self._spent(state[self.budget_at], move.cost)
            after = tuple(draft.ids)
            if after != state or draft.broken:
                found.append((move, after, tuple(draft.broken)))
        return found

    def _spent(self, number: int, cost: str) -> int:
        budget = list(self.budget_parts[number])
        budget[self._fault[cost]] -= 1
        return self.budget_parts.number(tuple(budget))

    def parts(self) -> tuple[Parts[Any], ...]:
        """The parts that states name by number, each kind once."""
        return (
            self.node_parts,
            self.pair_parts,
            self.hands_parts,
            self.memory_parts,
            self.budget_parts,
        )

    def fingerprint(self, states: Iterable[State]) -> int:
        """A digest of a set of states, whatever the numbers of their parts and who has whose name.

        States that are renamings of each other are one.
        """
        nodes, pairs, hands, memories, budget = (each.digests() for each in self.parts())
        columns = [*[nodes] * len(self.slots), *[pairs] * len(self.pairs), hands]
        columns += [*[memories] * len(self.configuration.consumers), budget]
        total = 0
        for state in states:
            named = min(
                b"".join(column[number] for column, number in zip(columns, each, strict=True))
                for each in (state, *(renamed(state) for renamed in self.renamings))
            )
            total += int.from_bytes(blake2b(named, digest_size=8).digest())
        return total % 2**64

    # -- time

    def older_node(self, at: int, number: int) -> int:
        """The process after one step of time."""
        key = (f"node{at}", number)
        known = self._older.get(key)
        if known is None:
            after = self.nodes.aged(self.slots[at], self.node_parts[number])
            known = self._older[key] = self.node_parts.number(after)
        return known

    def older_pair(self, number: int) -> int:
        """The wires after one step of time."""
        known = self._older.get(("pair", number))
        if known is None:
            by, lease = self.configuration.rates[1], self.configuration.policy.lease
            after = wires.aged(self.pair_parts[number], by, lease)
            known = self._older["pair", number] = self.pair_parts.number(after)
        return known

    def older_hands(self, number: int) -> int:
        """The WRITEs after one step of time."""
        known = self._older.get(("hands", number))
        if known is None:
            after = in_hand.aged(self.hands_parts[number], self.configuration.rates[1])
            known = self._older["hands", number] = self.hands_parts.number(after)
        return known


class Renaming:
    """States under other names. Each part is renamed once and looked up ever after."""

    def __init__(self, world: World, renamer: Renamer) -> None:
        slots, pairs = len(world.slots), len(world.pairs)
        place = [
            *renamer.slots,
            *(world.pair_at + at for at in renamer.pairs),
            world.hands_at,
            *(world.memory_at + at for at in renamer.slots[: len(world.configuration.consumers)]),
            world.budget_at,
        ]
        nodes, wires, hands, memories, budget = world.parts()
        many = len(world.configuration.consumers)
        parts = [*[nodes] * slots, *[wires] * pairs, hands, *[memories] * many, budget]
        known: dict[int, dict[int, int]] = {id(each): {} for each in world.parts()}
        self._columns = tuple((each, known[id(each)]) for each in parts)
        self._from = tuple(place.index(at) for at in range(len(place)))
        self._renamer = renamer

    def __call__(self, state: State) -> State:
        """The same under the other names."""
        found = []
        for number, (parts, known) in zip(state, self._columns, strict=True):
            after = known.get(number)
            if after is None:
                after = known[number] = parts.number(self._renamer(parts[number]))
            found.append(after)
        return tuple([found[at] for at in self._from])


@define
class Draft:
    """A state in the making: one move, and everything that follows from it at once."""

    world: World
    ids: list[int]
    broken: list[tuple[str, str]] = field(factory=list)

    # -- parts

    def node(self, at: int) -> Node:
        """The process at a slot."""
        return self.world.node_parts[self.ids[at]]

    def put_node(self, at: int, node: Node) -> None:
        """Replace it."""
        self.ids[at] = self.world.node_parts.number(node)

    def pair(self, at: int) -> Pair:
        """The wires of a pair of workers."""
        return self.world.pair_parts[self.ids[self.world.pair_at + at]]

    def put_pair(self, at: int, pair: Pair) -> None:
        """Replace them."""
        self.ids[self.world.pair_at + at] = self.world.pair_parts.number(pair)

    @property
    def hands(self) -> Hands:
        """All WRITEs."""
        return self.world.hands_parts[self.ids[self.world.hands_at]]

    def put_hands(self, hands: Hands) -> None:
        """Replace them."""
        self.ids[self.world.hands_at] = self.world.hands_parts.number(hands)

    def memory(self, at: int) -> BlockMemory:
        """A consumer's blocks."""
        return self.world.memory_parts[self.ids[self.world.memory_at + at]]

    def put_memory(self, at: int, memory: BlockMemory) -> None:
        """Replace them."""
        self.ids[self.world.memory_at + at] = self.world.memory_parts.number(memory)

    # -- steps

    def step(self, at: int, key: Hashable, run: Callable[[Slot, Node], Step]) -> tuple[Effect, ...]:
        """Something happens at a process; `key` says what, and `run` works it out if it is new.

        Returns the effects that were carried out.
        """
        world = self.world
        question = (at, self.ids[at], key)
        answer = world.answers.get(question)
        if answer is None:
            step = run(world.slots[at], self.node(at))
            numbers = tuple(world.effect_parts.number(effect) for effect in step.effects)
            answer = _Answer(world.node_parts.number(step.node), step.effects, numbers, step.broken)
            world.answers[question] = answer
        self.ids[at] = answer.number
        self.broken.extend(answer.broken)
        for number in answer.numbers:
            self._do(at, number)
        return answer.effects

    def _do(self, at: int, number: int) -> None:
        """Carry out the effect of that number."""
        world = self.world
        effect = world.effect_parts[number]
        if isinstance(effect, Transmit | Hangup):
            place = world.pair_at + effect.connection // PER_PAIR
            question = (self.ids[place], self._end(at), number)
            known = world.known.get(question)
            if known is None:
                pair = _on_wire(world.pair_parts[self.ids[place]], self._end(at), effect)
                known = world.known[question] = world.pair_parts.number(pair)
            self.ids[place] = known
        elif isinstance(effect, PostWrite):
            asked = ("order", self.ids[world.hands_at], at, self.node(at).life, number)
            known = world.known.get(asked)
            if known is None:
                writer = world.slots[at].worker(self.node(at).life)
                after = in_hand.order(self.hands, Ordered(writer, effect))
                known = world.known[asked] = world.hands_parts.number(after)
            self.ids[world.hands_at] = known
        elif isinstance(effect, WithdrawWrites):
            writer = world.slots[at].worker(self.node(at).life)
            self.put_hands(in_hand.withdraw(self.hands, writer, effect.attempt))
        else:
            assert isinstance(effect, Delivered | NotDelivered | BlocksReleased), effect
            self._report(at, effect)

    def _end(self, at: int) -> int:
        return CONSUMER if self.world.slots[at].consumer else PRODUCER

    def _report(self, at: int, report: Delivered | NotDelivered | BlocksReleased) -> None:
        attempt = self.attempt(at, report.transfer, report.attempt)
        memory = self.memory(at)
        match report:
            case Delivered():
                transfer = self.world.transfers[report.transfer]
                self.broken.extend(
                    blocks.delivered(memory, attempt, transfer.start, transfer.tokens)
                )
            case NotDelivered():
                self.put_memory(at, blocks.not_delivered(memory, attempt))
            case _:
                self.put_memory(at, blocks.released(memory, attempt))

    def attempt(self, at: int, transfer: str, number: int) -> AttemptId:
        """An attempt's name at a consumer, of all producer ranks."""
        worker = self.world.slots[at].worker(self.node(at).life)
        return AttemptId(
            worker.engine, worker.incarnation, worker.rank, -1, TransferId(transfer), number
        )

    # -- wires

    def closed(self, at: int, number: int, end: int, how: str) -> None:
        """One end of a connection is closed."""
        world, place = self.world, self.world.pair_at + at
        question = (self.ids[place], number, end, how)
        known = world.known.get(question)
        if known is None:
            pair = world.pair_parts[self.ids[place]]
            wire = pair.wire(number)
            after = pair if wire is None else pair.put(wire.closed(end, how))
            known = world.known[question] = world.pair_parts.number(after)
        self.ids[place] = known

    def head(self, at: int, number: int, end: int) -> tuple[int, int]:
        """The number of the first message on its way to an end, and the wires without it."""
        world = self.world
        question = (self.ids[world.pair_at + at], number, end)
        known = world.heads.get(question)
        if known is None:
            pair = world.pair_parts[question[0]]
            wire = pair.wire(number)
            assert wire is not None, "only what is on a wire is delivered"
            message = world.message_parts.number(wire.queues[end][0])
            known = message, world.pair_parts.number(pair.put(wire.taken(end)))
            world.heads[question] = known
        return known


def _on_wire(pair: Pair, end: int, effect: Transmit | Hangup) -> Pair:
    wire = pair.wire(effect.connection)
    if wire is None:
        return pair
    if isinstance(effect, Transmit):
        return pair.put(wire.sent(end, effect.message))
    return pair.put(wire.closed(end, End.HUNG_UP)) if wire.ends[end] == End.OPEN else pair
