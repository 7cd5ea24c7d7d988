"""Faults that hit a moment which must be waited for: rows of the matrix of reference engines.

A fault counts as mid-WRITE only where the producer's trace shows it: WRITEs of this transfer are
done and another one is under way. To stay in that moment the consumer is stopped, which then takes
no more than its sockets hold, and goes on as soon as the fault has come. On shared memory the copy
happens inside the post; there the moment is between two WRITEs, where the producer stops itself:
some are done, and the tokens of others are not computed yet. A run that missed its moment is
repeated, and not counted.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.runtime.nixl_node import NixlNode

from pushkv.observe.trace import trace_lines
from pushkv.testing.channel_faults import Toward
from pushkv.testing.reference_engine import Role

from .reference import ACTIONS, LOST, Fault, Run, Stage

__all__ = ["MOMENT_FAULTS", "shows_partial_bytes"]

WIDE_P, WIDE_D, WIDE_E = WIDE = ("P wide", "D wide", "E wide")
WIDE_KV_BYTES = 1_024
"""For each token and layer: a prompt is 5 MB, in six WRITEs."""
CHUNK_TOKENS = 112
TRIES = 12
PAUSE_S = 1.2
"""Longer than a permit lasts."""


def repeated(attempt: Callable[[Stage, float, int], tuple[Run, bool]]) -> Fault:
    """A fault that may miss its moment: again, until it does not."""

    def row(stage: Stage, delay_s: float) -> Run:
        problems: list[str] = []
        missed = 0
        while True:
            run, hit = attempt(stage, delay_s, missed)
            run.missed, run.problems = missed, problems + run.problems
            run.must(hit or missed < TRIES, f"the moment was missed {missed} times")
            if hit or missed == TRIES:
                return run
            for prompt, answer in run.answers:
                run.must(run.is_right(prompt, answer), f"a run without the fault: {answer}")
            problems = run.problems
            missed += 1

    return row


# -- mid-WRITE


def _options(path: Path, _: Stage) -> dict[str, Any]:
    return {"kv_bytes": WIDE_KV_BYTES, "chunk_tokens": CHUNK_TOKENS, "trace_path": path}


def _widen(stage: Stage) -> None:
    """Let the engines of `WIDE` keep a lot for each token, and a trace."""
    if WIDE_P not in stage.special:
        folder = Path(stage.kept.enter_context(tempfile.TemporaryDirectory(prefix="pushkv-")))
        for name in WIDE:
            stage.special[name] = partial(_options, folder / name)


def _trace(stage: Stage) -> Path:
    path = stage.special[WIDE_P](stage)["trace_path"]
    assert isinstance(path, Path)
    return path


def shows_partial_bytes(trace: Path, transfer: str, must_be_open: bool) -> bool:
    """Whether WRITEs of `transfer` are done at the end of `trace`, and, if asked, others are not.

    Without `must_be_open` it is for the caller to know that there was more to come.
    """
    posted = done = 0
    for each in _lines(trace):
        if each["kind"] == "step":
            posted += sum(
                effect["type"] == "PostWrite" and effect["attempt"]["transfer"] == transfer
                for effect in each["effects"]
            )
        elif each["kind"] == "write" and each["attempt"]["transfer"] == transfer:
            done += each["outcome"] == "done" and each["length_bytes"] > 0
    return done > 0 and (posted > done or not must_be_open)


def _lines(trace: Path) -> Iterator[dict[str, Any]]:
    for line in trace_lines(trace):
        yield json.loads(line)


def mid_write(action: str, victim: str) -> Fault:
    """It happens while some of the bytes are there and others are under way."""

    def attempt(stage: Stage, delay_s: float, missed: int) -> tuple[Run, bool]:
        _widen(stage)
        run = Run(stage, WIDE_P, WIDE_D, kv_bytes=WIDE_KV_BYTES)
        run.consume()
        time.sleep(0.1)
        between = stage.lane == "default"
        parts = 1 + (int(delay_s * 100) + missed) % 4
        held = _stopped_between_writes(run, parts) if between else _stopped_in_a_write(run, parts)
        if held is None:
            run.result()
            return run, False
        if not shows_partial_bytes(_trace(stage), run.name, not between):
            held.resume()
            held.answer()
            run.result()
            return run, False
        _strike(run, action, WIDE_P if victim == "P" else WIDE_D, held)
        if victim == "D" and action in LOST:
            run.consume(WIDE_E)  # the router turns to another decode engine
            run.result(WIDE_E)
        elif victim == "P" or action != "cancelled":
            run.result()
        return run, True

    return repeated(attempt)


def _stopped_between_writes(run: Run, parts: int) -> NixlNode | None:
    """The producer stops itself when WRITEs are done and prefill is not over."""
    producer = run.stage.node(WIDE_P)
    producer.tell("submit", run.name, run.prompt, Role.PRODUCE)
    producer.tell("stop_between_writes", producer.process.pid, run.name, parts, 3.0, True)
    return producer if producer.stops_itself() else None


def _stopped_in_a_write(run: Run, parts: int) -> NixlNode | None:
    """WRITEs are done when the consumer is stopped, which takes no more than its sockets do."""
    producer, consumer = run.stage.node(WIDE_P), run.stage.node(WIDE_D)
    run.produce()
    pid = consumer.process.pid
    if not producer.call("stop_between_writes", pid, run.name, parts, 3.0, False):
        return None
    deadline = time.monotonic() + 0.6  # within what a permit lasts
    while time.monotonic() < deadline:
        posted, done, _ = producer.call("progress", run.name)
        if posted > done:
            return consumer
        time.sleep(0.005)
    consumer.resume()
    return None


def _strike(run: Run, action: str, victim: str, held: NixlNode) -> None:
    """It happens, and then the engine that is stopped goes on, if it can."""
    node = run.stage.nodes[victim]
    if action in ("killed", "restarted"):
        run.stage.lose(victim)
    elif action == "paused":
        node.pause()
    else:
        node.tell(*(("stop", 5.0) if action == "ended" else ("cancel", run.name)))
    if held is not node:
        held.resume()
    if action == "restarted":
        run.stage.node(victim)
    if action == "paused":
        time.sleep(PAUSE_S)
    if action not in ("killed", "restarted"):
        node.resume()
        node.answer()
    if held is not node:
        held.answer()
    if action == "ended":
        run.end(victim)


# -- before the notification


def before_notification(action: str, victim: str) -> Fault:
    """Every byte is there, and the message that says so is held on its way.

    With an engine that dies the message is lost, as with its host; else it comes in the end.
    """

    def attempt(stage: Stage, delay_s: float, missed: int) -> tuple[Run, bool]:
        detour = stage.detour("P")
        run = Run(stage, via=detour.address)
        run.consume()
        time.sleep(0.1)
        detour.stop(Toward.CONSUMER)
        run.produce()
        if not _all_written(run) or stage.node("D").call("is_delivered", run.name):
            detour.heal()
            run.result()
            return run, False
        time.sleep(delay_s / 5)
        if victim == "P" and action in ("killed", "restarted"):
            stage.lose("P")
            detour.cut()
            if action == "restarted":
                stage.node("P")
        else:
            ACTIONS[action](run, victim)
        detour.heal()
        if victim == "D" and action in LOST:
            run.consume("E")
            run.result("E")
        elif victim == "P" or action != "cancelled":
            run.result()
        return run, True

    return repeated(attempt)


def _all_written(run: Run) -> bool:
    """Whether all WRITEs of it are done before long."""
    producer = run.stage.node(run.producer)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        posted, done, over = producer.call("progress", run.name)
        if over and 0 < posted == done:
            return True
        time.sleep(0.002)
    return False


# -- preemption


def prefill_preempted(stage: Stage, delay_s: float, missed: int) -> tuple[Run, bool]:
    """A prefill that has been written in part is dropped, and made anew on other blocks."""
    _widen(stage)
    run = Run(stage, WIDE_P, WIDE_D, kv_bytes=WIDE_KV_BYTES)
    producer = stage.node(WIDE_P)
    before = producer.call("preemptions")
    run.consume()
    time.sleep(0.1)
    run.produce()
    deadline = time.monotonic() + 3
    while not producer.call("progress", run.name)[1] and time.monotonic() < deadline:
        time.sleep(0.001)
    producer.call("preempt", run.name)
    run.result()
    hit = producer.call("preemptions") > before
    run.must(not hit or run.delivered, "what was made anew was not delivered")
    return run, hit


def waiting_preempted(stage: Stage, delay_s: float) -> Run:
    """The blocks of a request that waits for its KV are taken back, and others offered later."""
    run = Run(stage)
    decoder = stage.node("D")
    run.consume()
    time.sleep(0.05 + delay_s)
    before = decoder.call("counters").get("not_delivered_preempted", 0)
    decoder.call("preempt", run.name)
    run.produce()
    run.result()
    after = decoder.call("counters").get("not_delivered_preempted", 0)
    run.must(after == before + 1, "it was not preempted")
    return run


def decoding_preempted(stage: Stage, delay_s: float, missed: int) -> tuple[Run, bool]:
    """A request that decodes what was delivered loses its blocks, and is computed anew."""
    run = Run(stage, tokens=200)
    decoder = stage.node("D")
    before = decoder.call("preemptions")
    run.consume()
    run.produce()
    deadline = time.monotonic() + 3
    while not decoder.call("is_delivered", run.name) and time.monotonic() < deadline:
        time.sleep(0.001)
    decoder.call("preempt", run.name)
    run.result()
    return run, decoder.call("preemptions") > before


# -- several decode attempts, several engines


def samples(fault: Callable[[Run, list[str]], None]) -> Fault:
    """Three samples of one prompt, each a transfer of its own, and something happens to them."""

    def row(stage: Stage, delay_s: float) -> Run:
        run = Run(stage)
        names = [f"{run.name}-{at}" for at in range(3)]
        for run.name in names:
            run.consume()
            run.produce()
        time.sleep(delay_s / 3)
        fault(run, names)
        for run.name in names:
            run.result()
        return run

    return row


def _give_one_up(run: Run, names: list[str]) -> None:
    run.stage.nodes["D"].call("cancel", names.pop(1))


def one_after_the_other(stage: Stage, delay_s: float) -> Run:
    """A transfer is decoded, and asked for again: at another decode engine, then at the first."""
    run = Run(stage)
    run.consume()
    run.produce()
    run.result()
    run.must(run.delivered == 1, "the first attempt was not delivered")
    for decoder in ("E", "D"):
        run.since.clear()
        run.consume(decoder)
        run.result(decoder)
    return run


def rolling(action: str) -> Fault:
    """Two prefill and two decode engines under load go down and come back, one after the other."""

    def row(stage: Stage, delay_s: float) -> Run:
        run = Run(stage)
        for victim in ("P", "D", "Q", "E"):
            for name in ("P", "D", "Q", "E"):
                stage.node(name)
            asked = [_ask(run, producer, decoder) for producer in "PQ" for decoder in "DE"]
            time.sleep(delay_s / 3)
            ACTIONS[action](run, victim)
            asked += [
                _ask(run, producer, decoder)
                for producer in "PQ"
                for decoder in "DE"
                if victim not in (producer, decoder)
            ]
            stage.node(victim)
            for run.name, run.prompt, producer, decoder in asked:
                there = decoder
                if decoder == victim:  # the router turns to the other one
                    there = "DE".replace(victim, "")
                    run.consume(there, producer)
                run.result(there)
        return run

    return row


def _ask(run: Run, producer: str, decoder: str) -> tuple[str, tuple[int, ...], str, str]:
    run.name, run.prompt = run.stage.transfer()
    run.consume(decoder, producer)
    run.produce(producer)
    return run.name, run.prompt, producer, decoder


MOMENT_FAULTS: dict[str, Fault] = {
    **{
        f"{victim} {action}, mid-WRITE": mid_write(action, victim)
        for action in ACTIONS
        for victim in ("P", "D")
    },
    **{
        f"{victim} {action}, before the notification": before_notification(action, victim)
        for action in ACTIONS
        for victim in ("P", "D")
    },
    "P preempted, in the middle of its prefill": repeated(prefill_preempted),
    "D preempted, waiting": waiting_preempted,
    "D preempted, decoding": repeated(decoding_preempted),
    "three samples of one prompt, P killed": samples(lambda run, _: run.stage.lose("P")),
    "three samples of one prompt, one given up": samples(_give_one_up),
    "a transfer decoded three times": one_after_the_other,
    "rolling restart under load, killed": rolling("killed"),
    "rolling restart under load, ended": rolling("ended"),
}
