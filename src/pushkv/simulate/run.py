"""Run one simulation and sum it up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from math import ceil
from time import process_time

from attrs import frozen

from .deaths import Deaths
from .requests import Request, Try
from .settings import Settings
from .world import World

__all__ = ["Interrupted", "Result", "Spread", "simulate"]


class Interrupted(Exception):  # noqa: N818
    """Somebody pressed Ctrl-C; `result` is of what had ended by then."""

    def __init__(self, result: Result) -> None:
        super().__init__("interrupted")
        self.result = result


@frozen
class Spread:
    """How a quantity is spread over requests; all zero if there was none."""

    mean: float
    p50: float
    p95: float
    p99: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of these values; percentiles are values that occurred (nearest rank)."""
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0, 0)
        ordered, n = sorted(values), len(values)
        p50, p95, p99 = (ordered[ceil(share * n) - 1] for share in (0.5, 0.95, 0.99))
        return cls(sum(values) / n, p50, p95, p99, n)


@frozen
class Result:
    """What a run measured. Seconds of virtual time, per request that has not failed.

    Attributes:
        ttft_s: From arrival to the first token.
        tpot_s: Between tokens after the first, per request.
        prefill_s: From arrival until the prompt was computed.
        handover_s: From then until its KV was at the decode engine.
        wait_s: In the decode engine's queue until it had blocks.
        slot_s: From KV in place to the first token.
        reserved_block_s: Decode blocks times seconds for which they were taken without KV in
            place, per request.
        per_s: Requests that ended, by the time from the first arrival to the last end.
        messages: Control messages per request.
        tries: Tries per request; more than 1 where prefill engines were lost.
        quarantined_most: Decode blocks that waited for a proof, at most, in all engines.
        cpu_s: Processor time that the run took here.
        events: Calls of the timeline.
        digest: Of every instant of every request: equal where two runs are.
        partial: It was interrupted.
    """

    requests: int
    ended: int
    failed: int
    ttft_s: Spread
    tpot_s: Spread
    prefill_s: Spread
    handover_s: Spread
    wait_s: Spread
    slot_s: Spread
    reserved_block_s: float
    per_s: float
    messages: float
    tries: float
    deaths: int
    quarantined_most: int
    virtual_s: float
    cpu_s: float
    events: int
    digest: str
    partial: bool


def simulate(settings: Settings, progress: Callable[[int], None] | None = None) -> Result:
    """Run `settings` to its end.

    Raises:
        ConfigurationError: The settings contradict each other.
        Interrupted: Ctrl-C.
    """
    began = process_time()
    world = World(settings)
    deaths = Deaths(world)
    whole = world.run(progress) if progress else world.run()
    result = _sum_up(world, deaths, process_time() - began, partial=not whole)
    if not whole:
        raise Interrupted(result)
    return result


def _sum_up(world: World, deaths: Deaths, cpu_s: float, *, partial: bool) -> Result:
    good = [each for each in world.requests if each.ended and not each.failed]
    tries = [one for each in good if (one := each.now) is not None]
    moved = [one for one in tries if one.delivered_at >= 0]
    ended = [each for each in world.requests if each.ended]
    last = max((each.ended_at for each in ended), default=world.timeline.start)
    first = world.requests[0].arrival
    decoded = [each for each in good if each.output > 1]
    return Result(
        requests=len(world.requests),
        ended=world.ended,
        failed=sum(each.failed for each in world.requests),
        ttft_s=_spread((each.first_at - each.arrival) for each in good),
        tpot_s=_spread((e.ended_at - e.first_at) / (e.output - 1) for e in decoded),
        prefill_s=_spread((one.prefilled_at - one.request.arrival) for one in tries),
        handover_s=_spread((one.delivered_at - one.prefilled_at) for one in moved),
        wait_s=_spread((one.admitted_at - one.waits_at) for one in moved),
        slot_s=_spread((one.request.first_at - one.delivered_at) for one in moved),
        reserved_block_s=sum(_reserved(world, one) for one in moved) / max(1, len(moved)),
        per_s=len(ended) / max(1e-9, (last - first) / 1e9),
        messages=world.handover.messages() / max(1, len(ended)),
        tries=sum(each.tries for each in ended) / max(1, len(ended)),
        deaths=deaths.count,
        quarantined_most=deaths.quarantined_most,
        virtual_s=(world.timeline.now - world.timeline.start) / 1e9,
        cpu_s=cpu_s,
        events=world.timeline.happened,
        digest=_digest(world.requests),
        partial=partial,
    )


def _spread(nanoseconds: Iterable[float]) -> Spread:
    return Spread.of([each / 1e9 for each in nanoseconds])


def _reserved(world: World, one: Try) -> float:
    tokens = one.request.prompt + one.request.output
    blocks = -(-tokens // world.settings.engine.block_tokens)
    return blocks * (one.delivered_at - one.admitted_at) / 1e9


def _digest(requests: list[Request]) -> str:
    told = blake2b(digest_size=8)
    for each in requests:
        told.update(f"{each.number} {each.tries} {each.first_at} {each.ended_at}\n".encode())
    return told.hexdigest()
