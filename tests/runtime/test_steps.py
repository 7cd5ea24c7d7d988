"""KV that a running step computes: what waits for which layer, and what became of it as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    ProducerAddress,
    Report,
    SourceReleased,
    SourceYielded,
)
from pushkv.core.errors import TransportError
from pushkv.core.events import (
    Arrived,
    Cancelled,
    Computed,
    Offered,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
)
from pushkv.core.ids import AttemptId, EngineId, Incarnation, TransferId, Worker, seconds
from pushkv.runtime import Runtime, RuntimeConfig
from pushkv.runtime import steps as steps_module
from pushkv.runtime.steps import KEPT, Gate, Shares, Step, Steps
from pushkv.testing.reference_cache import ReferenceCache
from pushkv.transport import Completion, Permit, Write, WriteOutcome
from pushkv_memory import CAPABILITIES, MemoryFabric, MemoryTransport

from .node import QUICK, until

T = TransferId("t")
ATTEMPT = AttemptId(EngineId("d"), Incarnation(1), 0, 0, T, 0)
BLOCKS = (0, 1)
DONE, REFUSED, FAILED, UNKNOWN = (
    WriteOutcome.DONE,
    WriteOutcome.REFUSED,
    WriteOutcome.FAILED,
    WriteOutcome.UNKNOWN,
)


class End:
    """A runtime over the memory transport, and an engine of the test's own."""

    def __init__(self, fabric: MemoryFabric, name: str, budget_bytes: int) -> None:
        self.cache = ReferenceCache(layers=3, block_count=4)
        policy = evolve(QUICK, lease=seconds(30), waiting=seconds(30), transfer=seconds(30))
        config = RuntimeConfig(
            EngineId(name), self.cache.layout, policy=policy, write_budget_bytes=budget_bytes
        )
        self.runtime = Runtime(config, MemoryTransport(fabric))
        self.reports: list[Report] = []

    def region(self, layer: int) -> int:
        return self.cache.layout.groups[0].regions[layer].address

    def told(self, kind: type[Report]) -> bool:
        self.reports += self.runtime.bridge.take()
        return any(isinstance(each, kind) for each in self.reports)

    def shows(self, expected: list[bool]) -> bool:
        return self.landed() == expected

    def landed(self) -> list[bool]:
        """Of each layer, whether all of it has been written, with what the producer has there."""
        return [
            bool((layer[list(BLOCKS)] == 1 + at).all()) for at, layer in enumerate(self.cache.bytes)
        ]


class Pair:
    def __init__(self, *, visible: bool = True, budget_bytes: int = 1 << 20) -> None:
        fabric = MemoryFabric(capabilities=evolve(CAPABILITIES, done_means_visible=visible))
        self.p, self.d = (End(fabric, name, budget_bytes) for name in "pd")
        for end in (self.p, self.d):
            end.runtime.start()

    def begin(self, *, step: int = 1, tokens: int = 32) -> None:
        """A prefill whose step is running, and who wants it."""
        address = ProducerAddress(*self.p.runtime.address)
        self.p.runtime.bridge.submit(Arrived(T, b"digest"))
        self.p.runtime.bridge.submit(Computed(T, tokens, (BLOCKS,), False, step))
        self.d.runtime.bridge.submit(Offered(T, 0, (address,), (BLOCKS,), 0, 32, b"digest"))

    def compute(self, layer: int, *, step: int = 1) -> None:
        self.p.cache.bytes[layer, list(BLOCKS)] = 1 + layer
        self.p.runtime.steps[step].computed(self.p.region(layer))

    def end(self, *, step: int = 1) -> None:
        self.p.runtime.steps[step].end()
        self.p.runtime.bridge.submit(Computed(T, 32, (BLOCKS,), True))


@pytest.fixture(autouse=True)
def each_layer_is_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "SHARE_BYTES_LEAST", 1)


@pytest.fixture
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    for end in (found.d, found.p):
        assert end.runtime.stop(5)


def ordered(pair: Pair) -> bool:
    return pair.p.runtime._loop is not None and pair.p.runtime._loop._outbound.open_writes > 0


def test_a_layer_is_written_when_it_is_computed_and_no_other(pair: Pair) -> None:
    pair.begin()
    until(lambda: ordered(pair))
    for layer, expected in ((1, [False, True, False]), (0, [True, True, False])):
        assert not pair.d.landed()[layer]
        pair.compute(layer)
        until(partial(pair.d.shows, expected))
    pair.compute(2)
    until(lambda: all(pair.d.landed()))
    assert not pair.d.told(Delivered), "the producer has not said that its prefill is over"
    pair.end()
    until(lambda: pair.d.told(Delivered) and pair.d.told(BlocksReleased))
    until(lambda: pair.p.told(SourceReleased))


