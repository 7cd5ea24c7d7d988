"""WRITEs in flight: what the writer hears, where bytes go, and what a crash does not take back."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.capabilities import Capabilities
from pushkv.core.errors import LocalProtocolError
from pushkv.core.ids import Instant
from pushkv.model.faults import Chance, Fault, FaultPlan, FaultRule, spend
from pushkv.model.flights import FlightKey, Outcome, drop, end, land, may_end, post, standing
from pushkv.model.writes import (
    Action,
    Arrive,
    Crash,
    Drop,
    End,
    Ended,
    Event,
    Land,
    Landed,
    LoseArrival,
    Noticed,
    Post,
    RepeatArrival,
    Start,
    Writes,
    apply,
    cost,
    enabled,
)

from .names import BOUNDED, STRONG, WEAK, attempt, worker

P, D, D2 = worker("p"), worker("d"), worker("d", 2)
KEY = FlightKey(P, attempt(), 0)
NOW = Instant(100)


def run(state: Writes, *actions: Action) -> tuple[Writes, tuple[Event, ...]]:
    events: tuple[Event, ...] = ()
    for action in actions:
        state, more = apply(state, action)
        events += more
    return state, events


def posted(capabilities: Capabilities = STRONG, pieces: tuple[int, ...] = (7, 8)) -> Writes:
    start = Writes(capabilities)
    return run(start, Start(P), Start(D), Post(KEY, D, pieces, NOW))[0]


# -- one flight


@pytest.mark.parametrize(("capabilities", "early"), [(STRONG, False), (WEAK, True)])
def test_done_before_the_last_piece_only_where_it_is_weak(
    capabilities: Capabilities, early: bool
) -> None:
    flight = post(KEY, D, (7, 8), NOW, capabilities)
    assert may_end(land(flight, 0, NOW), Outcome.DONE, capabilities) is early
    whole = land(land(flight, 1, NOW), 0, NOW)
    assert whole.complete
    assert end(whole, Outcome.DONE, capabilities).over


@pytest.mark.parametrize("capabilities", [STRONG, WEAK])
def test_a_torn_write_is_never_done(capabilities: Capabilities) -> None:
    torn = drop(post(KEY, D, (7, 8), NOW, capabilities), 0)
    assert torn.pending == (1,)
    with pytest.raises(LocalProtocolError):
        end(land(torn, 1, NOW), Outcome.DONE, capabilities)


def test_nothing_lands_after_failed_and_nothing_ends_twice() -> None:
    flight = end(post(KEY, D, (7, 8), NOW, STRONG), Outcome.FAILED, STRONG)
    assert flight.over
    with pytest.raises(LocalProtocolError):
        land(flight, 0, NOW)
    with pytest.raises(LocalProtocolError):
        end(flight, Outcome.FAILED, STRONG)


def test_after_unknown_bytes_may_land_until_the_bound() -> None:
    flight = end(post(KEY, D, (7, 8), NOW, BOUNDED), Outcome.UNKNOWN, BOUNDED)
    assert not flight.over
    flight = land(flight, 0, Instant(110))
    with pytest.raises(LocalProtocolError, match="bound"):
        land(flight, 1, Instant(111))


def test_a_piece_lands_once() -> None:
    with pytest.raises(LocalProtocolError):
        land(land(post(KEY, D, (7, 8), NOW, STRONG), 0, NOW), 0, NOW)


def test_dropping_what_is_over_tears_nothing() -> None:
    whole = land(post(KEY, D, (7,), NOW, STRONG), 0, NOW)
    assert drop(whole) == whole


def test_bytes_reach_a_successor_only_where_declared() -> None:
    successor = evolve(STRONG, reaches_successor=True)
    fenced = evolve(STRONG, reaches_successor=False)
    assert standing(D, (D, P), successor) == D
    assert standing(D, (D2, P), successor) == D2
    assert standing(D, (D2, P), fenced) is None
    assert standing(D, (P, worker("d", 1, rank=1)), successor) is None


# -- all of them


def test_the_life_of_a_write() -> None:
    state, events = run(
        posted(), Land(KEY, 1, NOW), Land(KEY, 0, NOW), End(KEY, Outcome.DONE), Arrive(0)
    )
    assert events == (
        Landed(KEY, D, D, 8),
        Landed(KEY, D, D, 7),
        Ended(KEY, Outcome.DONE),
        Noticed(KEY, D),
    )
    assert state == run(Writes(STRONG), Start(D), Start(P))[0]
    assert hash(state) == hash(run(Writes(STRONG), Start(D), Start(P))[0])


def test_a_part_in_flight_is_not_posted_again() -> None:
    with pytest.raises(LocalProtocolError, match="R10"):
        apply(posted(), Post(KEY, D, (1,), NOW))


def test_no_arrival_without_every_piece() -> None:
    state, _ = run(posted(WEAK), Land(KEY, 0, NOW), End(KEY, Outcome.DONE))
    assert state.arrivals == ()
    state, _ = run(posted(), Land(KEY, 0, NOW), End(KEY, Outcome.UNKNOWN), Drop(KEY))
    assert state.arrivals == ()
    assert state.flights == ()


def test_a_late_landing_completes_an_unknown_write() -> None:
    state, events = run(
        posted(), Land(KEY, 0, NOW), End(KEY, Outcome.UNKNOWN), Land(KEY, 1, NOW), Arrive(0)
    )
    assert events[-1] == Noticed(KEY, D)
    assert state.flights == ()


def test_a_dead_writer_is_told_nothing_but_its_bytes_land() -> None:
    state, _ = run(posted(), Land(KEY, 0, NOW), Crash(P, NOW))
    with pytest.raises(LocalProtocolError, match="dead"):
        apply(state, End(KEY, Outcome.UNKNOWN))
    with pytest.raises(LocalProtocolError, match="dead"):
        apply(state, Post(FlightKey(P, attempt(), 1), D, (1,), NOW))
    state, events = run(state, Land(KEY, 1, NOW))
    assert events == (Landed(KEY, D, D, 8),)
    assert state.flights == ()
    assert state.arrivals == ()


def test_after_a_death_the_death_bound_counts() -> None:
    state, _ = run(posted(BOUNDED), Crash(P, Instant(102)))
    with pytest.raises(LocalProtocolError, match="bound"):
        apply(state, Land(KEY, 0, Instant(106)))
    assert apply(state, Land(KEY, 0, Instant(105)))[1]
    state, _ = run(posted(BOUNDED), Crash(P, Instant(109)))
    with pytest.raises(LocalProtocolError, match="bound"):
        apply(state, Land(KEY, 0, Instant(111)))


def test_bytes_for_a_dead_target_reach_its_successor() -> None:
    state, _ = run(posted(), Crash(D, NOW))
    nobody, events = run(state, Land(KEY, 0, NOW))
    assert events == ()
    assert nobody.flight(KEY).torn
    state, events = run(state, Start(D2), Land(KEY, 0, NOW), Land(KEY, 1, NOW))
    assert events == (Landed(KEY, D, D2, 7), Landed(KEY, D, D2, 8))
    assert state.arrivals == ()


def test_one_worker_at_a_time_in_a_place() -> None:
    with pytest.raises(LocalProtocolError):
        apply(posted(), Start(D2))
    with pytest.raises(LocalProtocolError):
        apply(posted(), Crash(D2))


def test_arrivals_are_lost_and_repeated() -> None:
    state, _ = run(posted(), Land(KEY, 0, NOW), Land(KEY, 1, NOW))
    assert run(state, LoseArrival(0))[0].arrivals == ()
    _, events = run(state, RepeatArrival(0), Arrive(0), Arrive(0))
    assert events == (Noticed(KEY, D), Noticed(KEY, D))
    with pytest.raises(LocalProtocolError):
        apply(state, Arrive(1))
    assert run(state, Crash(D))[0].arrivals == ()


# -- choices

BUDGETS = FaultPlan(
    0,
    tuple(
        FaultRule(fault, budget=1)
        for fault in (
            Fault.CRASH,
            Fault.WRITE_FAILURE,
            Fault.UNKNOWN_OUTCOME,
            Fault.ARRIVAL_LOSS,
            Fault.ARRIVAL_DUPLICATION,
        )
    ),
)


def test_without_faults_pieces_land_and_then_it_is_done() -> None:
    assert enabled(posted()) == (Land(KEY, 0), Land(KEY, 1))
    assert enabled(posted(WEAK)) == (Land(KEY, 0), Land(KEY, 1), End(KEY, Outcome.DONE))
    state, _ = run(posted(), Land(KEY, 0, NOW), Land(KEY, 1, NOW))
    assert enabled(state) == (End(KEY, Outcome.DONE), Arrive(0))


def test_over_a_cut_path_nothing_lands_unless_memory_is_shared() -> None:
    state = posted()
    unknown = End(KEY, Outcome.UNKNOWN)
    assert enabled(state, cuts=(("p/0", "d/0"),)) == (unknown,)
    assert enabled(state, cuts=(("d/0", "p/0"),)) == (Land(KEY, 0), Land(KEY, 1), unknown)
    whole, _ = run(state, Land(KEY, 0, NOW), Land(KEY, 1, NOW))
    assert enabled(whole, cuts=(("d/0", "p/0"),)) == (unknown, Arrive(0))
    shared = evolve(STRONG, shared_memory=True)
    assert enabled(posted(shared), cuts=(("p/0", "d/0"),)) == (Land(KEY, 0), Land(KEY, 1))


def test_after_the_bound_nothing_lands() -> None:
    late = enabled(posted(BOUNDED), now=Instant(111))
    assert late == (Drop(KEY), End(KEY, Outcome.UNKNOWN))
    assert Land(KEY, 0, Instant(110)) in enabled(posted(BOUNDED), now=Instant(110))


def test_a_dead_writers_bytes_may_land_or_not() -> None:
    state, _ = run(posted(), Crash(P))
    assert enabled(state) == (Land(KEY, 0), Land(KEY, 1), Drop(KEY))


def test_faults_are_choices_while_the_budget_lasts() -> None:
    actions = enabled(posted(), BUDGETS)
    assert actions == (
        Land(KEY, 0),
        Land(KEY, 1),
        End(KEY, Outcome.FAILED),
        End(KEY, Outcome.UNKNOWN),
        Crash(D),
        Crash(P),
    )
    spent = Chance()
    for fault in Fault:
        spent = spend(spent, fault)
    assert enabled(posted(), BUDGETS, spent) == (Land(KEY, 0), Land(KEY, 1))


@given(st.data(), st.sampled_from([STRONG, WEAK, BOUNDED]))
def test_every_run_keeps_the_promises(data: st.DataObject, capabilities: Capabilities) -> None:
    """One outcome per living writer; DONE, arrivals and landings only when they are true."""
    keys = [FlightKey(P, attempt(), part) for part in range(2)]
    state, chance = posted(capabilities, pieces=()), Chance()
    state, _ = run(state, End(KEY, Outcome.DONE))
    for number, key in enumerate(keys):
        state, _ = run(state, Post(key, D, (2 * number, 2 * number + 1), NOW))
    landed: dict[FlightKey, set[int]] = {key: set() for key in keys}
    told: dict[FlightKey, list[Outcome]] = {key: [] for key in keys}
    crashed = False
    while choices := enabled(state, BUDGETS, chance, NOW):
        action = data.draw(st.sampled_from(choices))
        fault = cost(action)
        chance = chance if fault is None else spend(chance, fault)
        crashed = crashed or isinstance(action, Crash)
        state, events = apply(state, action)
        for event in events:
            match event:
                case Landed(key=key):
                    assert Outcome.FAILED not in told[key]
                    landed[key].add(event.piece)
                case Ended(key=key):
                    told[key].append(event.outcome)
                    strong_done = event.outcome is Outcome.DONE and capabilities.done_means_visible
                    assert not strong_done or len(landed[key]) == 2
                case Noticed(key=key):
                    assert len(landed[key]) == 2
    assert state.flights == ()
    assert all(len(outcomes) <= 1 for outcomes in told.values())
    if P in state.alive:
        assert all(len(outcomes) == 1 for outcomes in told.values())
    if not crashed:
        for key in keys:
            assert told[key] != [Outcome.DONE] or len(landed[key]) == 2
