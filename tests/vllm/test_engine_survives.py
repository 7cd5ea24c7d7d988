"""The real scheduler under random reports, aborts and clients: the engine lives, blocks come back.

What vLLM asserts about a connector (an unknown or running request reported as received, blocks
freed twice) raises in `Engine.step`; what it cannot see (a leaked block, a request nobody ever
resolves, a pinned block handed to another request) is asserted here.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.vllm.harness import BLOCK, Engine, prefill, remote

from pushkv.core.effects import BlocksReleased, Delivered, NotDelivered
from pushkv.core.events import (
    Arrived,
    Cancelled,
    Computed,
    Offered,
    PrefillAborted,
    PrefillPreempted,
)
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason

pytestmark = pytest.mark.vllm


class AnyEngine(RuleBasedStateMachine):
    """One engine of both roles; the runtime reports lawfully, late, twice and about nobody."""

    engine: Engine

    @initialize(policy=st.sampled_from(["fail", "recompute"]), direct=st.booleans())
    def start(self, policy: str, direct: bool) -> None:
        self.engine = Engine(policy=policy, blocks=31, direct=direct, exposed_share=0.8)
        self.named = 0
        self.open: dict[int, Offered] = {}
        """Offers without an outcome."""
        self.unreleased: dict[int, Offered] = {}
        self.backoff: list[Offered] = []
        self.sources: list[TransferId] = []
        self.yielding: list[TransferId] = []
        self.seen = 0
        self.everything: list[Offered] = []

    def read(self) -> None:
        """What the runtime would do about what it was told."""
        for event in self.engine.bridge.submitted[self.seen :]:
            match event:
                case Offered():
                    self.open[event.attempt] = self.unreleased[event.attempt] = event
                    self.everything.append(event)
                case Cancelled(transfer=transfer):
                    for offer in [each for each in self.open.values() if each.transfer == transfer]:
                        self.engine.bridge.fail(self.open.pop(offer.attempt), Reason.CANCELLED)
                    self.backoff = [each for each in self.backoff if each.transfer != transfer]
                case Computed(transfer=transfer, final=True) | PrefillAborted(transfer=transfer):
                    self.sources.append(transfer)
                case PrefillPreempted(transfer=transfer):
                    self.yielding.append(transfer)
        self.seen = len(self.engine.bridge.submitted)

    def name(self) -> str:
        self.named += 1
        return f"r{self.named}"

    # -- the engine and its clients

    @rule(tokens=st.integers(1, 8 * BLOCK), transfer=st.integers(0, 5), base=st.integers(0, 1))
    def decode(self, tokens: int, transfer: int, base: int) -> None:
        prompt = list(range(base, base + tokens))
        self.engine.add(self.name(), prompt, remote(f"d{transfer}"), max_tokens=2)

    @rule(tokens=st.integers(1, 8 * BLOCK), transfer=st.integers(0, 3), base=st.integers(0, 1))
    def prefill(self, tokens: int, transfer: int, base: int) -> None:
        self.engine.add(self.name(), list(range(base, base + tokens)), prefill(f"p{transfer}"))

    @rule(tokens=st.integers(1, 4 * BLOCK))
    def plain(self, tokens: int) -> None:
        self.engine.add(self.name(), tokens, max_tokens=3)

    @rule(times=st.integers(1, 3))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()
            self.read()

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(data=st.data(), inside=st.booleans())
    def abort(self, data: Any, inside: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.scheduler.requests)))
        if inside:
            self.engine.abort_in_step = name
        else:
            self.engine.abort(name)
        self.read()

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def preempt(self) -> None:
        self.engine.preempt()

    # -- the runtime

    @precondition(lambda self: self.open)
    @rule(data=st.data(), release=st.booleans())
    def deliver(self, data: Any, release: bool) -> None:
        offer = self.open.pop(data.draw(st.sampled_from(sorted(self.open))))
        self.engine.bridge.deliver(offer, release=False)
        if release:
            self.engine.bridge.release(self.unreleased.pop(offer.attempt))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), retry=st.booleans())
    def fail(self, data: Any, retry: bool) -> None:
        offer = self.open.pop(data.draw(st.sampled_from(sorted(self.open))))
        self.engine.bridge.fail(offer, retry=retry)
        if retry:
            self.backoff.append(offer)

    @precondition(lambda self: self.backoff)
    @rule()
    def retry(self) -> None:
        self.engine.bridge.retry(self.backoff.pop(0))

    @precondition(lambda self: bool(set(self.unreleased) - set(self.open)))
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        ended = sorted(set(self.unreleased) - set(self.open))
        self.engine.bridge.release(self.unreleased.pop(data.draw(st.sampled_from(ended))))

    @precondition(lambda self: self.sources)
    @rule()
    def release_source(self) -> None:
        transfer = self.sources.pop(0)
        self.yielding = [each for each in self.yielding if each != transfer]
        self.engine.bridge.release_source(transfer)

    @precondition(lambda self: self.yielding)
    @rule()
    def yield_source(self) -> None:
        self.engine.bridge.yield_source(self.yielding.pop(0))

    @precondition(lambda self: self.everything)
    @rule(data=st.data(), kind=st.sampled_from(["delivered", "failed", "released", "retry"]))
    def repeat(self, data: Any, kind: str) -> None:
        """A report of an attempt that has ended comes again, or one of nobody's."""
        offer = data.draw(st.sampled_from(self.everything))
        ended = offer.attempt not in self.open and offer.attempt not in self.unreleased
        if not ended:
            offer = Offered(TransferId("nobody"), 10_000, (), ((),), 0, 1, b"")
        match kind:
            case "delivered":
                self.engine.bridge.deliver(offer, release=False)
            case "failed":
                self.engine.bridge.fail(offer, retry=True)
            case "released":
                self.engine.bridge.release(offer)
            case "retry" if offer not in self.backoff:
                self.engine.bridge.retry(offer)

    # -- what must hold

    @invariant()
    def no_block_is_handed_out_while_it_may_be_written(self) -> None:
        exposed = [
            block for offer in self.unreleased.values() for group in offer.blocks for block in group
        ]
        assert len(exposed) == len(set(exposed)), "one block is exposed to two attempts"
        for block in exposed:
            assert self.engine.pool.blocks[block].ref_cnt > 0, f"block {block} is free and exposed"

    def teardown(self) -> None:
        """Everything ends lawfully: then nothing may be left of it."""
        if not hasattr(self, "named"):
            return
        engine = self.engine
        for _ in range(300):
            self.read()
            for offer in list(self.open.values()):
                engine.bridge.deliver(self.open.pop(offer.attempt), release=False)
            while self.backoff:
                engine.bridge.retry(self.backoff.pop())
            while self.unreleased:
                engine.bridge.release(self.unreleased.popitem()[1])
            while self.yielding:
                engine.bridge.yield_source(self.yielding.pop(0))
            while self.sources:
                engine.bridge.release_source(self.sources.pop())
            if not engine.scheduler.has_requests():
                break
            engine.step()
        else:
            raise AssertionError("the engine never comes to rest")
        engine.add(self.name(), 5)
        engine.run()
        assert engine.used == 0, "blocks leaked"
        assert not engine.scheduler.requests
        assert len(engine.half.ledger) == 0
        assert engine.half.destinations.held == engine.half.prefills.pins.held == 0


def test_the_engine_survives_anything() -> None:
    run_state_machine_as_test(
        AnyEngine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


KEYS = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_host",
    "remote_port",
    "transfer_id",
    "remote_request_id",
    "remote_engine_id",
    "tp_size",
    "x",
)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(KEYS),
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers()),
        min_size=1,
    )
)
def test_bad_parameters_cost_one_request_its_transfer(params: dict[str, object]) -> None:
    engine = Engine()
    engine.add("bad", 40, params)
    engine.add("good", 40, remote("good"))
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


def test_every_report_kind_about_nobody_is_survived() -> None:
    engine = Engine()
    nobody = TransferId("nobody")
    engine.bridge.reports.extend(
        [
            Delivered(nobody, 1),
            NotDelivered(nobody, 1, Reason.ABORTED, True),
            BlocksReleased(nobody, 1),
        ]
    )
    engine.add("a", 40)
    engine.run()
    assert engine.finish_reasons == {"a": "length"}
    assert engine.bridge.of(Arrived) == []
