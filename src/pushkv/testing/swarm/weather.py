"""What one run is like, drawn from its seed: transport, clocks, faults, bounds, and how often."""

from __future__ import annotations

from enum import StrEnum
from random import Random

from attrs import evolve, frozen

from pushkv.core import rules
from pushkv.core.capabilities import Capabilities
from pushkv.core.ids import Duration, seconds
from pushkv.core.policy import Policy
from pushkv.model.faults import Fault, FaultRule

__all__ = ["Kind", "Weather", "draw"]


class Kind(StrEnum):
    """What weather may be drawn."""

    MIXED = "mixed"
    CROWD = "crowd"
    STORM = "storm"


STRONG = Capabilities(
    "memory",
    done_means_visible=True,
    write_bound=seconds(0.5),
    death_bound=seconds(0.3),
    reaches_successor=False,
)
TRANSPORTS = {
    "strong": STRONG,
    "reaching": evolve(STRONG, reaches_successor=True),
    "weak": evolve(STRONG, done_means_visible=False, reaches_successor=True),
    "strong-unbounded": evolve(STRONG, write_bound=None),
    "weak-unbounded": evolve(STRONG, write_bound=None, done_means_visible=False),
}
"""Without a bound nothing reaches a successor: no grace could be long enough (R13)."""

WHOLE = 128 * 1024 * 1024
WRITE_BUDGETS_BYTES = (1, 256, WHOLE)
"""For one block after the other, for four at once, and for as many as there are."""
PER_ENGINE = 30
"""Requests of one engine that the pools of `_mixed` are made for."""
POLICY = Policy(
    lease=seconds(3),
    resend=seconds(0.5),
    query=seconds(1),
    waiting=seconds(10),
    settle=seconds(1),
    expected=seconds(4),
    hold=seconds(12),
    transfer=seconds(6),
    write_backoff=seconds(0.02),
    attempts=3,
    retry_backoff=seconds(0.1),
    connect=seconds(2),
    connect_backoff=seconds(0.1),
)


@frozen
class Weather:
    """One run's conditions.

    Attributes:
        transport: The name of `capabilities` in `TRANSPORTS`.
        capabilities: What the transport declares.
        kept: What the fabric keeps: less, by the drift of the clocks that bounds are counted on.
        write_faults: Of the fabric.
        message_faults: Of each control connection.
        latency_most: Of a message, without a fault.
        drift_ppm: How far clocks run apart at most.
        blocks: The least and the most blocks of an engine's pool.
        request_blocks_most: Of one request.
        opens: When the first request may arrive and the first engine or path may fail.
        window: Within which all requests arrive after that.
        faults_within: Within about which engines and paths fail.
        per_million: How often a request is cancelled, preempted and so on.
        faults: How many times an engine or a path fails.
        write_budgets_bytes: Each rank has one of these.
    """

    transport: str
    capabilities: Capabilities
    kept: Capabilities
    policy: Policy
    write_faults: tuple[FaultRule, ...]
    message_faults: tuple[FaultRule, ...]
    latency_most: Duration
    drift_ppm: int
    blocks: tuple[int, int]
    request_blocks_most: int
    opens: Duration
    window: Duration
    faults_within: Duration
    per_million: int
    faults: int
    write_budgets_bytes: tuple[int, ...] = (WHOLE,)


