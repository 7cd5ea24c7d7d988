"""What is searched for as long as is asked: worlds in which several things go wrong at once."""

from __future__ import annotations

from attrs import evolve

from pushkv.core.ids import Duration

from .bounds import (
    DRIFTING,
    FAULTS,
    RETRYING,
    STILL,
    STRONG,
    STRONG_UNBOUNDED,
    WEAK,
    Configuration,
    Transfer,
    budgets_of,
)
from .configurations import STANDARD

__all__ = ["DEEP"]

TWO = (Transfer("a"), Transfer("b"))
STREAMED = Transfer(tokens=2, chunks=(1, 2))

TOGETHER: tuple[Configuration, ...] = (
    Configuration(
        "two-lost-and-cancelled",
        "two transfers want the same block; one is given up, the link is lost, time passes",
        transfers=TWO,
        budgets=budgets_of(cancel=1, lose=1),
    ),
    Configuration(
        "elsewhere",
        "an attempt fails at one decoder and another is made at the other; links are lost",
        consumers=(("d", 0), ("e", 0)),
        transfers=(Transfer(consumers=("d", "e"), offers=2),),
        policy=RETRYING,
        budgets=budgets_of(write_failure=1, lose=1, cancel=1),
        prelude=(("arrive", 2),),
        rates=STILL,
    ),
    Configuration(
        "streamed-and-preempted",
        "parts are written while prefill is preempted, the link lost, and the permit ends",
        transfers=(STREAMED,),
        blocks=2,
        budgets=budgets_of(preempt=1, lose=1, refusal=1),
    ),
    Configuration(
        "drift-between-two",
        "under the worst drift two transfers want the same block, and the link is lost",
        transfers=TWO,
        policy=DRIFTING,
        capabilities=evolve(STRONG, write_bound=Duration(1_800)),
        rates=(2_199, 1_800),
        budgets=budgets_of(lose=1, cancel=1),
    ),
    Configuration(
        "four-engines",
        "two decoders and two producers, two transfers that either decoder may want",
        consumers=(("d", 0), ("e", 0)),
        producers=(("p", 0), ("q", 0)),
        transfers=(
            Transfer("a", consumers=("d", "e")),
            Transfer("b", consumers=("d", "e"), producer="q"),
        ),
        budgets=budgets_of(cancel=1, write_failure=1),
        connections=1,
        prelude=(("arrive", 2), ("arrive", 3)),
        rates=STILL,
    ),
    Configuration(
        "three-transfers",
        "three transfers want two blocks, and WRITEs of theirs fail",
        transfers=(*TWO, Transfer("c")),
        blocks=2,
        budgets=budgets_of(cancel=2, write_failure=1),
        prelude=(("arrive", 1),) * 3,
        connections=1,
        rates=STILL,
    ),
    Configuration(
        "both-restart",
        "either end dies while two transfers want the same block",
        transfers=TWO,
        budgets=budgets_of(crash_consumer=1, crash_producer=1),
    ),
    Configuration(
        "weak-streamed",
        "done does not mean visible; of two parts arrivals are lost, and so is the link",
        transfers=(STREAMED,),
        blocks=2,
        capabilities=WEAK,
        budgets=budgets_of(arrival_loss=1, lose=1, cancel=1),
    ),
    Configuration(
        "writers-and-readers",
        "two producer ranks and two consumer ranks, and a link is lost",
        consumers=(("d", 0), ("d", 1)),
        producers=(("p", 0), ("p", 1)),
        budgets=budgets_of(lose=1, write_failure=1, cancel=1),
        connections=1,
        prelude=(("arrive", 2), ("arrive", 3)),
        rates=STILL,
    ),
    Configuration(
        "everything-once",
        "every fault there is, once",
        transfers=(Transfer(offers=2),),
        policy=RETRYING,
        budgets=budgets_of(**{fault: 1 for fault in FAULTS if fault != "lie"}),
        proofs=True,
    ),
    Configuration(
        "ends-twice-retried",
        "two attempts fail, a link is lost, and yet everything is given back",
        transfers=(Transfer(offers=2),),
        policy=RETRYING,
        capabilities=STRONG_UNBOUNDED,
        budgets=budgets_of(write_failure=2, cancel=1, lose=1),
        rates=STILL,
        proofs=True,
        free=("impatience",),
        eventually="ends",
    ),
)


def _deeper(configuration: Configuration) -> Configuration:
    """The same with every fault once more, and one link more."""
    budgets = tuple((name, times + 1) for name, times in configuration.budgets)
    return evolve(
        configuration,
        name=f"{configuration.name}-deeper",
        budgets=budgets,
        connections=configuration.connections + 1,
    )


DEEP = (*TOGETHER, *(_deeper(each) for each in STANDARD if not each.eventually))
"""Those with several faults at once, then each standard one with larger bounds."""
