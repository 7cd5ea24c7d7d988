"""Every fault does what it says, to real bytes, and does it again under the same seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.capabilities import Capabilities
from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import FOREVER, Duration
from pushkv.model.faults import Fault, FaultRule
from pushkv.transport import Region
from pushkv_memory import (
    Crashed,
    Ended,
    Landed,
    MemoryFabric,
    MemoryTransport,
    Noticed,
    PathCut,
    PathHealed,
)

from .two_engines import (
    BLOCK_BYTES,
    REACHING,
    SIZE_BYTES,
    STRONG,
    WEAK,
    Bench,
    Engine,
    always,
    worker,
)

ALL_BYTES = 4 * BLOCK_BYTES
SLOW = always(Fault.DELAY, 100, 200)


# -- one fault at a time


def test_delay() -> None:
    bench = Bench(SLOW)
    bench.post()
    bench.advance(99)
    assert bench.landed() == []
    bench.advance(101)
    assert bench.whole()
    assert bench.p.outcomes == ["done"]


def test_reordering_lands_pieces_in_another_order() -> None:
    bench = Bench(always(Fault.REORDERING), pieces=8)
    bench.post(source=(0, 1), destination=(0, 1))
    offsets = [offset for _, offset, _ in bench.landed()]
    assert offsets != sorted(offsets)
    assert bench.d.bytes(0, 128) == bench.p.bytes(0, 128)


def test_write_failure_lands_a_part_and_then_nothing() -> None:
    found = set()
    for seed in range(30):
        bench = Bench(always(Fault.WRITE_FAILURE), SLOW, seed=seed)
        bench.post()
        bench.drain()
        assert bench.p.outcomes == ["failed"]
        assert bench.p.completions[0].cause
        assert bench.d.noticed == []
        assert bench.fabric.in_flight == 0
        assert not bench.whole()
        found.add(bench.landed_bytes)
    assert found == {0, 64, 128, 192}


def test_refused_posts_nothing() -> None:
    bench = Bench(FaultRule(Fault.REFUSED, script=(1,)))
    for part in range(3):
        bench.post(part)
    assert bench.p.outcomes == ["done", "refused", "done"]
    assert {part for part, _, _ in bench.landed()} == {0, 2}


def test_an_unknown_write_may_never_land() -> None:
    bench = Bench(always(Fault.UNKNOWN_OUTCOME))
    bench.post()
    assert bench.p.outcomes == ["unknown"]
    bench.drain()
    assert bench.landed_bytes < ALL_BYTES
    assert bench.d.noticed == []
    assert bench.fabric.in_flight == 0


def test_an_unknown_write_may_land_later_but_within_the_bound() -> None:
    bench = Bench(always(Fault.UNKNOWN_OUTCOME, 900, 5000))
    posted = bench.clock.now
    bench.post()
    assert bench.p.outcomes == ["unknown"]
    assert bench.p.completions[0].source_idle
    before = bench.landed_bytes
    source = bench.p.bytes()
    bench.p.fill(b"x" * SIZE_BYTES)
    bench.advance(899)
    assert bench.landed_bytes == before < ALL_BYTES
    bench.drain()
    bench.p.fill(source)
    assert bench.whole()
    assert bench.clock.now <= posted + 1000
    assert bench.p.outcomes == ["unknown"]
    assert bench.d.noticed == [0]


def test_a_busy_source_is_read_when_the_bytes_land() -> None:
    bench = Bench(always(Fault.UNKNOWN_OUTCOME, 500, 500), always(Fault.SOURCE_BUSY))
    bench.post()
    assert bench.p.outcomes == ["unknown"]
    assert not bench.p.completions[0].source_idle
    bench.p.fill(b"x" * SIZE_BYTES)
    bench.drain()
    assert b"x" * BLOCK_BYTES in bench.d.bytes()


def test_arrivals_are_lost_and_repeated() -> None:
    bench = Bench(FaultRule(Fault.ARRIVAL_LOSS, script=(0,)))
    bench.post(0)
    bench.post(1)
    assert bench.whole()
    assert bench.p.outcomes == ["done", "done"]
    assert bench.d.noticed == [1]
    bench = Bench(FaultRule(Fault.ARRIVAL_DUPLICATION, script=(0,)))
    bench.post(0)
    bench.post(1)
    assert bench.d.noticed == [0, 0, 1]


# -- crashes


def test_a_crash_in_mid_write_leaves_a_torn_destination_and_tells_nobody() -> None:
    bench = Bench(SLOW)
    bench.post()
    bench.clock.now = bench.fabric.next_due()
    bench.fabric.advance()
    assert 0 < bench.landed_bytes < ALL_BYTES
    bench.fabric.crash(bench.p.me, bytes_land=False)
    torn = bench.d.bytes()
    bench.drain()
    assert bench.d.bytes() == torn
    assert not bench.whole()
    assert any(torn)
    assert bench.p.take() == ()
    assert bench.d.noticed == []
    assert bench.p.woken == 0
    assert bench.fabric.in_flight == 0


def test_a_dead_writers_bytes_land_within_the_death_bound() -> None:
    bench = Bench(always(Fault.DELAY, 100, 900), pieces=64)
    bench.p.fill(b"s" * SIZE_BYTES)
    bench.post()
    bench.advance(150)
    bench.fabric.crash(bench.p.me)
    bench.p.fill(b"x" * SIZE_BYTES)
    bench.drain()
    at = [entry.at for entry in bench.fabric.history if isinstance(entry, Landed)]
    died = next(entry.at for entry in bench.fabric.history if isinstance(entry, Crashed))
    assert died < max(at) <= died + 300
    assert bench.landed_bytes < ALL_BYTES
    assert bench.d.bytes().count(b"s") == bench.landed_bytes
    assert b"x" not in bench.d.bytes()
    assert bench.p.take() == ()
    assert bench.d.noticed == []
    assert bench.fabric.in_flight == 0


def test_the_fault_crash_kills_the_writer() -> None:
    bench = Bench(FaultRule(Fault.CRASH, script=(1,)))
    bench.post(0)
    bench.post(1)
    bench.post(2)
    assert bench.p.take() == ()
    assert {part for part, _, _ in bench.landed()} <= {0, 1}
    assert sum(length for part, _, length in bench.landed() if part == 1) < ALL_BYTES
    assert [type(entry) for entry in bench.fabric.history].count(Crashed) == 1


@pytest.mark.parametrize("reaches", [True, False])
def test_a_restart_on_the_same_addresses(reaches: bool) -> None:
    bench = Bench(SLOW, capabilities=REACHING if reaches else STRONG)
    bench.post()
    bench.fabric.crash(bench.d.me)
    successor = Engine(bench.fabric, worker("d", 2), bench.clock, bench.d.buffer)
    successor.transport.look_for_arrivals(True)
    bench.drain()
    assert bench.whole() is reaches
    assert {e.into for e in bench.fabric.history if isinstance(e, Landed)} <= {successor.me}
    assert bench.d.take() == ()
    assert successor.noticed == []
    assert bench.p.outcomes == (["done"] if reaches else ["unknown"])


def test_bytes_reach_only_what_a_successor_registered() -> None:
    bench = Bench(SLOW, capabilities=REACHING)
    bench.post()
    bench.fabric.crash(bench.d.me)
    successor = MemoryTransport(bench.fabric)
    small = Region(bench.d.address, 8 * BLOCK_BYTES)
    successor.start(worker("d", 2), [small], bench.clock, lambda: None)
    bench.drain()
    assert {offset // BLOCK_BYTES for _, offset, _ in bench.landed()} == {6, 7}
    assert not any(bench.d.bytes(8 * BLOCK_BYTES))
    assert bench.p.outcomes == ["unknown"]


def test_a_dead_worker_learns_nothing_not_even_old_news() -> None:
    bench = Bench()
    bench.post()
    for engine in (bench.p, bench.d):
        bench.fabric.crash(engine.me)
        assert engine.take() == ()
        assert engine.transport.close(0)
    bench.post(1)
    assert bench.p.transport.close(0)
    assert {part for part, _, _ in bench.landed()} == {0}


def test_a_dead_writer_of_a_strong_transport_sends_no_arrival() -> None:
    for capabilities, arrivals in ((STRONG, []), (WEAK, [0])):
        bench = Bench(always(Fault.DELAY, 10, 10), capabilities=capabilities)
        bench.post()
        bench.advance(10)
        assert bench.whole()
        bench.fabric.crash(bench.p.me)
        bench.drain()
        assert bench.d.noticed == arrivals


def test_bytes_for_a_dead_worker_land_nowhere() -> None:
    bench = Bench(SLOW, capabilities=REACHING)
    bench.post(0)
    bench.fabric.crash(bench.d.me)
    bench.post(1)
    bench.drain()
    assert bench.landed() == []
    assert bench.p.outcomes == ["unknown", "unknown"]
    assert bench.p.completions[0].cause == "the target is gone"


def test_a_restarted_writer_writes_beside_its_predecessors_bytes() -> None:
    bench = Bench(SLOW)
    bench.post(0)
    bench.fabric.crash(bench.p.me)
    bench.p = Engine(bench.fabric, worker("p", 2), bench.clock, bench.p.buffer)
    bench.meet(bench.p, bench.d)
    bench.post(0)
    bench.drain()
    assert bench.landed_bytes == 2 * ALL_BYTES
    assert bench.p.outcomes == ["done"]
    assert bench.d.noticed == [0]


# -- partitions


def test_a_healed_partition_only_delays() -> None:
    bench = Bench()
    bench.fabric.partition(bench.p.me, bench.d.me)
    bench.post()
    bench.advance(400)
    assert bench.landed() == []
    assert bench.p.outcomes == []
    bench.fabric.heal()
    assert bench.p.outcomes == ["done"]
    assert bench.d.noticed == [0]
    assert bench.whole()
    bench.drain()
    assert bench.p.outcomes == ["done"]


def test_a_path_mended_in_time_is_not_held_against_a_slow_write() -> None:
    bench = Bench(always(Fault.DELAY, 100, 900), pieces=64)
    bench.post()
    bench.fabric.partition(bench.p.me, bench.d.me)
    bench.advance(300)
    assert bench.landed() == []
    bench.fabric.heal()
    assert 0 < bench.landed_bytes < ALL_BYTES
    bench.drain()
    assert bench.p.outcomes == ["done"]


def test_a_partition_that_lasts_is_unknown_and_may_land_on_healing() -> None:
    bench = Bench()
    bench.fabric.partition(bench.p.me, bench.d.me)
    bench.post()
    bench.advance(500)
    assert bench.p.outcomes == ["unknown"]
    assert bench.landed() == []
    bench.advance(400)
    bench.fabric.heal()
    assert bench.whole()
    assert bench.d.noticed == [0]
    assert bench.p.outcomes == ["unknown"]


def test_nothing_crosses_a_healed_path_after_the_bound() -> None:
    bench = Bench()
    bench.fabric.partition(bench.p.me, bench.d.me)
    bench.post()
    bench.drain()
    assert bench.fabric.in_flight == 0
    bench.fabric.heal()
    bench.drain()
    assert bench.landed() == []
    assert bench.p.outcomes == ["unknown"]


def test_a_path_that_is_never_mended_keeps_no_write_for_ever() -> None:
    bench = Bench()
    bench.fabric.partition(bench.p.me, bench.d.me)
    for part in range(5):
        bench.post(part)
    assert len(bench.fabric._held) >= 5
    bench.drain()
    assert bench.fabric._held == []


def test_without_a_bound_bytes_cross_whenever_the_path_is_mended() -> None:
    bench = Bench(capabilities=evolve(STRONG, write_bound=None))
    bench.fabric.partition(bench.p.me, bench.d.me)
    bench.post()
    bench.advance(10**12)
    assert bench.p.outcomes == ["unknown"]
    bench.fabric.heal()
    assert bench.whole()


def test_one_way_bytes_pass_but_the_answer_does_not() -> None:
    bench = Bench()
    bench.fabric.partition(bench.d.me, bench.p.me, both=False)
    bench.post()
    assert bench.whole()
    assert bench.d.noticed == [0]
    assert bench.p.outcomes == []
    bench.advance(500)
    assert bench.p.outcomes == ["unknown"]


def test_a_cut_stops_the_bytes_and_not_those_of_others() -> None:
    bench = Bench()
    other = Engine(bench.fabric, worker("p", rank=1), bench.clock)
    bench.meet(other, bench.d)
    bench.fabric.partition(bench.p.me, bench.d.me, both=False)
    bench.post(0)
    other.transport.post(evolve(bench.write(1), source=other.segments(range(4))))
    assert other.outcomes == ["done"]
    assert bench.p.outcomes == []
    assert {part for part, _, _ in bench.landed()} == {1}


def test_shared_memory_crosses_a_cut_network() -> None:
    bench = Bench(capabilities=evolve(STRONG, shared_memory=True))
    bench.fabric.partition(bench.p.me, bench.d.me)
    bench.post()
    assert bench.whole()
    assert bench.p.outcomes == ["done"]


@pytest.mark.parametrize(
    ("fault", "paths"),
    [
        (Fault.PARTITION, {("p/0", "d/0"), ("d/0", "p/0")}),
        (Fault.PARTITION_ONE_WAY, {("p/0", "d/0")}),
    ],
)
def test_partitions_by_fault_heal_by_themselves(fault: Fault, paths: set[tuple[str, str]]) -> None:
    bench = Bench(FaultRule(fault, script=(0,), least=Duration(1000), most=Duration(1000)))
    bench.post()
    history = bench.fabric.history
    assert {(e.source, e.target) for e in history if isinstance(e, PathCut)} == paths
    bench.drain()
    history = bench.fabric.history
    assert {(e.source, e.target) for e in history if isinstance(e, PathHealed)} == paths
    bench.post(1)
    assert bench.p.outcomes[-1] == "done"


def test_a_partition_without_a_length_lasts_until_healed() -> None:
    bench = Bench(FaultRule(Fault.PARTITION, script=(0,)))
    bench.post(0)
    bench.drain()
    bench.post(1)
    assert bench.p.outcomes == ["unknown"]
    bench.fabric.heal()
    assert bench.p.outcomes == ["unknown", "done"]


# -- reproducible

EVERYTHING = tuple(
    FaultRule(fault, 150_000, least=Duration(1), most=Duration(400))
    for fault in Fault
    if fault not in (Fault.LOSS, Fault.DUPLICATION, Fault.CRASH)
)


def story(seed: int, writes: int = 40) -> list[str]:
    """A run under every fault as text, with addresses counted from the engines' memory."""
    bench = Bench(*EVERYTHING, seed=seed)
    for part in range(writes):
        bench.post(part, source=(part % 60,), destination=((part * 7) % 60,))
        bench.advance(13)
    bench.drain()
    told = []
    for entry in bench.fabric.history:
        if isinstance(entry, Landed):
            entry = evolve(entry, address=entry.address - bench.d.address)  # noqa: PLW2901
        told.append(repr(entry))
    return [*told, *map(repr, bench.p.take()), *map(repr, bench.d.take())]


