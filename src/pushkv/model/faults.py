"""What goes wrong, as data.

A `FaultPlan` names faults. Every fault has *opportunities*, counted from 0: the n-th message sent,
the n-th WRITE posted. Whether one strikes is a pure function of the plan and of that number, either
by a script (exactly those) or by a seeded hash of (seed, fault, number) against a chance in
millionths; a budget caps both. So the same plan gives the same faults, in every process.

An explorer that wants *every* choice asks `may_strike` instead and spends the budget with `spend`.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import evolve, field, frozen

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import Duration

__all__ = [
    "NO_FAULTS",
    "Chance",
    "Fault",
    "FaultPlan",
    "FaultRule",
    "Strike",
    "may_strike",
    "mix",
    "spend",
    "strike",
]

_MILLION = 1_000_000
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Fault(StrEnum):
    """Everything that can go wrong. The first four are of messages, the last two of arrivals."""

    LOSS = "loss"
    """A message is lost; on an ordered channel, the connection ends there."""
    DUPLICATION = "duplication"
    """A message is delivered twice (unordered channels only)."""
    REORDERING = "reordering"
    """A message overtakes those sent before it (unordered channels only); or the pieces of a WRITE
    land in another order."""
    DELAY = "delay"
    """A message, the pieces of a WRITE, or an arrival takes longer, by a drawn time."""
    WRITE_FAILURE = "write_failure"
    """Some pieces land, then the WRITE ends FAILED and no more do."""
    UNKNOWN_OUTCOME = "unknown_outcome"
    """The WRITE ends UNKNOWN after some pieces; the others land late, or never."""
    SOURCE_BUSY = "source_busy"
    """With an unknown outcome: the WRITE goes on reading its source."""
    REFUSED = "refused"
    """The poster finds that the permit does not last."""
    CRASH = "crash"
    """The writing process dies after some pieces; the others may land until the bound."""
    PARTITION = "partition"
    """Writer and target are cut off from each other, both ways."""
    PARTITION_ONE_WAY = "partition_one_way"
    """Nothing gets from the writer to the target."""
    ARRIVAL_LOSS = "arrival_loss"
    """All bytes land, but the target is never told."""
    ARRIVAL_DUPLICATION = "arrival_duplication"
    """The target is told twice."""


_FAULTS = tuple(Fault)
_INDEX = {fault: index for index, fault in enumerate(_FAULTS)}


def mix(*words: int) -> int:
    """A well-mixed unsigned 64-bit number that is a function of `words` alone (splitmix64)."""
    state = 0
    for word in words:
        state = (state + (word & _WORD) + _GOLDEN) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state


@frozen
class FaultRule:
    """When one fault strikes, how often at most, and for how long.

    Attributes:
        fault: Which.
        per_million: The chance at each opportunity, in millionths; 1_000_000 is always.
        script: The opportunities that it strikes at, instead of a chance.
        budget: How often it strikes at most; None for as often as it comes.
        least: Shortest time it takes, in nanoseconds: of a delay, a partition, a late landing.
        most: Longest time it takes. A partition of no length lasts until it is healed.

    Raises:
        ConfigurationError: A value is out of range, or both a chance and a script are given.
    """

    fault: Fault
    per_million: int = 0
    script: tuple[int, ...] = ()
    budget: int | None = None
    least: Duration = Duration(0)
    most: Duration = Duration(0)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.per_million <= _MILLION:
            raise ConfigurationError("per_million", self.per_million, "0 to 1000000")
        if self.script and self.per_million:
            raise ConfigurationError("script", self.script, "a script or a chance, not both")
        if any(number < 0 for number in self.script):
            raise ConfigurationError("script", self.script, "numbers of opportunities, from 0")
        if self.budget is not None and self.budget < 0:
            raise ConfigurationError("budget", self.budget, "at least 0, or None")
        if not 0 <= self.least <= self.most:
            raise ConfigurationError("least", self.least, f"0 to most = {self.most}")


def _one_rule_each(rules: tuple[FaultRule, ...]) -> tuple[FaultRule, ...]:
    for index, rule in enumerate(rules):
        if any(rule.fault is other.fault for other in rules[:index]):
            raise ConfigurationError("rules", rule.fault.value, "one rule per fault")
    return tuple(rules)


@frozen
class FaultPlan:
    """The faults of one run; hashable, comparable, printable: a failing run is its plan.

    Raises:
        ConfigurationError: Two rules name one fault.
    """

    seed: int = 0
    rules: tuple[FaultRule, ...] = field(default=(), converter=_one_rule_each)

    def rule(self, fault: Fault) -> FaultRule | None:
        """The rule of `fault`, or None where it never strikes."""
        return next((rule for rule in self.rules if rule.fault is fault), None)


NO_FAULTS = FaultPlan()


@frozen
class Chance:
    """How many opportunities each fault has had, and how often it struck, in `Fault`'s order."""

    opportunities: tuple[int, ...] = (0,) * len(_FAULTS)
    struck: tuple[int, ...] = (0,) * len(_FAULTS)

    def count(self, fault: Fault) -> int:
        """How often `fault` has struck."""
        return self.struck[_INDEX[fault]]


@frozen
class Strike:
    """A fault that struck: at which opportunity, and the entropy for what is drawn about it."""

    fault: Fault
    number: int
    entropy: int
    least: Duration
    most: Duration

    def pick(self, count: int, salt: int = 0) -> int:
        """A number in [0, count), a function of seed, fault, opportunity and `salt` alone."""
        return mix(self.entropy, salt) % count

    def lasts(self, salt: int = 0) -> Duration:
        """A time in [least, most], in nanoseconds."""
        return Duration(self.least + self.pick(self.most - self.least + 1, ~salt))


def _plus_one(counts: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*counts[:index], counts[index] + 1, *counts[index + 1 :])


def may_strike(plan: FaultPlan, chance: Chance, fault: Fault) -> bool:
    """Whether the plan knows `fault` and its budget is not spent: the explorer's question."""
    rule = plan.rule(fault)
    return rule is not None and (rule.budget is None or chance.count(fault) < rule.budget)


def spend(chance: Chance, fault: Fault) -> Chance:
    """One strike of `fault` more: the explorer has chosen it."""
    return evolve(chance, struck=_plus_one(chance.struck, _INDEX[fault]))


def strike(plan: FaultPlan, chance: Chance, fault: Fault) -> tuple[Chance, Strike | None]:
    """One more opportunity for `fault`: whether it strikes now, and the counts after it.

    A fault without a rule counts nothing: a rule added for one fault moves no other.
    """
    rule = plan.rule(fault)
    if rule is None:
        return chance, None
    index = _INDEX[fault]
    number = chance.opportunities[index]
    after = evolve(chance, opportunities=_plus_one(chance.opportunities, index))
    entropy = mix(plan.seed, index, number)
    by_chance = entropy % _MILLION < rule.per_million
    strikes = number in rule.script if rule.script else by_chance
    if not strikes or not may_strike(plan, chance, fault):
        return after, None
    return spend(after, fault), Strike(fault, number, entropy, rule.least, rule.most)
