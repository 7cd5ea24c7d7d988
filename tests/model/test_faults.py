"""Faults are data: reproducible, budgeted, and independent of each other."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import Duration
from pushkv.model.faults import (
    Chance,
    Fault,
    FaultPlan,
    FaultRule,
    may_strike,
    mix,
    spend,
    strike,
)


def strikes(plan: FaultPlan, fault: Fault, count: int) -> list[int]:
    chance, found = Chance(), []
    for number in range(count):
        chance, struck = strike(plan, chance, fault)
        if struck is not None:
            assert struck.number == number
            found.append(number)
    return found


def test_a_script_strikes_exactly_there() -> None:
    plan = FaultPlan(1, (FaultRule(Fault.LOSS, script=(0, 3, 7)),))
    assert strikes(plan, Fault.LOSS, 10) == [0, 3, 7]
    assert strikes(plan, Fault.DELAY, 10) == []


def test_a_budget_caps_script_and_chance() -> None:
    script = FaultRule(Fault.LOSS, script=(0, 3, 7), budget=2)
    always = FaultRule(Fault.DELAY, per_million=1_000_000, budget=2)
    plan = FaultPlan(1, (script, always))
    assert strikes(plan, Fault.LOSS, 10) == [0, 3]
    assert strikes(plan, Fault.DELAY, 10) == [0, 1]


@pytest.mark.parametrize("per_million", [0, 10_000, 250_000, 1_000_000])
def test_a_chance_is_what_it_says(per_million: int) -> None:
    plan = FaultPlan(7, (FaultRule(Fault.LOSS, per_million=per_million),))
    assert abs(len(strikes(plan, Fault.LOSS, 4000)) - 4000 * per_million // 1_000_000) <= 100


def test_another_seed_strikes_elsewhere() -> None:
    rule = FaultRule(Fault.LOSS, per_million=500_000)
    assert strikes(FaultPlan(1, (rule,)), Fault.LOSS, 64) != strikes(
        FaultPlan(2, (rule,)), Fault.LOSS, 64
    )


def test_faults_do_not_move_each_other() -> None:
    loss = FaultRule(Fault.LOSS, per_million=500_000)
    delay = FaultRule(Fault.DELAY, per_million=500_000)
    alone, beside = FaultPlan(3, (loss,)), FaultPlan(3, (delay, loss))
    chance, found = Chance(), []
    for number in range(64):
        chance, _ = strike(beside, chance, Fault.DELAY)
        chance, struck = strike(beside, chance, Fault.LOSS)
        found += [number] * (struck is not None)
    assert found == strikes(alone, Fault.LOSS, 64)
    assert strikes(beside, Fault.DELAY, 64) != found


@given(st.integers(0, 2**64), st.integers(0, 50), st.integers(1, 1000), st.integers(0, 1000))
def test_draws_stay_in_range(seed: int, number: int, count: int, salt: int) -> None:
    rule = FaultRule(Fault.DELAY, 1_000_000, least=Duration(5), most=Duration(9))
    chance = Chance()
    for _ in range(number):
        chance, _ = strike(FaultPlan(seed, (rule,)), chance, Fault.DELAY)
    _, struck = strike(FaultPlan(seed, (rule,)), chance, Fault.DELAY)
    assert struck is not None
    assert 0 <= struck.pick(count, salt) < count
    assert 5 <= struck.lasts(salt) <= 9


def test_draws_use_the_whole_range() -> None:
    rule = FaultRule(Fault.DELAY, 1_000_000, least=Duration(5), most=Duration(9))
    _, struck = strike(FaultPlan(0, (rule,)), Chance(), Fault.DELAY)
    assert struck is not None
    assert {struck.lasts(salt) for salt in range(100)} == {5, 6, 7, 8, 9}
    assert {struck.pick(4, salt) for salt in range(100)} == {0, 1, 2, 3}


def test_the_explorer_chooses_while_the_budget_lasts() -> None:
    plan = FaultPlan(0, (FaultRule(Fault.CRASH, budget=2),))
    chance = Chance()
    assert may_strike(plan, chance, Fault.CRASH)
    assert not may_strike(plan, chance, Fault.LOSS)
    chance = spend(spend(chance, Fault.CRASH), Fault.CRASH)
    assert chance.count(Fault.CRASH) == 2
    assert not may_strike(plan, chance, Fault.CRASH)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"per_million": 1_000_001}, "per_million"),
        ({"per_million": -1}, "per_million"),
        ({"per_million": 1, "script": (1,)}, "script"),
        ({"script": (-1,)}, "script"),
        ({"budget": -1}, "budget"),
        ({"least": Duration(2), "most": Duration(1)}, "least"),
    ],
)
def test_nonsense_is_refused_by_name(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        FaultRule(Fault.LOSS, **arguments)  # type: ignore[arg-type]
    assert raised.value.field == field


def test_one_rule_per_fault() -> None:
    with pytest.raises(ConfigurationError, match="loss"):
        FaultPlan(0, (FaultRule(Fault.LOSS), FaultRule(Fault.LOSS)))


def test_choices_are_the_same_in_every_process() -> None:
    code = (
        "from pushkv.model.faults import *\nprint([mix(1, 2, n) for n in range(3)], mix(), end='')"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("0", "1")
    }
    assert outputs == {f"{[mix(1, 2, n) for n in range(3)]} {mix()}"}


def test_mix_depends_on_every_word() -> None:
    assert len({mix(a, b) for a in range(50) for b in range(50)}) == 2500
    assert mix(1, 2) != mix(2, 1)
