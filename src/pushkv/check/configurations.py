"""What is searched, as data: the standard configurations, and those made from them."""

from __future__ import annotations

from attrs import evolve

from pushkv.core.ids import Duration

from .bounds import (
    DRIFTING,
    FAULTS,
    POLICY,
    RETRYING,
    STILL,
    STRONG,
    STRONG_UNBOUNDED,
    WEAK,
    WEAK_UNBOUNDED,
    Configuration,
    Transfer,
    budgets_of,
)

__all__ = ["DEEP", "FAULTS", "MUTATION", "STANDARD", "Configuration", "Transfer", "by_name"]

STANDARD: tuple[Configuration, ...] = (
    Configuration(
        "cancel",
        "a request is given up while its link is lost",
        budgets=budgets_of(cancel=1, lose=1, refusal=1),
    ),
    Configuration(
        "patience",
        "every deadline may come first",
        budgets=budgets_of(impatience=1, resend=1),
    ),
    Configuration(
        "repeated",
        "messages come twice",
        budgets=budgets_of(repeat=1, cancel=1, resend=1),
        connections=1,
        rates=STILL,
    ),
    Configuration(
        "abort",
        "the producer gives a request up, with a WRITE in flight or before",
        budgets=budgets_of(abort=1, cancel=1, refusal=1),
    ),
    Configuration(
        "pool",
        "two transfers want the same block",
        transfers=(Transfer("a"), Transfer("b")),
        budgets=budgets_of(cancel=1),
    ),
    Configuration(
        "retry",
        "an attempt fails and another is made into the same block",
        transfers=(Transfer(offers=2),),
        policy=RETRYING,
        budgets=budgets_of(write_failure=1, cancel=1),
    ),
    Configuration(
        "relink",
        "a link is lost, and a new attempt made over the next one",
        transfers=(Transfer(offers=2),),
        policy=RETRYING,
        budgets=budgets_of(lose=1),
    ),
    Configuration(
        "unknown",
        "nobody can say what became of a WRITE",
        budgets=budgets_of(unknown_outcome=1, cancel=1, lose=1),
    ),
    Configuration(
        "taken-back",
        "the consumer's engine takes the blocks back and admits the request again",
        transfers=(Transfer(offers=2),),
        budgets=budgets_of(take_back=1, cancel=1),
    ),
    Configuration(
        "two-decoders",
        "two decoders want the same transfer, one after the other has failed, or at once",
        consumers=(("d", 0), ("e", 0)),
        transfers=(Transfer(consumers=("d", "e")),),
        budgets=budgets_of(cancel=1, lose=1),
        prelude=(("arrive", 2),),
        rates=STILL,
    ),
    Configuration(
        "two-writers",
        "two producer ranks write into one consumer rank",
        producers=(("p", 0), ("p", 1)),
        budgets=budgets_of(cancel=1, write_failure=1),
        connections=1,
        rates=STILL,
    ),
    Configuration(
        "two-writers-lost",
        "two producer ranks, and one of the links is lost",
        producers=(("p", 0), ("p", 1)),
        budgets=budgets_of(lose=1),
        prelude=(("arrive", 1), ("arrive", 2), ("offer", 0)),
        rates=STILL,
    ),
    Configuration(
        "two-readers",
        "one producer rank serves two consumer ranks",
        consumers=(("d", 0), ("d", 1)),
        budgets=budgets_of(cancel=1, write_failure=1, lose=1),
        prelude=(("arrive", 2),),
        connections=1,
        rates=STILL,
    ),
    Configuration(
        "streaming",
        "two parts, written while prefill runs, is preempted and begins again",
        transfers=(Transfer(tokens=2, chunks=(1, 2)),),
        blocks=2,
        policy=evolve(POLICY, write_retries=1),
        budgets=budgets_of(preempt=1, write_failure=1, cancel=1),
        connections=1,
        rates=STILL,
    ),
    Configuration(
        "streaming-lost",
        "two parts, written while prefill runs; the link is lost, and a new attempt made",
        transfers=(Transfer(tokens=2, chunks=(1, 2), offers=2),),
        blocks=2,
        policy=RETRYING,
        budgets=budgets_of(lose=1, abort=1),
        prelude=(("arrive", 1), ("offer", 0)),
        rates=STILL,
    ),
    Configuration(
        "streaming-permits",
        "two parts, and the permit ends in between",
        transfers=(Transfer(tokens=2, chunks=(1, 2)),),
        blocks=2,
        budgets=budgets_of(refusal=1, preempt=1),
        prelude=(("arrive", 1), ("offer", 0)),
        connections=1,
    ),
    Configuration(
        "streaming-faults",
        "two parts, and prefill is preempted, given up or cut off in between",
        transfers=(Transfer(tokens=2, chunks=(1, 2)),),
        blocks=2,
        budgets=budgets_of(preempt=1, lose=1, abort=1, resend=1),
        prelude=(("arrive", 1), ("offer", 0)),
        connections=1,
        rates=STILL,
    ),
    Configuration(
        "streaming-retry",
        "two parts fail, and are written again, given up or cut off meanwhile",
        transfers=(Transfer(tokens=2, chunks=(1, 2)),),
        blocks=2,
        policy=evolve(POLICY, write_retries=2),
        budgets=budgets_of(write_failure=2, unknown_outcome=1, lose=1, abort=1, resend=1),
        prelude=(("arrive", 1), ("offer", 0)),
        connections=1,
        rates=STILL,
    ),
    Configuration(
        "two-transfers",
        "a transfer is offered while the link of another is suspected",
        transfers=(Transfer("a"), Transfer("b")),
        blocks=2,
        budgets=budgets_of(impatience=1),
        prelude=(("arrive", 1), ("offer", 0)),
        rates=STILL,
    ),
    Configuration(
        "part-by-part",
        "a WRITE of two blocks lands in part, fails, and is tried again",
        transfers=(Transfer(tokens=2, chunks=(2,)),),
        blocks=2,
        policy=evolve(POLICY, write_retries=1),
        budgets=budgets_of(write_failure=2, unknown_outcome=1, cancel=1),
        prelude=(("arrive", 1), ("offer", 0)),
        connections=1,
    ),
    Configuration(
        "nothing-to-send",
        "all of the prompt is cached at the consumer",
        transfers=(Transfer(start=1),),
        budgets=budgets_of(cancel=1, lose=1),
    ),
    Configuration(
        "weak",
        "done does not mean visible; arrivals are lost and come twice",
        capabilities=WEAK,
        budgets=budgets_of(cancel=1, arrival_loss=1, arrival_repeat=1),
    ),
    Configuration(
        "weak-lost",
        "done does not mean visible, and the link is lost",
        capabilities=WEAK,
        budgets=budgets_of(lose=1, impatience=1),
        prelude=(("arrive", 1), ("offer", 0)),
    ),
    Configuration(
        "unbounded",
        "nobody knows how long a WRITE may take; only a proof frees",
        capabilities=STRONG_UNBOUNDED,
        budgets=budgets_of(lose=1, unknown_outcome=1, cancel=1),
        proofs=True,
    ),
    Configuration(
        "unbounded-deaths",
        "nobody knows how long a WRITE may take, and either end dies",
        capabilities=STRONG_UNBOUNDED,
        budgets=budgets_of(crash_producer=1, crash_consumer=1, unknown_outcome=1),
        proofs=True,
        rates=STILL,
    ),
    Configuration(
        "weak-unbounded",
        "neither bound nor visibility",
        capabilities=WEAK_UNBOUNDED,
        budgets=budgets_of(lose=1, cancel=1, arrival_loss=1, impatience=1),
        proofs=True,
        rates=STILL,
    ),
    Configuration(
        "weak-deaths",
        "neither bound nor visibility, and the writer dies",
        capabilities=WEAK_UNBOUNDED,
        budgets=budgets_of(crash_producer=1, cancel=1, unknown_outcome=1),
        proofs=True,
        prelude=(("arrive", 1), ("offer", 0)),
        rates=STILL,
    ),
    Configuration(
        "drift",
        "the consumer's clock is as fast, the producer's as slow as they may be",
        policy=DRIFTING,
        capabilities=evolve(STRONG, write_bound=Duration(1_800)),
        rates=(2_199, 1_800),
        budgets=budgets_of(lose=1),
    ),
    Configuration(
        "drift-weak",
        "the same where done does not mean visible",
        policy=DRIFTING,
        capabilities=evolve(WEAK, write_bound=Duration(1_800)),
        rates=(2_199, 1_800),
        budgets=budgets_of(cancel=1),
        connections=1,
    ),
    Configuration(
        "consumer-restart",
        "the consumer dies and begins again on the same addresses",
        transfers=(Transfer(offers=2),),
        budgets=budgets_of(crash_consumer=1),
    ),
    Configuration(
        "producer-restart",
        "the producer dies with WRITEs in flight and begins again",
        transfers=(Transfer(offers=2),),
        budgets=budgets_of(crash_producer=1),
    ),
    Configuration(
        "delivers",
        "where nothing goes wrong every request is delivered, and everything given back",
        transfers=(Transfer("a", tokens=2, chunks=(1, 2)), Transfer("b")),
        blocks=3,
        prelude=(("arrive", 1),),
        rates=STILL,
        eventually="delivers",
    ),
    Configuration(
        "delivers-in-time",
        "the same while permits end and are asked for again",
        capabilities=STRONG_UNBOUNDED,
        budgets=budgets_of(refusal=1),
        prompt=True,
        eventually="delivers",
    ),
    Configuration(
        "delivers-weak",
        "every request is delivered where done does not mean visible, too",
        transfers=(Transfer(tokens=2, chunks=(1, 2)),),
        blocks=2,
        capabilities=WEAK_UNBOUNDED,
        prelude=(("arrive", 1),),
        rates=STILL,
        eventually="delivers",
    ),
    Configuration(
        "ends-aborted",
        "the producer preempts or gives up, and yet everything is given back",
        transfers=(Transfer(tokens=2, chunks=(1, 2)),),
        blocks=2,
        capabilities=STRONG_UNBOUNDED,
        budgets=budgets_of(abort=1, preempt=1),
        prelude=(("arrive", 1), ("offer", 0)),
        connections=1,
        rates=STILL,
        proofs=True,
        free=("impatience",),
        eventually="ends",
    ),
    Configuration(
        "ends-retried",
        "an attempt fails, another is made, and yet everything is given back",
        transfers=(Transfer(offers=2),),
        policy=RETRYING,
        capabilities=STRONG_UNBOUNDED,
        budgets=budgets_of(write_failure=1, cancel=1),
        prelude=(("arrive", 1), ("offer", 0)),
        connections=1,
        rates=STILL,
        proofs=True,
        free=("impatience",),
        eventually="ends",
    ),
    Configuration(
        "ends-with-the-writer",
        "the writer dies, and once that is proven everything is given back",
        capabilities=WEAK_UNBOUNDED,
        budgets=budgets_of(crash_producer=1, cancel=1),
        prelude=(("arrive", 1), ("offer", 0)),
        rates=STILL,
        proofs=True,
        free=("impatience",),
        eventually="ends",
    ),
    Configuration(
        "ends",
        "a WRITE fails, whoever likes loses patience, and yet everything is given back",
        budgets=budgets_of(write_failure=1),
        connections=1,
        prelude=(("arrive", 1), ("offer", 0)),
        free=("impatience",),
        eventually="ends",
    ),
    Configuration(
        "ends-in-time",
        "a lost link and an unknown WRITE end with the fence and the bound",
        budgets=budgets_of(lose=1),
        connections=1,
        free=("impatience",),
        prelude=(("arrive", 1), ("offer", 0)),
        eventually="ends",
    ),
    Configuration(
        "ends-weak",
        "arrivals are lost, and what waited for them ends",
        capabilities=WEAK,
        budgets=budgets_of(arrival_loss=1),
        connections=1,
        free=("impatience",),
        prelude=(("arrive", 1), ("offer", 0)),
        eventually="ends",
    ),
)


