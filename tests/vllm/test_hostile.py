"""A hostile client of the API: it writes `kv_transfer_params` itself, to vLLM's real scheduler.

It ends its own request at worst. It reads nobody's KV: a producer serves a transfer only to who
names the digest of its prompt, and the digest that is named here is that of the client's own.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.vllm.harness import Engine, prefill, remote

from pushkv.core.events import Arrived, Offered
from pushkv_vllm.identity import prompt_digest

pytestmark = pytest.mark.vllm

VICTIM = list(range(100, 180))
GUESS = list(range(500, 580))
KEYS = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_host",
    "remote_port",
    "transfer_id",
    "remote_request_id",
    "remote_engine_id",
    "remote_num_tokens",
    "remote_block_ids",
    "remote_prefill_cached_tokens",
    "tp_size",
    "pp_size",
    "dcp_size",
    "transfer_mode",
)
text = st.text(max_size=12) | st.sampled_from(
    ["", "\0", "\ud800", "x" * 401, "x" * 100_000, "../../etc", "127.0.0.1", "::1%eth0", "e\u0301"]
)
leaf = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | text
    | st.sampled_from([5600, 1, 65_535, 65_536, -1, "5600"])
)
value = st.recursive(
    leaf,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
params = st.dictionaries(st.sampled_from(KEYS) | text, value, min_size=1, max_size=8)
lawful = st.fixed_dictionaries(
    {"do_remote_prefill": st.booleans(), "do_remote_decode": st.booleans()},
    optional={
        "remote_host": text,
        "remote_port": st.integers(0, 70_000),
        "transfer_id": text,
        "remote_request_id": text,
        "remote_engine_id": text,
    },
)


@pytest.fixture(params=["direct", "relay"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Both halves in one process, or in two."""
    return bool(request.param == "direct")


@pytest.mark.parametrize("direct", [True, False])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(bad=lawful | params | st.lists(leaf, max_size=3) | text)
def test_whatever_a_client_writes_it_ends_its_own_request_at_worst(direct: bool, bad: Any) -> None:
    engine = Engine(direct=direct)
    engine.add("bad", 40, bad)
    engine.add("good", 40, remote("good"))
    for _ in range(3):
        engine.step()
    for offer in engine.bridge.of(Offered):
        engine.bridge.deliver(offer)
    engine.run()
    for event in engine.bridge.computed:
        engine.bridge.release_source(event.transfer)
    engine.add("last", 5)
    engine.run()
    assert engine.finish_reasons == {"bad": "length", "good": "length", "last": "length"}
    assert engine.used == 0


def test_who_guesses_a_transfer_at_the_producer_is_told_nothing(direct: bool) -> None:
    engine = Engine(role="kv_producer", direct=direct)
    engine.add("victim", VICTIM, prefill("theirs"))
    engine.run()
    held = engine.half.prefills.pins.held
    engine.add("guess", GUESS, prefill("theirs"))
    engine.run()
    assert engine.responses["guess"] is None
    assert engine.responses["victim"] is not None
    assert engine.half.prefills.pins.held == held
    assert len(engine.bridge.of(Arrived)) == 1
    engine.bridge.release_source(engine.bridge.computed[0].transfer)
    engine.add("last", 5)
    engine.run()
    assert engine.used == 0


def test_who_was_there_first_costs_the_victim_its_transfer_at_most(direct: bool) -> None:
    engine = Engine(role="kv_producer", direct=direct)
    engine.add("guess", GUESS, prefill("theirs"))
    engine.add("victim", VICTIM, prefill("theirs"))
    engine.run()
    assert engine.finish_reasons == {"guess": "length", "victim": "length"}
    (arrived,) = engine.bridge.of(Arrived)
    assert arrived.prompt_digest != prompt_digest(request(VICTIM))


def test_a_guess_at_the_consumer_names_the_guessers_own_prompt(direct: bool) -> None:
    """All that a producer compares comes from the request itself, never from its parameters."""
    engine = Engine(role="kv_consumer", direct=direct)
    digest = prompt_digest(request(VICTIM))
    claims = {"prompt_digest": digest.hex(), "digest": digest.hex(), "remote_num_tokens": 80}
    engine.add("guess", GUESS, remote("theirs", **claims))
    engine.step()
    assert engine.offered.transfer == "theirs"
    assert engine.offered.prompt_digest == prompt_digest(request(GUESS)) != digest
    blocks = {block for group in engine.offered.blocks for block in group}
    own = engine.scheduler.kv_cache_manager.get_block_ids("guess")
    assert blocks <= {block for group in own for block in group}, "only its own blocks are offered"


def test_a_guess_at_the_consumer_takes_nothing_from_a_live_request(direct: bool) -> None:
    engine = Engine(role="kv_consumer", direct=direct)
    engine.add("victim", VICTIM, remote("theirs"))
    engine.add("guess", GUESS, remote("theirs", remote_host="192.0.2.66"))
    engine.step()
    (offer,) = engine.bridge.of(Offered)
    assert offer.producers[0].host == "10.0.0.1"
    engine.bridge.deliver(offer)
    engine.run()
    assert engine.finish_reasons == {"guess": "length", "victim": "length"}
    assert engine.used == 0


def test_block_ids_of_a_client_are_nobodys() -> None:
    engine = Engine(role="kv_consumer")
    blocks = [[1, 2, 3, 4, 5]]
    engine.add("guess", GUESS, remote("theirs", remote_block_ids=blocks, block_ids=blocks))
    engine.add("victim", VICTIM, remote("others"))
    engine.step()
    offers = engine.bridge.of(Offered)
    seen = [block for offer in offers for group in offer.blocks for block in group]
    assert len(offers) == 2
    assert len(seen) == len(set(seen))


def request(prompt: list[int]) -> Any:
    """A request that is never scheduled, for its digest."""
    from vllm.v1.request import Request

    from vllm import SamplingParams

    return Request("never", prompt, SamplingParams(max_tokens=1), None)
