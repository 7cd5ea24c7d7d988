"""EngineCore's real loop, over the real scheduler: when it steps, when it sleeps, what wakes it."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.harness import Engine, remote
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc, EngineShutdownState
from vllm.v1.request import RequestStatus

from pushkv_vllm import stepping

pytestmark = pytest.mark.vllm

VLLMS_STEP = EngineCoreProc._process_engine_step
LONG_S = 20.0


@pytest.fixture(autouse=True)
def vllms_own_loop_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCoreProc, "_process_engine_step", VLLMS_STEP)
    monkeypatch.setattr(stepping, "SLEEP_MOST_S", 60.0)


class Core(EngineCoreProc):
    """An EngineCoreProc without processes, sockets and a model, around the harness's engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.aborts_queue: queue.Queue[list[str]] = queue.Queue()
        self.batch_queue = None
        self.engines_running = False
        self.process_input_queue_block = True
        self.publish_dp_lb_stats = False
        self.shutdown_state = EngineShutdownState.RUNNING
        self.vllm_config = SimpleNamespace(shutdown_timeout=0)
        self._idle_state_callbacks: list[Any] = []
        self.step_fn = self.one_step
        self.steps = 0

    def one_step(self) -> tuple[dict[int, Any], bool]:
        if not self.scheduler.has_requests():
            return {}, False
        self.steps += 1
        output = self.engine.step()
        self._process_aborts_queue()
        return {}, output.total_num_scheduled_tokens > 0

    def post_step(self, model_executed: bool) -> None:
        pass

    def _send_abort_outputs(self, aborted_reqs: list[Any]) -> None:
        pass

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        self.engine.add(**request)

    # -- the test's thread

    def put(self, kind: EngineCoreRequestType, what: Any) -> None:
        if kind is EngineCoreRequestType.ABORT:
            self.aborts_queue.put_nowait(what)
        self.input_queue.put_nowait((kind, what))

    def add(self, **request: Any) -> None:
        self.put(EngineCoreRequestType.ADD, (request, 0))


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not what():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def rests(core: Core) -> bool:
    """Whether the engine makes no step for 50 ms, in which vLLM makes dozens."""
    steps = core.steps
    time.sleep(0.05)
    return core.steps == steps


@pytest.fixture
def start() -> Iterator[Callable[..., Core]]:
    running: list[tuple[Core, threading.Thread]] = []

    def begin(kind: type[Core] = Core, **options: Any) -> Core:
        core = kind(Engine(**options))

        def run() -> None:
            with pytest.raises(SystemExit):
                core.run_busy_loop()

        thread = threading.Thread(target=run)
        thread.start()
        running.append((core, thread))
        return core

    yield begin
    for core, thread in running:
        core.shutdown_state = EngineShutdownState.REQUESTED
        core.put(EngineCoreRequestType.WAKEUP, None)
        thread.join(LONG_S)
        assert not thread.is_alive(), "shutting down must wake it"


@pytest.fixture(params=[True, False], ids=["one process", "a worker elsewhere"])
def anywhere(start: Callable[..., Core], request: pytest.FixtureRequest) -> Callable[..., Core]:
    """As `start`, with the worker in the engine's process and out of it."""
    return partial(start, direct=request.param)


def offer(core: Core, name: str = "a", **more: Any) -> None:
    core.add(request_id=name, prompt=100, params=remote(name), **more)
    until(lambda: any(each.transfer == name for each in list(core.engine.bridge.attempts.values())))


def test_an_engine_whose_requests_only_wait_makes_no_steps(anywhere: Callable[..., Core]) -> None:
    core = anywhere()
    offer(core)
    until(lambda: rests(core))
    assert core.steps <= 2 + stepping.SETTLED_STEPS
    assert core.engine.status("a") is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_what_is_delivered_runs_in_the_next_step(start: Callable[..., Core]) -> None:
    core = start()
    offer(core)
    until(lambda: rests(core))
    steps, bridge = core.steps, core.engine.bridge
    bridge.deliver(core.engine.offered)
    until(lambda: rests(core))
    assert "a" in core.engine.finish_reasons
    assert core.steps - steps == 2, "one that decodes, and one that clears away"
    assert core.engine.told == [], "none that only said so"