def _deeper(configuration: Configuration) -> Configuration:
    """The same with every fault once more, and one link more."""
    budgets = tuple((name, times + 1) for name, times in configuration.budgets)
    return evolve(configuration, budgets=budgets, connections=configuration.connections + 1)


DEEP: tuple[Configuration, ...] = tuple(_deeper(each) for each in STANDARD if not each.eventually)
"""Each standard configuration with larger bounds; they take hours to exhaust."""


MUTATION_NAMES = (
    "delivers-in-time",
    "delivers-weak",
    "weak-deaths",
    "unbounded-deaths",
    "streaming-faults",
    "nothing-to-send",
    "repeated",
    "streaming-lost",
    "streaming",
    "two-writers-lost",
    "two-transfers",
    "delivers",
    "producer-restart",
    "retry",
    "ends-aborted",
    "ends-retried",
    "streaming-retry",
    "ends-with-the-writer",
    "weak",
    "abort",
    "weak-unbounded",
    "ends",
)
MUTATION: tuple[Configuration, ...] = tuple(
    each for each in STANDARD if each.name in MUTATION_NAMES
)
"""Those that are small enough to be searched again for each row of each table."""


def by_name(name: str) -> Configuration:
    """The standard configuration of that name.

    Raises:
        KeyError: There is none.
    """
    return {each.name: each for each in STANDARD}[name]
