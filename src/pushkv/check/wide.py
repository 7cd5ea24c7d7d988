"""Configurations that nobody can exhaust, for whoever walks through them at random."""

from __future__ import annotations

from attrs import evolve

from pushkv.core.ids import Duration

from .bounds import (
    DRIFTING,
    FAULTS,
    POLICY,
    STRONG,
    STRONG_UNBOUNDED,
    WEAK,
    WEAK_UNBOUNDED,
    Configuration,
    Transfer,
    budgets_of,
)

__all__ = ["WIDE"]

OFTEN = 3
EVERYTHING = budgets_of(
    **{name: 1 if name.startswith("crash") else OFTEN for name in FAULTS if name != "lie"},
)
"""Nobody lies: against a producer that says REVOKED and writes all the same there is no rule."""
RETRYING = evolve(POLICY, lease=Duration(5), attempts=3, write_retries=2)
TRANSFERS = (
    Transfer("a", consumers=("d", "e"), tokens=3, chunks=(1, 2, 3), offers=3),
    Transfer("b", consumers=("d",), tokens=2, start=1, chunks=(2,), offers=3),
    Transfer("c", consumers=("e",), producer="q", tokens=2, chunks=(1, 2), offers=3),
    Transfer("z", consumers=("d",), producer="q", offers=3),
)

_ENGINES = Configuration(
    "wide",
    "two decoders and two prefill engines, four transfers, every fault a few times",
    consumers=(("d", 0), ("e", 0)),
    producers=(("p", 0), ("q", 0)),
    transfers=TRANSFERS,
    policy=RETRYING,
    capabilities=STRONG,
    blocks=4,
    budgets=EVERYTHING,
    connections=6,
    proofs=True,
)
_RANKS = Configuration(
    "wide-ranks",
    "two ranks of one engine write into two ranks of another, every fault a few times",
    consumers=(("d", 0), ("d", 1)),
    producers=(("p", 0), ("p", 1)),
    transfers=(
        Transfer("a", tokens=2, chunks=(1, 2), offers=3),
        Transfer("b", tokens=1, offers=3),
    ),
    policy=RETRYING,
    capabilities=STRONG,
    blocks=2,
    budgets=EVERYTHING,
    connections=6,
    proofs=True,
)
_DRIFT = evolve(
    _ENGINES,
    name="wide-drift",
    purpose="the same, with clocks as far apart as they may be",
    policy=evolve(DRIFTING, attempts=3, write_retries=2),
    capabilities=evolve(STRONG, write_bound=Duration(1_800)),
    rates=(2_199, 1_800),
)

WIDE: tuple[Configuration, ...] = (
    _ENGINES,
    evolve(_ENGINES, name="wide-weak", capabilities=WEAK),
    evolve(_ENGINES, name="wide-unbounded", capabilities=STRONG_UNBOUNDED),
    evolve(_ENGINES, name="wide-weak-unbounded", capabilities=WEAK_UNBOUNDED),
    _DRIFT,
    _RANKS,
    evolve(_RANKS, name="wide-ranks-weak", capabilities=WEAK),
)
"""Every kind of transport, several engines or several ranks."""
