"""The prefill side against vLLM's real scheduler: what is announced, held, told and released."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.vllm.harness import BLOCK, Engine, prefill, remote

from pushkv.core.events import Arrived, PrefillAborted
from pushkv_vllm.log import logger

pytestmark = pytest.mark.vllm


@pytest.fixture(params=["direct", "relay"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Both halves in one process, or in two."""
    return bool(request.param == "direct")


def test_a_request_is_announced_before_it_is_scheduled() -> None:
    engine = Engine(role="kv_producer")
    engine.add("a", 100, prefill())
    assert [event.transfer for event in engine.bridge.of(Arrived)] == ["t1"]


def test_two_processes_announce_with_the_first_step() -> None:
    engine = Engine(role="kv_producer", direct=False)
    engine.add("a", 600, prefill())
    engine.step()
    assert [event.transfer for event in engine.bridge.of(Arrived)] == ["t1"]
    assert engine.bridge.computed == [], "600 tokens take two steps of 512"


def test_computed_blocks_are_held_until_their_source_is_released(direct: bool) -> None:
    engine = Engine(role="kv_producer", direct=direct)
    engine.add("a", 100, prefill())
    own: list[int] = []
    while engine.scheduler.has_requests():
        engine.step()
        if "a" in engine.scheduler.requests:
            own = engine.scheduler.kv_cache_manager.get_block_ids("a")[0]
    (computed,) = engine.bridge.computed
    assert (computed.transfer, computed.tokens, computed.final) == ("t1", 100, True)
    assert len(computed.blocks[0]) == 7
    assert not own or list(computed.blocks[0]) == own[:7]
    assert "a" not in engine.scheduler.requests
    assert engine.used == 7
    assert not engine.scheduler.has_requests(), "held blocks must not keep the engine stepping"
    engine.bridge.release_source(computed.transfer)
    engine.add("b", 5)
    engine.run()
    assert engine.used == 0


def test_the_response_says_where_to_register(direct: bool) -> None:
    engine = Engine(role="kv_producer", direct=direct)
    engine.add("cmpl-router-1-0-0123abcd", 100, prefill())
    engine.run()
    assert engine.responses["cmpl-router-1-0-0123abcd"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine",
        "remote_request_id": "cmpl-router-1-0-0123abcd",
        "remote_host": "127.0.0.1",
        "remote_port": 4_711,
        "remote_num_tokens": 100,
        "tp_size": 1,
        "pp_size": 1,
        "transfer_id": "t1",
        "transfer_mode": "push",
        "remote_prefill_cached_tokens": 0,
    }


def test_push_need_not_be_advertised() -> None:
    engine = Engine(role="kv_producer", advertise_push=False)
    engine.add("a", 100, prefill())
    engine.run()
    response = engine.responses["a"]
    assert response is not None
    assert "transfer_mode" not in response


@pytest.mark.parametrize("transfer", ["t1", None])
def test_a_response_leads_the_other_engine_to_the_same_transfers(transfer: str | None) -> None:
    """Sequential dispatch: the response reaches the decode engine as it is, n samples each."""
    first, second = Engine(role="kv_producer"), Engine(role="kv_consumer")
    for sample in range(2):
        first.add(f"{sample}_cmpl-r-0-0123abcd", 100, prefill(transfer))
    first.run()
    response = first.responses["1_cmpl-r-0-0123abcd"]
    for sample in range(2):
        second.add(f"{sample}_cmpl-other-0-76543210", 100, response)
    second.step()
    made = [event.transfer for event in first.bridge.computed]
    asked = [offer.transfer for offer in second.bridge.attempts.values()]
    assert len(set(made)) == 2
    assert asked == made


def test_concurrent_dispatch_without_a_transfer_id_meets_by_the_routers_request_id() -> None:
    """What a router says that knows vLLM's own push mode: no id to P, its request id to D."""
    first, second = Engine(role="kv_producer"), Engine(role="kv_consumer")
    first.add("cmpl-3fd1-a-0-0123abcd", 100, {"do_remote_decode": True})
    params = remote()
    del params["transfer_id"]
    params |= {"remote_request_id": "3fd1-a", "remote_engine_id": "engine", "tp_size": 1}
    second.add("cmpl-3fd1-a-0-76543210", 100, params)
    second.step()
    (arrived,) = first.bridge.of(Arrived)
    assert second.offered.transfer == arrived.transfer
    assert second.offered.prompt_digest == arrived.prompt_digest


def test_another_prompt_under_the_same_router_id_is_another_transfer() -> None:
    first, second = Engine(role="kv_producer"), Engine(role="kv_consumer")
    first.add("cmpl-x-0-0123abcd", 100, {"do_remote_decode": True})
    params = remote(transfer_id=None, remote_request_id="x")
    second.add("cmpl-x-0-76543210", list(range(1, 101)), params)
    second.step()
    (arrived,) = first.bridge.of(Arrived)
    assert second.offered.transfer != arrived.transfer


def test_abort_is_told(direct: bool) -> None:
    engine = Engine(role="kv_producer", direct=direct)
    engine.add("a", 600, prefill())
    engine.step()
    engine.abort("a")
    engine.run()
    (arrived,) = engine.bridge.of(Arrived)
    assert engine.bridge.of(PrefillAborted) == [PrefillAborted(arrived.transfer)]
    assert engine.bridge.computed == []
    engine.bridge.release_source(arrived.transfer)
    engine.add("b", 5)
    engine.run()
    assert engine.used == 0


