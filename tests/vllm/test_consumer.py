"""The decode side against vLLM's real scheduler: what it is told, what becomes of its blocks."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.vllm.harness import BLOCK, Engine, remote
from vllm.v1.request import RequestStatus

from pushkv.core.events import Cancelled, Offered
from pushkv.core.messages import Reason

pytestmark = pytest.mark.vllm
WAITING = RequestStatus.WAITING_FOR_REMOTE_KVS


@pytest.fixture(params=["direct", "relay"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Both halves in one process, or in two."""
    return bool(request.param == "direct")


def waiting(direct: bool = True, **options: object) -> Engine:
    """An engine with request "a" of 100 tokens waiting for its KV."""
    engine = Engine(role="kv_consumer", direct=direct, **options)  # type: ignore[arg-type]
    engine.add("a", 100, remote(), max_tokens=3)
    engine.step()
    assert engine.status("a") is WAITING
    return engine


def test_blocks_are_offered_in_the_step_that_allocates_them(direct: bool) -> None:
    engine = waiting(direct)
    offered = engine.offered
    own = engine.scheduler.kv_cache_manager.get_block_ids("a")
    assert offered.blocks == (tuple(own[0]),)
    assert (offered.start, offered.end, len(offered.blocks[0])) == (0, 100, 7)
    assert (offered.producers[0].host, offered.producers[0].port) == ("10.0.0.1", 4_711)


def test_one_process_offers_before_the_step_leaves_the_scheduler() -> None:
    engine = Engine(role="kv_consumer")
    engine.add("a", 100, remote())
    metadata = engine.scheduler.schedule().kv_connector_metadata
    assert engine.offered.transfer == "t1"
    assert metadata.commands == ()


def test_a_delivered_request_decodes_without_a_prefill(direct: bool) -> None:
    engine = waiting(direct)
    engine.bridge.deliver(engine.offered)
    scheduled = []
    for _ in range(20):
        if engine.scheduler.has_requests():
            scheduled += list(engine.step().num_scheduled_tokens.values())
    assert engine.told == [("a", False)]
    assert scheduled == [1, 1, 1], "only the last prompt token and the outputs are computed"
    assert engine.finish_reasons == {"a": "length"}
    assert engine.used == 0


def test_blocks_stay_until_they_are_released_whatever_the_request_does(direct: bool) -> None:
    engine = waiting(direct)
    engine.bridge.deliver(engine.offered, release=False)
    engine.run()
    assert engine.finish_reasons == {"a": "length"}
    assert engine.used == 7
    engine.bridge.release(engine.offered)
    engine.add("b", 5)
    engine.run()
    assert engine.used == 0


def test_nothing_is_told_while_nothing_is_known(direct: bool) -> None:
    engine = waiting(direct)
    for _ in range(5):
        engine.step()
    assert engine.told == []
    assert engine.status("a") is WAITING


def test_late_duplicate_and_unknown_reports_reach_nobody(direct: bool) -> None:
    engine = waiting(direct)
    first = engine.offered
    engine.bridge.deliver(first)
    engine.bridge.deliver(first)
    engine.bridge.fail(first)
    while engine.status("a") is not RequestStatus.RUNNING:
        engine.step()
    engine.bridge.deliver(first)
    engine.bridge.fail(first, retry=True)
    engine.bridge.retry(first)
    stranger = Offered("nobody", 99, (), ((1,),), 0, 16, b"")  # type: ignore[arg-type]
    engine.bridge.deliver(stranger)
    engine.bridge.fail(stranger)
    other = Offered("nobody", first.attempt, (), ((1,),), 0, 16, b"")  # type: ignore[arg-type]
    engine.bridge.deliver(other)
    engine.run()
    engine.bridge.deliver(first)
    engine.add("b", 5)
    engine.run()
    assert engine.told == [("a", False)]
    assert engine.used == 0
    assert engine.half.ledger.counts["stale outcome"] >= 6