def test_another_vllm_is_told_by_a_step(
    monkeypatch: pytest.MonkeyPatch, start: Callable[..., Core]
) -> None:
    monkeypatch.setattr(stepping, "KNOWN_RECEIPTS", {})
    core = start()
    offer(core)
    until(lambda: rests(core))
    steps = core.steps
    core.engine.bridge.deliver(core.engine.offered)
    until(lambda: rests(core))
    assert "a" in core.engine.finish_reasons
    assert core.steps - steps == 3
    assert core.engine.told == [("a", False)]


def test_what_is_delivered_runs_after_few_steps(anywhere: Callable[..., Core]) -> None:
    core = anywhere()
    offer(core)
    until(lambda: rests(core))
    steps, bridge = core.steps, core.engine.bridge
    bridge.deliver(core.engine.offered)
    until(lambda: "a" in core.engine.finish_reasons)
    assert core.steps - steps <= 4, (
        "one or two hear of it, one decodes; the release may come between"
    )


def test_what_comes_in_the_last_step_before_it_sleeps_is_acted_on(
    anywhere: Callable[..., Core],
) -> None:
    """The step takes it, and leaves no report behind: only later ones run what came."""

    class JustBefore(Core):
        delivered = False

        def one_step(self) -> tuple[dict[int, Any], bool]:
            alarm = self.engine.half.alarm
            settles = alarm.empty_steps == stepping.SETTLED_STEPS - 1
            if settles and self.engine.bridge.attempts and not self.delivered:
                self.delivered = True
                self.engine.bridge.deliver(self.engine.offered)
            return super().one_step()

    core = anywhere(JustBefore)
    core.add(request_id="a", prompt=100, params=remote("a"))
    until(lambda: "a" in core.engine.finish_reasons)
    assert core.delivered


def test_a_new_request_is_not_kept_waiting(anywhere: Callable[..., Core]) -> None:
    core = anywhere()
    offer(core)
    until(lambda: rests(core))
    core.add(request_id="b", prompt=20)
    until(lambda: "b" in core.engine.finish_reasons)
    until(lambda: rests(core))
    assert core.engine.status("a") is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_an_abort_wakes_it(anywhere: Callable[..., Core]) -> None:
    core = anywhere()
    offer(core)
    until(lambda: rests(core))
    core.put(EngineCoreRequestType.ABORT, ["a"])
    until(lambda: not core.engine.scheduler.requests)


def test_a_failure_wakes_it(anywhere: Callable[..., Core]) -> None:
    core = anywhere()
    offer(core)
    until(lambda: rests(core))
    core.engine.bridge.fail(core.engine.offered)
    until(lambda: "a" in core.engine.finish_reasons)
    assert core.engine.told == [("a", True)]


def test_a_retry_that_needs_other_blocks_wakes_it(anywhere: Callable[..., Core]) -> None:
    core = anywhere()
    offer(core)
    until(lambda: rests(core))
    first = core.engine.offered
    core.engine.bridge.fail(first, retry=True)
    until(lambda: rests(core))
    core.engine.bridge.retry(first)
    until(lambda: core.engine.offered.attempt > first.attempt)


def test_while_others_run_it_never_waits(anywhere: Callable[..., Core]) -> None:
    core = anywhere()
    offer(core)
    core.add(request_id="b", prompt=20, max_tokens=300)
    until(lambda: "b" in core.engine.finish_reasons)
    assert core.steps > 300


def test_what_waits_for_a_grammar_is_asked_for_on_and_on(start: Callable[..., Core]) -> None:
    core = start()
    offer(core)
    until(lambda: rests(core))
    core.engine.scheduler.requests["a"].status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    core.engine.scheduler.requests["a"].structured_output_request = SimpleNamespace(
        grammar=None, params=StructuredOutputsParams(json_object=True)
    )
    steps = core.steps
    core.put(EngineCoreRequestType.WAKEUP, None)
    until(lambda: core.steps > steps + 30)
    core.engine.scheduler.requests["a"].status = RequestStatus.WAITING_FOR_REMOTE_KVS