def test_the_same_seed_is_the_same_run() -> None:
    assert story(1) == story(1)
    assert story(1) != story(2)


def test_the_same_seed_is_the_same_run_in_every_process() -> None:
    code = "from tests.memory.test_faults import story; print('\\n'.join(story(1)))"
    root = Path(__file__).parents[2]
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] == "\n".join(story(1)) + "\n"


@given(st.integers(0, 2**64 - 1), st.sampled_from([STRONG, WEAK, REACHING]))
def test_every_run_keeps_the_promises(seed: int, capabilities: Capabilities) -> None:
    """One completion per post; DONE, arrivals and late bytes only as the capabilities say."""
    bench = Bench(*EVERYTHING, seed=seed, capabilities=capabilities)
    posted: dict[int, int] = {}
    for part in range(8):
        posted[part] = bench.clock.now
        bench.post(part)
        bench.advance(50)
    bench.drain()
    bench.fabric.heal()
    bench.drain()
    bench.p.take()
    assert sorted(each.part for each in bench.p.completions) == list(range(8))
    assert bench.fabric.in_flight == 0
    assert bench.fabric.next_due() == FOREVER
    landed = dict.fromkeys(range(8), 0)
    for entry in bench.fabric.history:
        match entry:
            case Landed():
                landed[entry.part] += entry.length_bytes
                assert entry.at <= posted[entry.part] + 1000
            case Noticed():
                assert landed[entry.part] == ALL_BYTES
            case Ended(outcome="done") if capabilities is not WEAK:
                assert landed[entry.part] == ALL_BYTES
            case Ended(outcome="refused"):
                assert landed[entry.part] == 0


# -- configuration


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"pieces": 0}, "pieces"),
        ({"timeout": -1}, "timeout"),
        ({"faults": [FaultRule(Fault.LOSS)]}, "faults"),
    ],
)
def test_nonsense_is_refused_by_name(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        MemoryFabric(**arguments)  # type: ignore[arg-type]
    assert raised.value.field == field


def test_history_is_bounded() -> None:
    fabric = MemoryFabric(history_most=3)
    workers = [worker(f"e{number}") for number in range(5)]
    for each in workers:
        Engine(fabric, each, lambda: 0)
        fabric.crash(each)
    assert [e.worker for e in fabric.history if isinstance(e, Crashed)] == workers[2:]