def test_where_done_is_not_visible_all_waits_for_the_end_of_the_step() -> None:
    pair = Pair(visible=False)
    pair.begin()
    until(lambda: ordered(pair))
    for layer in range(3):
        pair.compute(layer)
    pair.p.runtime.bridge.wait(0.05)
    assert pair.d.landed() == [False] * 3
    pair.end()
    until(lambda: pair.d.told(Delivered))
    assert all(pair.d.landed())
    for end in (pair.d, pair.p):
        assert end.runtime.stop(5)


@pytest.mark.parametrize("how", ["cancelled", "aborted"])
def test_what_is_not_computed_is_withdrawn_at_once(pair: Pair, how: str) -> None:
    pair.begin()
    until(lambda: ordered(pair))
    pair.compute(0)
    until(lambda: pair.d.landed()[0])
    if how == "cancelled":
        pair.d.runtime.bridge.submit(Cancelled(T))
    else:
        pair.p.runtime.bridge.submit(PrefillAborted(T))
    until(lambda: pair.d.told(BlocksReleased))
    assert pair.d.landed() == [True, False, False]
    pair.p.runtime.bridge.submit(PrefillAborted(T))
    until(lambda: pair.p.told(SourceReleased))


def test_a_step_that_runs_when_its_prefill_is_preempted_is_written_and_yields(pair: Pair) -> None:
    pair.begin(tokens=16)
    until(lambda: ordered(pair))
    pair.p.runtime.bridge.submit(PrefillPreempted(T))
    pair.compute(0)
    until(lambda: bool((pair.d.cache.bytes[0, 0] == 1).all()))
    assert not pair.p.told(SourceYielded), "two layers are still to be read"
    pair.compute(1)
    pair.compute(2)
    pair.p.runtime.steps[1].end()
    until(lambda: pair.p.told(SourceYielded))
    pair.p.runtime.bridge.submit(PrefillResumed(T))
    pair.p.runtime.bridge.submit(Computed(T, 32, (BLOCKS,), False, 2))
    pair.end(step=2)
    until(lambda: pair.d.told(Delivered))


def test_a_late_registration_waits_for_the_step_that_runs(pair: Pair) -> None:
    pair.p.runtime.bridge.submit(Arrived(T, b"digest"))
    pair.p.runtime.bridge.submit(Computed(T, 16, (BLOCKS,), False, 1))
    pair.p.runtime.bridge.submit(Computed(T, 32, (BLOCKS,), False, 2))
    address = ProducerAddress(*pair.p.runtime.address)
    pair.d.runtime.bridge.submit(Offered(T, 0, (address,), (BLOCKS,), 0, 32, b"digest"))
    until(lambda: ordered(pair))
    pair.compute(2, step=1)
    pair.p.runtime.bridge.wait(0.05)
    assert pair.d.landed() == [False] * 3, "the second half of it is the next step's"
    pair.compute(2, step=2)
    until(lambda: pair.d.landed()[2])
    assert pair.d.landed() == [False, False, True]
    pair.compute(0, step=2)
    pair.compute(1, step=2)
    pair.end(step=2)
    until(lambda: pair.d.told(Delivered))
    assert all(pair.d.landed())


def test_what_is_not_computed_keeps_nothing_else_waiting() -> None:
    pair = Pair(budget_bytes=1)
    pair.begin()
    until(lambda: ordered(pair))
    other, address = TransferId("other"), ProducerAddress(*pair.p.runtime.address)
    pair.p.runtime.bridge.submit(Arrived(other, b"digest"))
    pair.p.runtime.bridge.submit(Computed(other, 32, ((2, 3),), True))
    pair.d.runtime.bridge.submit(Offered(other, 1, (address,), ((2, 3),), 0, 32, b"digest"))
    until(lambda: pair.d.told(Delivered))
    assert not any(pair.d.landed())
    for end in (pair.d, pair.p):
        assert end.runtime.stop(5)


# -- the parts of it


def test_steps_end_when_many_have_followed() -> None:
    steps = Steps()
    first = steps[1]
    assert steps[1] is first
    running = [steps[number] for number in range(1, KEPT + 1)]
    assert not any(each.is_over for each in running)
    steps[KEPT + 1].computed(7)
    assert [each.is_over for each in running] == [True] + [False] * (KEPT - 1)
    assert steps[1].is_over, "nobody waits for it, either"