def test_many_come_one_after_the_other(anywhere: Callable[..., Core]) -> None:
    core, moment = anywhere(), random.Random(7)
    for index in range(50):
        name = f"r{index}"
        offer(core, name)
        core.add(request_id=f"local{index}", prompt=20)
        time.sleep(moment.random() * 0.004)
        core.engine.bridge.deliver(core.engine.offered)
        until(partial(core.engine.finish_reasons.__contains__, name))
    until(lambda: len(core.engine.finish_reasons) == 100)


def falls_asleep(alarm: stepping.Alarm, inputs: queue.Queue[Any]) -> bool:
    """Whether `sleep` goes on for longer than a moment; ends it."""
    thread = threading.Thread(target=alarm.sleep, args=(inputs, LONG_S))
    thread.start()
    thread.join(0.1)
    asleep = thread.is_alive()
    inputs.put("the end")
    thread.join()
    return asleep


def test_what_came_before_it_fell_asleep_is_not_slept_through() -> None:
    inputs: queue.Queue[Any] = queue.Queue()
    assert falls_asleep(stepping.Alarm(lambda: False), inputs)
    assert not falls_asleep(stepping.Alarm(lambda: False), inputs), "an input is there"
    inputs.get()
    inputs.get()
    assert not falls_asleep(stepping.Alarm(lambda: True), inputs), "a report is there"


def test_what_comes_while_it_falls_asleep_is_not_slept_through() -> None:
    """A report is made just after it was asked for: its ring must find the sleeper."""
    rings: list[threading.Thread] = []

    def too_early() -> bool:
        rings.append(threading.Thread(target=alarm.ring))
        rings[0].start()
        time.sleep(0.02)
        return False

    alarm = stepping.Alarm(too_early)
    assert not falls_asleep(alarm, queue.Queue())
    rings[0].join()


def test_a_data_parallel_engine_steps_as_ever(start: Callable[..., Core]) -> None:
    class Parallel(Core, DPEngineCoreProc):
        run_busy_loop = EngineCoreProc.run_busy_loop
        _maybe_publish_request_counts = EngineCoreProc._maybe_publish_request_counts
        _handle_client_request = EngineCoreProc._handle_client_request

    core = start(Parallel)
    offer(core)
    until(lambda: core.steps > 30)


@pytest.mark.parametrize("while_waiting", ["pause", "step"])
def test_without_the_patch_vllms_loop_is_untouched(
    start: Callable[..., Core], while_waiting: str
) -> None:
    core = start(while_waiting=while_waiting)
    assert EngineCoreProc._process_engine_step is VLLMS_STEP
    offer(core)
    until(lambda: core.steps > 30)
    core.engine.bridge.deliver(core.engine.offered)
    until(lambda: "a" in core.engine.finish_reasons)


def test_an_unknown_loop_is_left_alone_and_named_once(
    start: Callable[..., Core], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def changed(self: EngineCoreProc) -> bool:
        return bool(VLLMS_STEP(self))

    monkeypatch.setattr(EngineCoreProc, "_process_engine_step", changed)
    with caplog.at_level(logging.WARNING):
        core = start()
    assert caplog.text.count("this vLLM's loop is unknown") == 1
    assert EngineCoreProc._process_engine_step is changed
    offer(core)
    core.engine.bridge.deliver(core.engine.offered)
    until(lambda: "a" in core.engine.finish_reasons)


def test_a_pause_lasts_until_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one thread, as vLLM's offline engine steps: a long pause ends with the report."""
    engine = Engine(while_waiting="pause")
    engine.add("a", 100, remote("a"))
    waited: list[float] = []

    def wait(bound_s: float) -> bool:
        waited.append(bound_s)
        return bool(engine.bridge.reports)

    monkeypatch.setattr(engine.bridge, "wait", wait)
    engine.step()
    for _ in range(10):
        engine.step()
    pauses = [each for each in waited if each]
    assert 0 < len(pauses) < 10, "not before the steps that are under way are over"
    assert set(pauses) == {0.005}
    waited.clear()
    engine.add("b", 20)
    engine.step()
    assert not any(waited), "a step that computes something does not pause"