def test_failure_under_recompute_prefills_here_on_other_blocks(direct: bool) -> None:
    engine = waiting(direct, policy="recompute")
    offered = engine.offered
    engine.bridge.fail(offered, Reason.ABORTED)
    engine.step()
    while engine.status("a") is not RequestStatus.RUNNING:
        engine.step()
    fresh = engine.scheduler.kv_cache_manager.get_block_ids("a")[0]
    assert not set(fresh) & set(offered.blocks[0]), "the quarantined blocks were used again"
    engine.run()
    assert engine.told == [("a", True)]
    assert engine.finish_reasons == {"a": "length"}
    assert engine.used == 7
    engine.bridge.release(offered)
    engine.add("b", 5)
    engine.run()
    assert engine.used == 0
    assert engine.bridge.of(Cancelled) == []


def test_failure_under_fail_ends_that_request_alone(direct: bool) -> None:
    engine = waiting(direct, policy="fail")
    engine.add("b", 20, max_tokens=4)
    engine.bridge.fail(engine.offered, Reason.NEVER_ARRIVED)
    engine.run()
    assert engine.finish_reasons == {"a": "error", "b": "length"}
    assert engine.told == [("a", True)]
    assert engine.used == 7
    engine.bridge.release(engine.offered)
    engine.add("c", 5)
    engine.run()
    assert engine.used == 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("released_first", [False, True])
def test_a_retry_on_released_blocks_is_no_news_to_vllm(
    direct: bool, policy: str, released_first: bool
) -> None:
    engine = waiting(direct, policy=policy)
    first = engine.offered
    if released_first:
        engine.bridge.release(first)
    engine.bridge.fail(first, Reason.WRITE, retry=True)
    if not released_first:
        engine.bridge.release(first)
    for _ in range(5):
        engine.step()
    assert engine.bridge.of(Offered) == [first], "the backoff is not over"
    engine.bridge.retry(first)
    engine.step()
    engine.step()
    second = engine.offered
    assert (second.blocks, second.start, second.failures) == (first.blocks, first.start, 1)
    assert second.attempt > first.attempt
    assert engine.status("a") is WAITING
    engine.bridge.deliver(second)
    engine.run()
    assert engine.told == [("a", False)]
    assert engine.finish_reasons == {"a": "length"}
    assert engine.used == 0


def test_a_retry_while_the_old_blocks_are_exposed_takes_fresh_ones(direct: bool) -> None:
    engine = waiting(direct, policy="recompute")
    first = engine.offered
    engine.bridge.fail(first, Reason.LINK_LOST, retry=True)
    for _ in range(5):
        engine.step()
    assert engine.status("a") is WAITING
    assert engine.bridge.of(Offered) == [first]
    engine.bridge.retry(first)
    while engine.offered == first:
        engine.step()
    second = engine.offered
    assert second.attempt > first.attempt
    assert second.failures == 1
    assert not set(second.blocks[0]) & set(first.blocks[0])
    engine.bridge.release(first)
    engine.bridge.deliver(second)
    engine.run()
    assert engine.told == [("a", True), ("a", False)]
    assert engine.used == 0


def test_fresh_blocks_are_a_failure_under_fail(direct: bool) -> None:
    engine = waiting(direct, policy="fail")
    first = engine.offered
    engine.bridge.fail(first, Reason.LINK_LOST, retry=True)
    engine.step()
    engine.bridge.retry(first)
    engine.run()
    assert engine.finish_reasons == {"a": "error"}
    assert engine.told == [("a", True)]
    assert engine.offered.start == engine.offered.end, "the producer holds it for nobody"
    assert engine.used == 7
    engine.bridge.release(first)
    engine.add("b", 5)
    engine.run()
    assert engine.used == 0


def test_abort_while_waiting_ends_the_request_and_keeps_the_blocks(direct: bool) -> None:
    engine = waiting(direct)
    engine.abort("a")
    assert engine.run() <= 2, "an abort must not keep the engine stepping until a fence"
    assert engine.told == [("a", False)]
    assert "a" not in engine.scheduler.requests
    assert engine.bridge.of(Cancelled) == [Cancelled(engine.offered.transfer)]
    assert engine.used == 7
    engine.bridge.fail(engine.offered, Reason.CANCELLED)
    engine.bridge.release(engine.offered)
    engine.add("b", 5)
    engine.run()
    assert engine.used == 0


