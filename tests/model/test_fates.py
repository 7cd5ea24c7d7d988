"""The fate of one WRITE under each fault."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.capabilities import Capabilities
from pushkv.core.ids import Duration, Instant
from pushkv.model.fates import CrashStep, CutStep, EndStep, Fate, LandStep, decide
from pushkv.model.faults import Chance, Fault, FaultPlan, FaultRule
from pushkv.model.flights import Outcome

from .names import BOUNDED, STRONG, WEAK

NOW = Instant(100)


def fate(
    *rules: FaultRule, capabilities: Capabilities = STRONG, pieces: int = 4, seed: int = 0
) -> Fate:
    return decide(FaultPlan(seed, rules), Chance(), pieces, capabilities, NOW)[1]


def always(fault: Fault, least: int = 0, most: int = 0) -> FaultRule:
    return FaultRule(fault, 1_000_000, least=Duration(least), most=Duration(most))


def landings(of: Fate) -> list[tuple[int, int]]:
    return [(at, step.index) for at, step in of.steps if isinstance(step, LandStep)]


def test_without_faults_it_lands_now_and_is_done_after_or_before() -> None:
    lands = [(NOW, LandStep(index)) for index in range(4)]
    done = (NOW, EndStep(Outcome.DONE))
    assert fate().steps == (*lands, done)
    assert fate(capabilities=WEAK).steps == (done, *lands)
    assert fate().arrivals == (0,)
    assert fate(pieces=0).steps == (done,)


def test_delay() -> None:
    late = fate(always(Fault.DELAY, 5, 9))
    assert [index for _, index in landings(late)] == [0, 1, 2, 3]
    assert all(105 <= at <= 109 for at, _ in landings(late))
    assert late.steps[-1] == (landings(late)[-1][0], EndStep(Outcome.DONE))
    assert 5 <= late.arrivals[0] <= 9
    weak = fate(always(Fault.DELAY, 5, 9), capabilities=WEAK)
    assert weak.steps[0] == (NOW, EndStep(Outcome.DONE))
    bounded = fate(always(Fault.DELAY, 5, 99), capabilities=BOUNDED, pieces=50)
    assert max(at for at, _ in landings(bounded)) == 110


def test_reordering() -> None:
    shuffled = [index for _, index in landings(fate(always(Fault.REORDERING), pieces=8))]
    assert shuffled != list(range(8))
    assert sorted(shuffled) == list(range(8))


def test_refused() -> None:
    assert fate(always(Fault.REFUSED)).refused
    assert fate(always(Fault.REFUSED)).steps == ()


def test_write_failure_stops_before_the_end() -> None:
    counts = set()
    for seed in range(40):
        failed = fate(always(Fault.WRITE_FAILURE), seed=seed)
        assert failed.steps[-1][1] == EndStep(Outcome.FAILED)
        counts.add(len(landings(failed)))
    assert counts == {0, 1, 2, 3}


def test_an_unknown_write_lands_late_or_never() -> None:
    never = fate(always(Fault.UNKNOWN_OUTCOME))
    assert never.steps[-1][1] == EndStep(Outcome.UNKNOWN)
    assert len(landings(never)) < 4
    late = fate(always(Fault.UNKNOWN_OUTCOME, 3, 30), capabilities=BOUNDED)
    at = [step for _, step in late.steps].index(EndStep(Outcome.UNKNOWN))
    assert sorted(index for _, index in landings(late)) == [0, 1, 2, 3]
    assert all(102 < instant <= 110 for instant, _ in late.steps[at + 1 :])
    assert not late.source_busy
    assert fate(always(Fault.UNKNOWN_OUTCOME), always(Fault.SOURCE_BUSY)).source_busy


def test_a_crash_tells_nobody() -> None:
    torn = fate(always(Fault.CRASH))
    assert torn.steps[-1][1] == CrashStep()
    assert not any(isinstance(step, EndStep) for _, step in torn.steps)
    late = fate(always(Fault.CRASH, 3, 3))
    assert sorted(index for _, index in landings(late)) == [0, 1, 2, 3]


def test_partitions() -> None:
    cut = fate(always(Fault.PARTITION, 7, 7), always(Fault.PARTITION_ONE_WAY))
    steps = [step for _, step in cut.steps]
    assert CutStep(both=True, lasts=Duration(7)) in steps
    assert CutStep(both=False, lasts=Duration(0)) in steps
    assert len(landings(cut)) == 4


def test_arrivals() -> None:
    assert fate(always(Fault.ARRIVAL_LOSS)).arrivals == ()
    assert fate(always(Fault.ARRIVAL_DUPLICATION, 3, 3)).arrivals == (0, 3)


def test_scripts_count_writes() -> None:
    plan = FaultPlan(
        0,
        (
            FaultRule(Fault.WRITE_FAILURE, script=(1,)),
            FaultRule(Fault.UNKNOWN_OUTCOME, script=(2,)),
            FaultRule(Fault.REFUSED, script=(3,)),
        ),
    )
    chance, found = Chance(), []
    for _ in range(5):
        chance, each = decide(plan, chance, 1, STRONG, NOW)
        outcomes = [step.outcome for _, step in each.steps if isinstance(step, EndStep)]
        found.append("refused" if each.refused else outcomes[0].value)
    assert found == ["done", "failed", "unknown", "refused", "done"]


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 9),
    st.sampled_from([STRONG, WEAK, BOUNDED]),
    st.sets(st.sampled_from(list(Fault))),
)
def test_every_fate_is_in_order_within_the_bound_and_reproducible(
    seed: int, pieces: int, capabilities: Capabilities, faults: set[Fault]
) -> None:
    rules = [FaultRule(fault, 500_000, most=Duration(50)) for fault in Fault if fault in faults]
    each = fate(*rules, capabilities=capabilities, pieces=pieces, seed=seed)
    assert each == fate(*rules, capabilities=capabilities, pieces=pieces, seed=seed)
    instants = [at for at, _ in each.steps]
    assert instants == sorted(instants)
    assert len(set(landings(each))) == len(landings(each)) <= pieces
    if capabilities.write_bound is not None:
        assert all(at <= NOW + capabilities.write_bound for at, _ in landings(each))
    ends = [step for _, step in each.steps if isinstance(step, EndStep | CrashStep)]
    assert len(ends) == (0 if each.refused else 1)