def test_abort_after_the_prompt_is_told_too(direct: bool) -> None:
    """The client left: a decode leg that still waits must not go on without it."""
    engine = Engine(role="kv_producer", direct=direct)
    engine.add("a", 100, prefill(), max_tokens=5)
    engine.step()
    engine.abort("a")
    engine.run()
    (aborted,) = engine.bridge.of(PrefillAborted)
    assert engine.bridge.computed == []
    engine.bridge.release_source(aborted.transfer)
    engine.add("b", 5)
    engine.run()
    assert engine.used == 0


def test_abort_before_schedule_is_told(direct: bool) -> None:
    engine = Engine(role="kv_producer", direct=direct)
    engine.add("a", 100, prefill())
    engine.abort("a")
    engine.run()
    assert len(engine.bridge.of(Arrived)) == len(engine.bridge.of(PrefillAborted)) == 1


def test_a_preempted_prefill_just_takes_longer(direct: bool) -> None:
    engine = Engine(role="kv_producer", direct=direct)
    engine.add("a", 600, prefill())
    engine.step()
    engine.preempt()
    engine.run()
    (computed,) = engine.bridge.computed
    assert computed.tokens == 600
    assert len(computed.blocks[0]) == 38
    assert engine.bridge.of(PrefillAborted) == []
    assert engine.used == 38


def test_the_same_prompt_again_is_served_by_what_is_held(direct: bool) -> None:
    engine = Engine(role="kv_producer", direct=direct)
    engine.add("a", 100, prefill())
    engine.run()
    engine.add("b", 100, prefill())
    engine.run()
    assert len(engine.bridge.of(Arrived)) == len(engine.bridge.computed) == 1
    assert engine.responses["b"] is not None
    assert engine.used == 7


def test_another_prompt_under_a_used_transfer_id_is_refused(direct: bool) -> None:
    engine = Engine(role="kv_producer", direct=direct)
    engine.add("a", 100, prefill())
    engine.add("b", 90, prefill())
    engine.run()
    assert len(engine.bridge.of(Arrived)) == 1
    assert engine.responses["b"] is None
    assert engine.half.counts["bad_kv_transfer_params"] == 1


def test_a_released_transfer_id_may_be_used_again(direct: bool) -> None:
    engine = Engine(role="kv_producer", direct=direct)
    for _ in range(3):
        engine.add("a", 100, prefill())
        engine.run()
        engine.bridge.release_source(engine.bridge.computed[-1].transfer)
        engine.add("b", 5)
        engine.run()
    assert len(engine.bridge.computed) == 3
    assert engine.used == 0


def test_held_blocks_serve_prefix_hits(direct: bool) -> None:
    engine = Engine(role="kv_producer", direct=direct)
    engine.add("a", 6 * BLOCK, prefill("ta"))
    engine.run()
    engine.add("b", 6 * BLOCK + 5, prefill("tb"))
    engine.run()
    first, second = engine.bridge.computed
    assert second.blocks[0][:6] == first.blocks[0]
    engine.bridge.release_source(first.transfer)
    engine.add("c", 5)
    engine.run()
    assert engine.used == 7, "shared blocks stay for the second"
    engine.bridge.release_source(second.transfer)
    engine.add("d", 5)
    engine.run()
    assert engine.used == 0


def test_blocks_released_while_the_engine_sleeps_are_there_for_the_next_request() -> None:
    """With a pool just large enough for one prompt, the second must not wait a single step."""
    engine = Engine(role="kv_producer", blocks=9)
    engine.add("a", 7 * BLOCK, prefill())
    engine.run()
    assert engine.used == 7
    engine.bridge.release_source(engine.bridge.computed[0].transfer)
    engine.add("b", list(range(500, 500 + 7 * BLOCK)), prefill("t2"))
    assert engine.step().num_scheduled_tokens == {"b": 7 * BLOCK}


def test_a_full_pool_in_two_processes_costs_steps_not_requests() -> None:
    engine = Engine(role="kv_producer", blocks=9, direct=False)
    engine.add("a", 7 * BLOCK, prefill())
    engine.run()
    engine.bridge.release_source(engine.bridge.computed[0].transfer)
    engine.add("b", list(range(500, 500 + 7 * BLOCK)), prefill("t2"))
    engine.run()
    assert engine.finish_reasons["b"] == "length"


@pytest.mark.parametrize(
    ("role", "params"),
    [("kv_producer", remote()), ("kv_consumer", prefill())],
)
def test_a_leg_for_the_other_role_runs_here(
    role: str, params: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(role=role)
    engine.add("a", 100, params)
    engine.run()
    assert engine.bridge.submitted == []
    assert engine.finish_reasons == {"a": "length"}
    # The counters are the runtime's: its metrics serve them.
    assert engine.counters == {"bad_kv_transfer_params": 1}
    (line,) = (vars(each) for each in caplog.records if each.name == logger.name)
    assert (line["cause"], line["levelname"]) == ("bad_kv_transfer_params", "WARNING")
    assert line["request"].startswith("a")