@pytest.mark.parametrize("outcome", ["delivered", "failed"])
def test_abort_between_outcome_and_its_report(direct: bool, outcome: str) -> None:
    engine = waiting(direct)
    if outcome == "delivered":
        engine.bridge.deliver(engine.offered)
    else:
        engine.bridge.fail(engine.offered)
        engine.bridge.release(engine.offered)
    if not direct:
        engine.step()
    engine.half.take_reports()
    engine.abort("a")
    engine.run()
    assert [name for name, _ in engine.told] == ["a"]
    assert engine.used == 0


@pytest.mark.parametrize("outcome", ["delivered", "failed"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_abort_while_the_report_is_on_its_way(direct: bool, outcome: str, policy: str) -> None:
    engine = waiting(direct, policy=policy)
    if outcome == "delivered":
        engine.bridge.deliver(engine.offered)
    else:
        engine.bridge.fail(engine.offered)
        engine.bridge.release(engine.offered)
    if not direct:
        engine.step()
    engine.abort_in_step = "a"
    engine.run()
    assert [name for name, _ in engine.told] == ["a"]
    assert engine.used == 0


@pytest.mark.parametrize("outcome", ["delivered", "failed"])
def test_abort_after_the_report(direct: bool, outcome: str) -> None:
    engine = waiting(direct)
    if outcome == "delivered":
        engine.bridge.deliver(engine.offered)
    else:
        engine.bridge.fail(engine.offered)
        engine.bridge.release(engine.offered)
    while not engine.told:
        engine.step()
    assert engine.status("a") is WAITING
    engine.abort("a")
    engine.run()
    assert len(engine.told) == 1
    assert engine.used == 0


def test_abort_before_schedule_lets_the_producer_go(direct: bool) -> None:
    engine = Engine(role="kv_consumer", direct=direct)
    engine.add("a", 100, remote())
    engine.abort("a")
    engine.run()
    offered = engine.offered
    assert (offered.start, offered.end, offered.blocks) == (100, 100, ((),))
    assert engine.told == []
    engine.bridge.deliver(offered)
    engine.add("b", 5)
    engine.run()
    assert engine.told == []
    assert engine.used == 0


def test_abort_in_backoff_cancels(direct: bool) -> None:
    engine = waiting(direct, policy="recompute")
    engine.bridge.fail(engine.offered, Reason.LINK_LOST, retry=True)
    for _ in range(4):
        engine.step()
    engine.abort("a")
    engine.run()
    assert engine.bridge.of(Cancelled) == [Cancelled(engine.offered.transfer)]
    engine.bridge.retry(engine.offered)
    engine.bridge.release(engine.offered)
    engine.add("b", 5)
    engine.run()
    assert len(engine.told) == 1
    assert engine.used == 0


def test_preemption_after_delivery_recomputes(direct: bool) -> None:
    engine = waiting(direct)
    engine.bridge.deliver(engine.offered)
    while engine.status("a") is not RequestStatus.RUNNING:
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.status("a") is RequestStatus.PREEMPTED
    output = engine.step()
    assert output.num_scheduled_tokens["a"] > 100
    engine.run()
    assert engine.bridge.of(Offered) == [engine.offered]
    assert engine.told == [("a", False)]
    assert engine.finish_reasons == {"a": "length"}
    assert engine.used == 0


def test_only_what_is_not_cached_here_is_offered(direct: bool) -> None:
    engine = Engine(role="kv_consumer", direct=direct)
    engine.add("warm", 3 * BLOCK)
    engine.run()
    engine.add("a", 100, remote())
    engine.step()
    own = engine.scheduler.kv_cache_manager.get_block_ids("a")[0]
    offered = engine.offered
    assert (offered.start, offered.end) == (3 * BLOCK, 100)
    assert offered.blocks == (tuple(own[3:]),)
    engine.bridge.deliver(offered)
    engine.run()
    assert engine.used == 0


def test_the_last_block_is_offered_even_when_all_of_the_prompt_is_cached(direct: bool) -> None:
    engine = Engine(role="kv_consumer", direct=direct)
    engine.add("warm", 4 * BLOCK)
    engine.run()
    engine.add("a", 4 * BLOCK, remote())
    engine.step()
    assert (engine.offered.start, engine.offered.end) == (3 * BLOCK, 4 * BLOCK)
    assert len(engine.offered.blocks[0]) == 1
    engine.bridge.deliver(engine.offered)
    engine.run()
    assert engine.used == 0


def test_prompt_logprobs_prefill_here_and_let_the_producer_go(direct: bool) -> None:
    engine = Engine(role="kv_consumer", direct=direct)
    request = engine.add("a", 100, remote())
    request.skip_reading_prefix_cache = True
    engine.run()
    assert (engine.offered.start, engine.offered.end) == (100, 100)
    assert engine.told == []
    assert engine.finish_reasons == {"a": "length"}


def test_samples_of_one_request_are_transfers_of_their_own(direct: bool) -> None:
    engine = Engine(role="kv_consumer", direct=direct)
    params = remote()
    for sample in range(3):
        engine.add(f"{sample}_cmpl-r-0-0123abcd", 100, params)
    engine.step()
    offers = engine.bridge.of(Offered)
    assert [offer.transfer for offer in offers] == ["t1", "t1/0.1", "t1/0.2"]
    for offer in reversed(offers):
        engine.bridge.deliver(offer)
    engine.run()
    assert sorted(engine.told) == [(f"{n}_cmpl-r-0-0123abcd", False) for n in range(3)]
    assert engine.used == 0


def test_a_transfer_that_a_live_request_uses_is_not_registered_twice(direct: bool) -> None:
    engine = waiting(direct)
    engine.add("b", 50, remote())
    engine.bridge.deliver(engine.offered)
    engine.run()
    assert len(engine.bridge.of(Offered)) == 1
    assert engine.told == [("a", False)]
    assert engine.finish_reasons == {"a": "length", "b": "length"}


def test_more_than_the_budget_waits_its_turn(direct: bool) -> None:
    engine = Engine(role="kv_consumer", blocks=21, direct=direct, exposed_share=0.5)
    engine.add("a", 7 * BLOCK, remote("ta"))
    engine.add("b", 7 * BLOCK, remote("tb"))
    engine.step()
    assert [offer.transfer for offer in engine.bridge.of(Offered)] == ["ta"]
    engine.step()
    engine.bridge.deliver(engine.bridge.of(Offered)[0])
    for _ in range(3):
        engine.step()
    assert [offer.transfer for offer in engine.bridge.of(Offered)] == ["ta", "tb"]
    engine.bridge.deliver(engine.offered)
    engine.run()
    assert engine.used == 0


def test_quarantined_blocks_beyond_the_budget_mean_a_prefill_here(direct: bool) -> None:
    engine = Engine(role="kv_consumer", blocks=41, policy="fail", direct=direct, exposed_share=0.25)
    engine.add("a", 7 * BLOCK, remote("ta"))
    engine.step()
    quarantined = engine.offered
    engine.bridge.fail(quarantined)
    engine.run()
    engine.add("b", 7 * BLOCK, remote("tb"))
    engine.run()
    assert engine.finish_reasons == {"a": "error", "b": "length"}
    assert (engine.offered.start, engine.offered.end) == (7 * BLOCK, 7 * BLOCK)
    engine.bridge.release(quarantined)
    engine.add("other", 5)
    engine.run()
    engine.add("c", list(range(500, 500 + 7 * BLOCK)), remote("tc"))
    while engine.offered.transfer != "tc":
        engine.step()
    assert len(engine.offered.blocks[0]) == 7, "the budget recovers when blocks come back"


def test_an_idle_engine_has_nothing_to_step_for(direct: bool) -> None:
    engine = waiting(direct)
    engine.bridge.deliver(engine.offered, release=False)
    engine.run()
    assert engine.used == 7
    assert not engine.connector.has_pending_push_work()
    assert not engine.scheduler.has_requests()