def test_a_device_says_when_a_layer_exists() -> None:
    step, done = Step(), list[int]()
    step.computed(7, lambda: bool(done))
    step.computed(8)
    assert step.exists(()) is None
    assert step.exists((7, 9)) is None
    seven, eight, both = step.exists((7,)), step.exists((8,)), step.exists((7, 8))
    assert seven
    assert eight
    assert both
    assert (seven(), eight(), both()) == (False, True, False)
    done.append(1)
    assert (seven(), both()) == (True, True)
    step.end(lambda: len(done) == 2)
    every = step.exists((9,))
    assert every
    assert (every(), step.is_over) == (False, False)
    done.append(2)
    assert (every(), step.is_over) == (True, True)


def test_a_step_rings_for_what_is_awaited_and_for_nothing_else() -> None:
    rings = list[int]()
    step = Step(lambda: rings.append(1))
    step.computed(1)
    step.await_((2, 3))
    for region in (2, 4):
        step.computed(region)
    assert not rings, "of (2, 3) half is there"
    step.computed(3)
    assert len(rings) == 1
    step.end()
    assert len(rings) == 2
    nobody = Step(lambda: rings.append(1))
    nobody.computed(1)
    nobody.end()
    assert len(rings) == 2


def write() -> Write:
    rows = np.array([[100 * at, 10] for at in range(6)], dtype=np.uint64)
    return Write(Worker(EngineId("d"), Incarnation(1), 0), ATTEMPT, 3, 7, rows, rows + 1, Permit())


def test_shares_are_the_rows_of_a_write_and_each_waits_for_its_region() -> None:
    step, whole = Step(), write()
    shares = list(Shares().of(whole, Gate(step), (11, 22, 33)))
    assert len({each.write.part for each in shares}) == 3
    for name in ("source", "destination"):
        rows = np.concatenate([getattr(each.write, name) for each in shares])
        assert (rows == getattr(whole, name)).all()
    step.computed(22)
    assert [each.due() is not None for each in shares] == [False, True, False]
    (alone,) = Shares().of(whole, Gate(step), ())
    assert alone.write.part == 3
    assert alone.due() is None
    step.end()
    due = alone.due()
    assert due is not None
    assert due.ready is None, "it exists: its transport has nothing to hold back"


@pytest.mark.parametrize(
    ("least_bytes", "expected"),
    [(1, [1, 1, 1]), (20, [1, 1, 1]), (21, [2, 1]), (40, [2, 1]), (60, [3]), (10_000, [3])],
)
def test_small_layers_leave_together(
    monkeypatch: pytest.MonkeyPatch, least_bytes: int, expected: list[int]
) -> None:
    monkeypatch.setattr(steps_module, "SHARE_BYTES_LEAST", least_bytes)
    shares = list(Shares().of(write(), Gate(Step()), (11, 22, 33)))
    assert [len(each.regions) for each in shares] == expected
    assert sum((each.regions for each in shares), ()) == (11, 22, 33)
    assert [len(each.write.source) for each in shares] == [2 * count for count in expected]


def test_what_its_device_has_not_done_is_for_the_transport_to_hold_back() -> None:
    step, done = Step(), list[int]()
    gate = Gate(step)
    (share,) = Shares().of(write(), gate, ())
    step.end(lambda: bool(done))
    due = share.due()
    assert due is not None
    assert due.ready is not None
    assert not due.ready()
    done.append(1)
    assert due.ready()
    gate.is_withdrawn = True
    with pytest.raises(TransportError, match="withdrawn"):
        due.ready()


@given(
    st.permutations(range(3)),
    st.lists(st.sampled_from(list(WriteOutcome)), min_size=3, max_size=3),
    st.booleans(),
)
def test_a_part_is_over_once_with_the_worst_that_became_of_it(
    order: list[int], outcomes: list[WriteOutcome], idle: bool
) -> None:
    shares = Shares()
    parts = [each.write.part for each in shares.of(write(), Gate(Step()), (11, 22, 33))]
    told = []
    for at in order:
        outcome = outcomes[at]
        cause = "" if outcome is DONE else outcome.value
        told.append(shares.whole(Completion(ATTEMPT, parts[at], outcome, 20, cause, idle)))
    assert told[:2] == [None, None]
    last = told[2]
    assert last is not None
    assert (last.attempt, last.part, last.source_idle) == (ATTEMPT, 3, idle)
    if UNKNOWN in outcomes:
        assert last.outcome is UNKNOWN
    elif set(outcomes) == {DONE}:
        assert (last.outcome, last.length_bytes, last.cause) == (DONE, 60, "")
    elif set(outcomes) == {REFUSED}:
        assert last.outcome is REFUSED
    else:
        assert last.outcome is FAILED
        assert last.cause
    assert shares.whole(Completion(ATTEMPT, 3, DONE)) == Completion(ATTEMPT, 3, DONE)