def draw(random: Random, kind: Kind, transfers: int, engines: int) -> Weather:
    """The weather of a run of so many transfers on so many engines.

    A pool is a few requests deep where an engine serves some tens of them; it grows with what an
    engine has to serve, else long runs would be spent in queues, with idle links.
    """
    share = -(-transfers // (engines // 2))
    mixed = _mixed(random, transfers, max(1, share // PER_ENGINE))
    match kind:
        case Kind.MIXED:
            return evolve(mixed, write_budgets_bytes=WRITE_BUDGETS_BYTES)
        case Kind.CROWD:
            return _crowd(mixed, share, engines)
        case Kind.STORM:
            return _storm(mixed, transfers)


def _crowd(mixed: Weather, share: int, engines: int) -> Weather:
    """All arrive at once, everybody gets blocks, and WRITEs take long: all are live at once.

    They come when all engines are ready: one rank begins after the other, each with its grace.
    """
    most = mixed.request_blocks_most
    grace = rules.restart_grace(mixed.policy.lease, mixed.capabilities)
    return evolve(
        mixed,
        policy=evolve(POLICY, drift_ppm=mixed.policy.drift_ppm),
        write_faults=_write_faults(mixed.capabilities, 1, (0.2, 0.48)),
        blocks=(share * most, 2 * share * most),
        opens=Duration(2 * grace + grace // 5),
        window=seconds(0.05),
        faults_within=seconds(2),
        per_million=10_000,
        faults=4 + engines // 2,
    )


def _storm(mixed: Weather, transfers: int) -> Weather:
    """Slow WRITEs into tiny pools, over links that are late, lost and cut all the time."""
    return evolve(
        mixed,
        write_faults=_write_faults(mixed.capabilities, 1, (0.0005, 0.48)),
        message_faults=(
            FaultRule(Fault.DELAY, 60_000, most=seconds(3.5)),
            FaultRule(Fault.LOSS, 2_000),
        ),
        blocks=(10, 24),
        window=seconds(10),
        faults_within=seconds(10),
        per_million=60_000,
        faults=30 + transfers,
    )


def _mixed(random: Random, transfers: int, depth: int) -> Weather:
    transport = random.choice(tuple(TRANSPORTS))
    capabilities = TRANSPORTS[transport]
    drift = random.choice((0, 1_000))
    policy = evolve(POLICY, drift_ppm=max(drift, 1_000))
    if random.random() < 0.3:
        policy = evolve(policy, exposed_blocks=random.randrange(8, 24))
    if random.random() < 0.3:
        policy = evolve(policy, remembered=random.randrange(2, 20))
    if random.random() < 0.2:
        policy = evolve(policy, transfers=random.randrange(10, 40))
    least, most = random.choice(((10, 24), (10, 24), (16, 64), (400, 800)))
    scale, slow_s = random.choice((0, 1, 1, 4)), random.choice((0.02, 0.1, 0.45))
    write_faults = _write_faults(capabilities, scale, (0.0005, slow_s))
    message_faults = _message_faults(random)
    latency_most = seconds(random.choice((0.0005, 0.002, 0.02)))
    window = seconds(random.choice((4, 10, 25)))
    return Weather(
        transport,
        capabilities,
        _kept(capabilities, drift),
        policy,
        write_faults,
        message_faults,
        latency_most,
        drift,
        (least * depth, most * depth),
        5,
        Duration(0),
        window,
        window,
        random.choice((0, 20_000, 60_000)),
        random.choice((0, 1, 3)) * (10 + transfers // 20),
    )


def _kept(capabilities: Capabilities, drift_ppm: int) -> Capabilities:
    bound = capabilities.write_bound
    if bound is None:
        return capabilities
    return evolve(capabilities, write_bound=Duration(bound - 3 * bound * drift_ppm // 1_000_000))


def _write_faults(
    capabilities: Capabilities, scale: int, takes_s: tuple[float, float]
) -> tuple[FaultRule, ...]:
    least, most = takes_s
    late = capabilities.write_bound or seconds(4)

    def rule(fault: Fault, per_million: int, most: float = 0) -> FaultRule:
        return FaultRule(fault, per_million * scale, most=seconds(most))

    return (
        FaultRule(Fault.DELAY, 900_000, least=seconds(least), most=seconds(most)),
        rule(Fault.REORDERING, 50_000),
        rule(Fault.WRITE_FAILURE, 10_000),
        rule(Fault.UNKNOWN_OUTCOME, 10_000, late / 1e9),
        rule(Fault.SOURCE_BUSY, 100_000),
        rule(Fault.REFUSED, 5_000),
        rule(Fault.PARTITION, 2_000, 2.5),
        rule(Fault.PARTITION_ONE_WAY, 2_000, 2.5),
        rule(Fault.ARRIVAL_LOSS, 5_000),
        rule(Fault.ARRIVAL_DUPLICATION, 50_000, 0.5),
    )


def _message_faults(random: Random) -> tuple[FaultRule, ...]:
    scale = random.choice((0, 1, 1, 3))
    return (
        FaultRule(Fault.DELAY, 10_000 * scale, most=seconds(1.5)),
        FaultRule(Fault.LOSS, 500 * scale),
    )
