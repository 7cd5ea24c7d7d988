"""Walks through worlds that are too large to be searched, as a state machine of hypothesis.

A thin shell: what may happen, what it does and what it breaks are the checker's. Hypothesis chooses
and, in long runs, makes what it has found shorter. A failure is a scenario script, to be saved and
made again by `pushkv check --replay`. For long runs:

    pytest tests/check/test_state_machine.py --hypothesis-profile long
"""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from hypothesis.strategies import SearchStrategy, integers, sampled_from

from pushkv.check.configurations import Configuration
from pushkv.check.moves import KINDS
from pushkv.check.mutants import mutants
from pushkv.check.peace import calmed
from pushkv.check.script import HoldsError, ImpossibleError, SearchStage, script, without
from pushkv.check.wide import WIDE
from pushkv.check.world import Successor, World
from pushkv.testing.scenario import run
from pushkv.testing.world import ViolationError

NETWORK = ("connect", "deliver", "hear", "report")
WRITES = ("post", "refuse", "write")
CLOCKS = ("time", "fire", "gone", "proven")
ENGINES = tuple(kind for kind in KINDS if kind not in (*NETWORK, *WRITES, *CLOCKS))
CHOICES: SearchStrategy[int] = integers(0, 2**16)

QUICK = settings(
    derandomize=True,
    deadline=None,
    max_examples=40,
    phases=[Phase.generate],
    stateful_step_count=50,
    suppress_health_check=list(HealthCheck),
)
HUNT = settings(QUICK, max_examples=400)
"""A rule that is out is missed after a tenth of these, whatever hypothesis makes of its seed."""
SETTINGS = settings() if settings.get_current_profile_name() == "long" else QUICK


class Explorer(RuleBasedStateMachine):
    """One walk. Worlds are shared by all walks: each knows what others have worked out."""

    worlds: ClassVar[dict[str, tuple[World, World]]] = {}

    @initialize(configuration=sampled_from(WIDE))
    def begin(self, configuration: Configuration) -> None:
        if configuration.name not in self.worlds:
            world = World(configuration)
            self.worlds[configuration.name] = world, calmed(world)
        self.configuration = configuration
        self.stage = SearchStage(*self.worlds[configuration.name])
        self.following = self.stage.possible()
        self.lines: list[str] = []

    def options(self, kinds: tuple[str, ...]) -> list[Successor]:
        return [each for each in self.following if each[0].kind in kinds and not each[0].cost]

    def go(self, options: list[Successor], choice: int) -> None:
        """Make one of them: each kind is as likely as the others, however many there are of it."""
        kinds = list(dict.fromkeys((move.kind, move.cost) for move, _, _ in options))
        choice, kind = divmod(choice, len(kinds))
        alike = [each for each in options if (each[0].kind, each[0].cost) == kinds[kind]]
        self.lines.append(self.stage.make(alike[choice % len(alike)]))
        self.following = self.stage.possible()
        self.check()

    def check(self) -> None:
        if self.stage.broken:
            raise ViolationError("\n" + script(self.configuration, self.lines, self.stage.broken))

    @rule(times=integers(1, 16))
    def flow(self, times: int) -> None:
        """Messages come through, WRITEs are posted, or else engines go on."""
        for _ in range(times):
            options = self.options((*NETWORK, "post")) or self.options(ENGINES)
            if options:
                self.go(options, 0)

    @precondition(lambda self: self.options(ENGINES))
    @rule(choice=CHOICES)
    def engine(self, choice: int) -> None:
        self.go(self.options(ENGINES), choice)

    @precondition(lambda self: self.options(NETWORK))
    @rule(choice=CHOICES)
    def network(self, choice: int) -> None:
        self.go(self.options(NETWORK), choice)

    @precondition(lambda self: self.options(WRITES))
    @rule(choice=CHOICES)
    def transport(self, choice: int) -> None:
        self.go(self.options(WRITES), choice)

    @precondition(lambda self: self.options(CLOCKS))
    @rule(choice=CHOICES)
    def clock(self, choice: int) -> None:
        self.go(self.options(CLOCKS), choice)

    @precondition(lambda self: any(move.cost for move, _, _ in self.following))
    @rule(choice=CHOICES)
    def fault(self, choice: int) -> None:
        self.go([each for each in self.following if each[0].cost], choice)

    def teardown(self) -> None:
        """Faults stop, and everything is given back."""
        if hasattr(self, "stage") and not self.stage.broken:
            self.lines.append("peace")
            self.stage.do(["peace"])
            self.check()


def explore(profile: settings) -> None:
    """Worlds of its own: those of others know what follows while a rule is out."""

    class Fresh(Explorer):
        worlds: ClassVar[dict[str, tuple[World, World]]] = {}

    run_state_machine_as_test(Fresh, settings=profile)


def test_nothing_breaks_on_the_way_and_everything_ends() -> None:
    explore(SETTINGS)


@pytest.mark.parametrize(
    "name",
    [
        "cancel frees",
        "link end frees",
        "fence at the last grant",
        "verdict before the handles close",
        "first rank delivers",
    ],
)
def test_a_rule_that_is_out_is_missed_and_the_script_says_how(name: str) -> None:
    with mutants()[name].in_force(), pytest.raises(ViolationError) as caught:
        explore(HUNT)
    text = without(name, str(caught.value).removeprefix("\n"))
    assert run(text) == text
    with pytest.raises((HoldsError, ImpossibleError)):
        run(text, as_it_is=True)
