"""Messages in flight: what each kind of channel may do to them, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.errors import LocalProtocolError
from pushkv.core.ids import FOREVER, Duration, Instant
from pushkv.model.faults import NO_FAULTS, Chance, Fault, FaultPlan, FaultRule, spend
from pushkv.model.network import (
    Action,
    Cut,
    Delay,
    Deliver,
    Delivered,
    Duplicate,
    Event,
    Heal,
    Lose,
    Lost,
    Network,
    Reset,
    Send,
    apply,
    connect,
    cost,
    disconnect,
    due,
    enabled,
    next_due,
    submit,
)

ENDS = ("p", "d")


def network(*, ordered: bool = True, messages: int = 0) -> Network:
    made = connect(connect(Network(), "p", "d", ordered=ordered), "d", "p", ordered=ordered)
    for number in range(messages):
        made, _ = apply(made, Send("p", "d", number))
    return made


def run(state: Network, *actions: Action) -> tuple[Network, tuple[Event, ...]]:
    events: tuple[Event, ...] = ()
    for action in actions:
        state, more = apply(state, action)
        events += more
    return state, events


def in_flight(state: Network) -> list[object]:
    return [packet.payload for packet in state.channel("p", "d").packets]


def test_states_are_hashable_values() -> None:
    assert hash(network(messages=3)) == hash(network(messages=3))
    assert network(messages=3) == network(messages=3) != network(messages=2)


def test_an_ordered_channel_delivers_in_order() -> None:
    state, events = run(network(messages=3), *[Deliver(*ENDS)] * 3)
    assert events == tuple(Delivered(*ENDS, number) for number in range(3))
    assert in_flight(state) == []


def test_an_unordered_channel_delivers_in_any_order() -> None:
    _, events = run(network(ordered=False, messages=3), Deliver(*ENDS, 2), Deliver(*ENDS, 0))
    assert events == (Delivered(*ENDS, 2), Delivered(*ENDS, 0))


@pytest.mark.parametrize(
    "action", [Deliver(*ENDS, 1), Duplicate(*ENDS, 0), Deliver(*ENDS, 3), Lose(*ENDS, -1)]
)
def test_an_ordered_channel_refuses(action: Action) -> None:
    with pytest.raises(LocalProtocolError):
        apply(network(messages=3), action)


def test_losing_on_an_ordered_channel_ends_it() -> None:
    state, events = run(network(messages=3), Lose(*ENDS, 1), Send(*ENDS, "later"))
    assert events == (Lost(*ENDS, 1), Lost(*ENDS, 2), Lost(*ENDS, "later"))
    assert in_flight(state) == [0]
    state, events = run(state, Deliver(*ENDS))
    assert events == (Delivered(*ENDS, 0),)


def test_losing_on_an_unordered_channel_loses_one() -> None:
    state, events = run(network(ordered=False, messages=3), Lose(*ENDS, 1))
    assert events == (Lost(*ENDS, 1),)
    assert in_flight(state) == [0, 2]


def test_a_duplicate_arrives_twice() -> None:
    state, _ = run(network(ordered=False, messages=2), Duplicate(*ENDS, 0))
    _, events = run(state, *[Deliver(*ENDS)] * 3)
    assert events == (Delivered(*ENDS, 0), Delivered(*ENDS, 1), Delivered(*ENDS, 0))


def test_a_reset_loses_all_and_ends() -> None:
    state, events = run(network(messages=2), Reset(*ENDS), Send(*ENDS, 9))
    assert events == tuple(Lost(*ENDS, number) for number in (0, 1, 9))
    state = connect(disconnect(state, *ENDS), *ENDS)
    _, events = run(state, Send(*ENDS, 10), Deliver(*ENDS))
    assert events == (Delivered(*ENDS, 10),)


def test_two_channels_between_two_ends_are_refused() -> None:
    with pytest.raises(LocalProtocolError):
        connect(network(), *ENDS)
    with pytest.raises(LocalProtocolError):
        apply(network(), Send("p", "nobody", 0))


def test_a_cut_holds_messages_until_it_heals() -> None:
    state, _ = run(network(messages=1), Cut(*ENDS))
    with pytest.raises(LocalProtocolError, match="cut"):
        apply(state, Deliver(*ENDS))
    assert next_due(state) == FOREVER
    assert due(state, FOREVER) is None
    assert not state.is_cut("d", "p")
    _, events = run(state, Heal(*ENDS), Deliver(*ENDS))
    assert events == (Delivered(*ENDS, 0),)


def test_a_cut_of_both_ways_cuts_both() -> None:
    state, _ = run(network(), Cut(*ENDS, both=True))
    assert state.is_cut("p", "d")
    assert state.is_cut("d", "p")
    assert run(state, Heal("d", "p"))[0].cuts == (("p", "d"),)
    assert run(state, Heal("d", "p", both=True))[0] == network()


def test_connections_share_a_path() -> None:
    state = connect(Network(), "p#1", "d#1", path=("p", "d"))
    state = connect(state, "p#2", "d#2", path=("p", "d"))
    state, _ = run(state, Send("p#1", "d#1", 1), Send("p#2", "d#2", 2), Cut("p", "d"))
    assert due(state, FOREVER) is None


def test_delay_on_an_ordered_channel_holds_up_the_rest() -> None:
    state, _ = run(network(messages=3), Delay(*ENDS, 1, Instant(7)))
    assert [packet.due for packet in state.channel(*ENDS).packets] == [0, 7, 7]
    state, _ = run(network(ordered=False, messages=3), Delay(*ENDS, 1, Instant(7)))
    assert [packet.due for packet in state.channel(*ENDS).packets] == [0, 7, 0]


def test_a_later_message_never_overtakes_on_an_ordered_channel() -> None:
    state, _ = run(network(), Send(*ENDS, "a", Instant(9)), Send(*ENDS, "b", Instant(3)))
    assert next_due(state) == 9
    assert due(state, Instant(8)) is None
    assert due(state, Instant(9)) == Deliver(*ENDS, 0)
    state, _ = apply(state, Deliver(*ENDS))
    assert next_due(state) == 9


def test_due_takes_the_earliest_first() -> None:
    state, _ = run(
        network(ordered=False), Send(*ENDS, "a", Instant(9)), Send(*ENDS, "b", Instant(3))
    )
    assert due(state, Instant(10)) == Deliver(*ENDS, 1)
    assert next_due(state) == 3


# -- choices

BUDGETS = FaultPlan(
    0,
    tuple(
        FaultRule(fault, budget=1)
        for fault in (Fault.LOSS, Fault.DUPLICATION, Fault.PARTITION, Fault.PARTITION_ONE_WAY)
    ),
)


def test_without_faults_only_deliveries_are_enabled() -> None:
    assert enabled(network(messages=2)) == (Deliver(*ENDS, 0),)
    unordered = network(ordered=False, messages=2)
    assert enabled(unordered) == (Deliver(*ENDS, 0), Deliver(*ENDS, 1))
    late, _ = run(network(), Send(*ENDS, 0, Instant(5)))
    assert enabled(late, now=Instant(4)) == ()
    assert enabled(late, now=Instant(5)) == (Deliver(*ENDS),)


def test_faults_are_enabled_while_the_budget_lasts() -> None:
    chance = Chance()
    actions = enabled(network(ordered=False, messages=1), BUDGETS, chance)
    assert actions == (
        Deliver(*ENDS),
        Lose(*ENDS),
        Duplicate(*ENDS),
        Cut("d", "p"),
        Cut("p", "d"),
        Cut("d", "p", both=True),
    )
    for action in actions:
        fault = cost(action)
        if fault is not None:
            chance = spend(chance, fault)
    assert enabled(network(ordered=False, messages=1), BUDGETS, spend(chance, Fault.LOSS)) == (
        Deliver(*ENDS),
    )


def test_a_cut_can_be_healed_and_is_not_cut_again() -> None:
    state, _ = run(network(messages=1), Cut(*ENDS))
    assert enabled(state, BUDGETS) == (
        Lose(*ENDS),
        Cut("d", "p"),
        Cut("d", "p", both=True),
        Heal(*ENDS),
    )


def test_equal_messages_are_one_choice() -> None:
    state, _ = run(network(ordered=False), Send(*ENDS, 1), Send(*ENDS, 1), Send(*ENDS, 2))
    assert enabled(state) == (Deliver(*ENDS, 0), Deliver(*ENDS, 2))


@given(st.data(), st.booleans(), st.integers(1, 5))
def test_whatever_is_enabled_is_possible_and_no_message_is_invented(
    data: st.DataObject, ordered: bool, messages: int
) -> None:
    state, chance = network(ordered=ordered, messages=messages), Chance()
    events: list[Event] = []
    duplicates = 0
    while choices := enabled(state, BUDGETS, chance):
        action = data.draw(st.sampled_from(choices))
        fault = cost(action)
        chance = chance if fault is None else spend(chance, fault)
        duplicates += isinstance(action, Duplicate)
        state, more = apply(state, action)
        events += more
    assert len(events) == messages + duplicates
    delivered = [event.payload for event in events if isinstance(event, Delivered)]
    assert set(delivered) <= set(range(messages))
    if ordered:
        assert delivered == list(range(len(delivered)))


# -- virtual time


def submitted(plan: FaultPlan, count: int, *, ordered: bool) -> tuple[Event, ...]:
    """All that becomes of `count` messages, sent a tick apart, in the order in which it shows."""
    state, chance = network(ordered=ordered), Chance()
    found: tuple[Event, ...] = ()
    for number in range(count):
        state, chance, events = submit(state, plan, chance, Send(*ENDS, number, Instant(number)))
        found += events
    while (now := next_due(state)) != FOREVER:
        action = due(state, now)
        assert action is not None
        state, events = apply(state, action)
        found += events
    return found


def payloads(events: tuple[Event, ...]) -> list[object]:
    return [event.payload for event in events if isinstance(event, Delivered)]


def test_submitted_messages_arrive_without_faults() -> None:
    for ordered in (True, False):
        assert payloads(submitted(NO_FAULTS, 5, ordered=ordered)) == list(range(5))


def test_scripted_loss() -> None:
    plan = FaultPlan(0, (FaultRule(Fault.LOSS, script=(2,)),))
    assert payloads(submitted(plan, 5, ordered=False)) == [0, 1, 3, 4]
    events = submitted(plan, 5, ordered=True)
    assert payloads(events) == [0, 1]
    assert {event.payload for event in events if isinstance(event, Lost)} == {2, 3, 4}


def test_scripted_duplication_and_reordering() -> None:
    plan = FaultPlan(0, (FaultRule(Fault.DUPLICATION, script=(1,), most=Duration(9)),))
    assert sorted(map(str, payloads(submitted(plan, 3, ordered=False)))) == ["0", "1", "1", "2"]
    assert payloads(submitted(plan, 3, ordered=True)) == [0, 1, 2]
    plan = FaultPlan(0, (FaultRule(Fault.REORDERING, script=(3,)),))
    reordered = payloads(submitted(plan, 4, ordered=False))
    assert reordered != [0, 1, 2, 3]
    assert sorted(map(str, reordered)) == ["0", "1", "2", "3"]
    assert payloads(submitted(plan, 4, ordered=True)) == [0, 1, 2, 3]


def test_scripted_delay() -> None:
    plan = FaultPlan(
        0, (FaultRule(Fault.DELAY, script=(0,), least=Duration(100), most=Duration(100)),)
    )
    assert payloads(submitted(plan, 3, ordered=False)) == [1, 2, 0]
    assert payloads(submitted(plan, 3, ordered=True)) == [0, 1, 2]


@given(st.integers(0, 2**64 - 1), st.booleans())
def test_the_same_plan_is_the_same_run(seed: int, ordered: bool) -> None:
    plan = FaultPlan(
        seed,
        tuple(
            FaultRule(fault, per_million=300_000, most=Duration(10))
            for fault in (Fault.LOSS, Fault.DUPLICATION, Fault.REORDERING, Fault.DELAY)
        ),
    )
    events = submitted(plan, 12, ordered=ordered)
    assert events == submitted(plan, 12, ordered=ordered)
    if ordered:
        assert payloads(events) == list(range(len(payloads(events))))
