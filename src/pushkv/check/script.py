"""Paths through the world of a search as scenario scripts: written, and made again.

A script that begins with ``search NAME`` happens in the world of that configuration, in which time
is a step, and a deadline comes when a line says so. Each further line is one move, as `lines` names
it; ``expect broken I1`` says what the last one breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from difflib import get_close_matches

from attrs import define, field

from pushkv.core.effects import Effect, Transmit
from pushkv.testing.scenario_world import ScenarioError
from pushkv.testing.told import effect_words
from pushkv.testing.world_parts import ViolationError

from .alone import waits_for_ever, without_end
from .configurations import STANDARD, Configuration
from .configurations_deep import DEEP
from .handlers import HANDLERS
from .lines import line_of, prelude_words
from .liveness import trap_from
from .moves import Move
from .nodes import Node, Slot, Stage, Step
from .peace import calmed, peace
from .search import Violation
from .story import PROPERTIES
from .wide import WIDE
from .wires import PER_PAIR
from .world import Broken, Draft, Successor, World

__all__ = ["HoldsError", "ImpossibleError", "SearchStage", "script", "script_of", "without"]

NEAREST = 3
INDENT = "    "


class ImpossibleError(ScenarioError):
    """What a line says cannot happen there, or not any more."""


class HoldsError(ScenarioError):
    """What a script says is broken is not."""


# -- written


def script_of(configuration: Configuration, violation: Violation) -> str:
    """A violation as a script that makes it again."""
    lines = lines_of(World(configuration), violation.moves)
    return script(configuration, lines, violation.broken)


def lines_of(world: World, moves: tuple[Move, ...]) -> list[str]:
    """A path from the initial state, line by line."""
    state = world.initial()
    found: list[str] = []
    for move in moves:
        found.append(line_of(world, state, move))
        after = next((each for each in world.successors(state) if each[0] == move), None)
        assert after is not None, f"{move} is not possible: is the rule that was out in force?"
        state = after[1]
    return found


def script(configuration: Configuration, lines: Iterable[str], broken: Broken) -> str:
    """Lines as a script, with what comes of each; the last one breaks something."""
    name, detail = broken[0]
    deep = " deep" if configuration in DEEP else ""
    text = [
        f"# {configuration.name}{deep}: {configuration.purpose}",
        f"# {name} is broken ({PROPERTIES[name]}): {detail}",
        f"search {configuration.name}{deep}",
    ]
    world = World(configuration)
    if configuration.prelude:
        text.insert(2, f"# Before: {prelude_words(world)}; whatever they sent has come.")
    stage = SearchStage(world)
    for line in lines:
        stage.do(line.split())
        text += [line, *(f"{INDENT}{told}" for told in stage.take_story())]
    return "\n".join([*text, f"expect broken {name}"]) + "\n"


def without(name: str, script: str) -> str:
    """The script with something taken out from its beginning on; see `mutants`."""
    return script.replace("\nsearch ", f"\nwithout {name}\nsearch ", 1)


# -- made again


@define
class _Told(Draft):
    """A state in the making, and what is said in it."""

    said: list[str] = field(factory=list)

    def step(self, at: int, key: Hashable, run: Callable[[Slot, Node], Step]) -> tuple[Effect, ...]:
        """As `Draft.step`; writes down what came of it."""
        before = self.node(at)
        effects = super().step(at, key, run)
        after = self.node(at)
        who = str(self.world.slots[at])
        dialled = [each for each in after.dialing if each not in before.dialing]
        self.said += [f"{who} dials {engine}{rank or ''}" for engine, rank in dialled]
        for effect in effects:
            peer = ""
            if isinstance(effect, Transmit):
                ends = self.world.pairs[effect.connection // PER_PAIR]
                peer = str(self.world.slots[sum(ends) - at])
            text = effect_words(who, effect, peer)
            self.said += [text] if text else []
        for prefill in after.prefills:
            was = before.prefill(prefill.transfer)
            released = Stage.RELEASED
            if prefill.stage == released and (was is None or was.stage != released):
                self.said.append(f"{who} is told: {prefill.transfer} source is free")
        return effects


class SearchStage:
    """The world of one configuration, in which a script makes one move after the other."""

    def __init__(self, world: World, calm: World | None = None) -> None:
        self._world = world
        self._calm = calm
        self._state = world.initial()
        self._broken: Broken = ()
        self._expected = False
        self._story: list[str] = []

    @classmethod
    def named(cls, *words: str) -> SearchStage:
        """The world of a configuration: its name, and perhaps `deep`.

        Raises:
            ScenarioError: There is none.
        """
        known: dict[tuple[str, ...], Configuration] = {
            **{(each.name,): each for each in (*STANDARD, *WIDE)},
            **{(each.name, "deep"): each for each in DEEP},
        }
        found = known.get(words)
        if found is None:
            names = ", ".join(name[0] for name in known if len(name) == 1)
            raise ScenarioError(f"expected one of {names}, and perhaps deep")
        try:
            return cls(World(found))
        except AssertionError as error:
            raise ScenarioError(str(error)) from error

    @property
    def broken(self) -> Broken:
        """What the last move broke."""
        return self._broken

    def possible(self) -> list[Successor]:
        """What may follow."""
        return self._world.successors(self._state)

    def make(self, successor: Successor) -> str:
        """Make one of the moves that are possible. Returns its line."""
        move, after, broken = successor
        line = line_of(self._world, self._state, move)
        self._tell(move)
        self._state, self._broken = after, broken
        return line

    def take_story(self) -> list[str]:
        """What has happened since it was last asked."""
        story, self._story = self._story, []
        return story

    def do(self, words: list[str]) -> None:
        """One move, or one expectation.

        Raises:
            ImpossibleError: The move is not possible there.
            HoldsError: It is expected to have broken something, and has not.
            ViolationError: The move before broke something, and nobody expected that.
        """
        if words[0] == "expect":
            self._expect(" ".join(words[1:]))
            return
        self.end()
        if words == ["peace"]:
            self._peace()
            return
        line = " ".join(words)
        following = {line_of(self._world, self._state, each[0]): each for each in self.possible()}
        if line not in following:
            nearest = get_close_matches(line, following, NEAREST, 0) or ["nothing"]
            raise ImpossibleError(f"not possible here; what is: {', '.join(nearest)}")
        self.make(following[line])

    def end(self) -> None:
        """Nothing was broken that nobody expected.

        Raises:
            ViolationError: Something was.
        """
        if self._broken and not self._expected:
            raise ViolationError("; ".join(f"{name}: {detail}" for name, detail in self._broken))

    def _tell(self, move: Move) -> None:
        draft = _Told(self._world, list(self._state))
        HANDLERS[move.kind](draft, move)
        self._story += draft.said
        self._story += [f"{name} is broken: {detail}" for name, detail in draft.broken]

    def _expect(self, what: str) -> None:
        name = what.removeprefix("broken ")
        if what != "nothing broken" and (name == what or name not in PROPERTIES):
            known = ", ".join(PROPERTIES)
            raise ScenarioError(f"expected nothing broken, or broken and one of {known}")
        if not self._broken and what in ("nothing broken", "broken ends", "broken I7"):
            self._look_ahead()
        if what == "nothing broken":
            self.end()
        elif name not in [each for each, _ in self._broken]:
            raise HoldsError(f"{name} is not broken")
        else:
            self._expected = True

    def _look_ahead(self) -> None:
        places = list(enumerate(self._state[: self._world.pair_at]))
        lonely = without_end(self._world, places)
        if lonely is not None:
            self._broken = (("I7", waits_for_ever(self._world, lonely)),)
            return
        stuck = trap_from(self._world, self._state)
        if stuck is not None:
            self._broken = (("ends", stuck.why),)

    def _peace(self) -> None:
        calm = self._calm or calmed(self._world)
        after = peace(self._world, self._state, calm)
        self._world = calm
        for state, move in zip(after.path, after.moves, strict=False):
            self._state = state
            self._story.append(line_of(calm, state, move))
            self._tell(move)
        self._state, self._broken = after.path[-1], after.broken
