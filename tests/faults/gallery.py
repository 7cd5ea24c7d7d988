"""One transfer in every phase at once, so that whatever happens then happens in all of them."""

from __future__ import annotations

from pushkv.testing.transport_faults import Fate, Stage

from .rig import Pair

__all__ = ["EARLY", "SERVED", "gallery"]

EARLY = ("expected", "queued", "prefilling", "preempted")
"""Phases before the end of prefill."""
SERVED = (*EARLY, "writing", "retrying", "draining")
"""Phases in which an attempt is being served; each is its transfer's name."""
SLOW_RETRY = {"write_backoff": 20_000_000_000}
"""For the producer of a gallery: a retry must not come before it is looked at."""


async def gallery(pair: Pair, but: tuple[str, ...] = ()) -> dict[str, int]:
    """Bring transfers into the phases in which an attempt is served; returns their attempts."""
    phases = [phase for phase in SERVED if phase not in but]
    attempts = {phase: await _bring(pair, phase) for phase in phases}
    for phase in phases:
        await pair.producer.stands("producer", phase, phase)
    return attempts


async def _bring(pair: Pair, phase: str) -> int:
    producer = pair.producer
    tokens = 48
    if phase == "expected":
        return pair.offer(phase, tokens=tokens)
    producer.arrive(phase, tokens)
    if phase == "queued":
        return pair.offer(phase, tokens=tokens)
    if phase in ("prefilling", "preempted"):
        producer.compute(phase, 16)
        attempt = pair.offer(phase, tokens=tokens)
        if phase == "preempted":
            await producer.stands("producer", phase, "prefilling")
            producer.preempt(phase)
        return attempt
    if phase == "retrying":
        pair.writes.fate(phase, Fate.FAILED)
    else:
        pair.writes.hold(Stage.COMPLETION, phase)
    producer.compute(phase, tokens, final=True)
    attempt = pair.offer(phase, tokens=tokens)
    if phase == "draining":
        await producer.stands("producer", phase, "writing")
        producer.abort(phase)
    return attempt
