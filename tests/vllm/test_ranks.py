"""Engines of several ranks: what the scheduler half says to each, and what it makes of answers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

pytest.importorskip("vllm")

from attrs import evolve
from tests.vllm.harness import BLOCK, Engine, ScriptedBridge, prefill, remote
from vllm.v1.request import RequestStatus

from pushkv.core.effects import BlocksReleased, NotDelivered, SourceReleased
from pushkv.core.events import Arrived, Cancelled, Computed, EngineEvent, Offered
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason
from pushkv.rank_plan import Ranks
from pushkv_vllm.channel import Endpoint, StepMetadata, StepReports

pytestmark = pytest.mark.vllm
T = TransferId("t1")


class RankedEngine(Engine):
    """Two ranks of a model with two heads, each in a process of its own."""

    def __init__(self, **more: Any) -> None:
        super().__init__(direct=False, **more)
        endpoint = self.worker.get_handshake_metadata()
        assert isinstance(endpoint, Endpoint)
        first = evolve(endpoint, heads=(2,))
        self.half.shape = evolve(self.half.shape, ranks=Ranks(2))
        endpoints = {(0, 1): evolve(first, port=first.port + 1), (0, 0): first}
        self.connector.set_xfer_handshake_metadata_pp_aware(endpoints)
        self.ranks = [ScriptedBridge(), ScriptedBridge()]

    def carry(self) -> StepMetadata:
        """One step's way to both ranks and back, over process borders."""
        metadata = pickle.loads(pickle.dumps(self.scheduler.schedule().kv_connector_metadata))
        assert isinstance(metadata, StepMetadata)
        for rank, event in metadata.said:
            self.ranks[rank].submit(event)
        told = [
            StepReports(tuple((rank, each) for each in bridge.take()), metadata.number)
            for rank, bridge in enumerate(self.ranks)
        ]
        self.half.step_output(pickle.loads(pickle.dumps(told[0].aggregate(told[1]))))
        return metadata

    def of(self, kind: type[EngineEvent]) -> list[list[Any]]:
        return [bridge.of(kind) for bridge in self.ranks]


def test_each_rank_registers_with_the_ranks_that_serve_it() -> None:
    engine = RankedEngine()
    engine.add("r", 3 * BLOCK, remote(tp_size=2, remote_engine_id="p"))
    engine.carry()
    offers = [each for (each,) in engine.of(Offered)]
    assert [[(p.port, p.rank, p.engine) for p in each.producers] for each in offers] == [
        [(4_711, 0, "p")],
        [(4_712, 1, "p")],
    ]
    assert [each.served for each in offers] == [((0,),), ((1,),)]
    assert len({each.attempt for each in offers}) == 1
    assert offers[0].blocks == offers[1].blocks


def test_a_request_runs_when_every_rank_has_its_part() -> None:
    engine = RankedEngine()
    engine.add("r", 3 * BLOCK, remote())
    engine.carry()
    (first,), (second,) = engine.of(Offered)
    assert first.producers == second.producers
    assert first.served == second.served == ((0, 1),)
    engine.ranks[0].deliver(first)
    assert not engine.carry().finished
    assert not engine.carry().finished
    engine.ranks[1].deliver(second)
    engine.carry()
    assert engine.carry().finished == {"r"}
    assert engine.half.destinations.held == 0


def test_the_first_rank_that_fails_ends_it_and_blocks_wait_for_the_last() -> None:
    engine = RankedEngine()
    engine.add("r", 3 * BLOCK, remote())
    engine.carry()
    (first,), (second,) = engine.of(Offered)
    engine.ranks[1].fail(second)
    engine.ranks[1].release(second)
    engine.carry()
    assert engine.connector.has_pending_push_work(), "the sibling must hear of it"
    metadata = engine.carry()
    assert metadata.failed == {"r"}
    assert engine.of(Cancelled) == [[Cancelled(T, Reason.SIBLING)], []]
    assert engine.half.destinations.held == 3
    engine.ranks[0].report(NotDelivered(T, first.attempt, Reason.SIBLING, False))
    engine.ranks[0].report(BlocksReleased(T, first.attempt))
    engine.carry()
    assert engine.half.destinations.held == 0


def test_a_source_is_kept_until_no_rank_needs_it() -> None:
    engine = RankedEngine()
    request = engine.add("r", 3 * BLOCK, prefill())
    engine.carry()
    assert [len(each) for each in engine.of(Arrived)] == [1, 1]
    request.num_computed_tokens = 3 * BLOCK
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    _, response = engine.connector.request_finished(request, [1, 2, 3])
    assert (response["tp_size"], response["pp_size"]) == (2, 1)
    engine.carry()
    assert [told[-1].final for told in engine.of(Computed)] == [True, True]
    for rank in (1, 0):
        assert engine.half.prefills.pins.held == 3
        engine.ranks[rank].report(SourceReleased(T, None))
        engine.carry()
    assert engine.half.prefills.pins.held == 0


@pytest.mark.parametrize(
    "sizes", [{"tp_size": 3}, {"tp_size": 0}, {"tp_size": 65}, {"pp_size": "1"}, {"dcp_size": 2}]
)
def test_impossible_ranks_cost_the_request_its_transfer(sizes: dict[str, Any]) -> None:
    engine = RankedEngine()
    engine.add("r", 3 * BLOCK, remote(**sizes))
    engine.carry()
    assert engine.of(Offered) == [[], []]
    assert engine.half.counts["bad_kv_transfer_params"] == 1


def test_one_rank_is_served_by_all_of_a_larger_producer() -> None:
    engine = Engine()
    engine.add("r", 3 * BLOCK, remote(tp_size=1, pp_size=2))
    engine.step()
    assert [each.port for each in engine.offered.producers] == [4_711, 4_712]
    assert [each.rank for each in engine.offered.producers] == [0, 1]
    engine.bridge.deliver(engine.offered)
