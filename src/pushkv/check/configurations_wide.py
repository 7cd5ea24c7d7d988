"""Standard configurations of more parties: ranks while time moves, and two prefill engines.

Their preludes go on until everything is under way; what is searched is how it ends.
"""

from __future__ import annotations

from .bounds import RETRYING, Configuration, Transfer, budgets_of

__all__ = ["WIDE_STANDARD"]

TWO_PREFILLS = (("p", 0), ("q", 0))
REROUTED = (Transfer("a"), Transfer("b", producer="q"))
"""A request whose legs are sent again, to another producer and under a new name."""
UNDER_WAY = (("arrive", 1), ("arrive", 2), ("offer", 0), ("compute", 1))

WIDE_STANDARD: tuple[Configuration, ...] = (
    Configuration(
        "writers-in-time",
        "two producer ranks have posted when a link is lost; permits end, the fence passes",
        producers=(("p", 0), ("p", 1)),
        budgets=budgets_of(lose=1),
        connections=1,
        prelude=(*UNDER_WAY, ("compute", 2), ("post", 0), ("post", 0), ("lose", 0)),
    ),
    Configuration(
        "readers-in-time",
        "WRITEs fly to two consumer ranks when a link is lost; permits end, the fence passes",
        consumers=(("d", 0), ("d", 1)),
        budgets=budgets_of(lose=1),
        connections=1,
        prelude=(
            ("arrive", 2),
            ("offer", 0),
            ("offer", 1),
            ("compute", 2),
            ("post", 0),
            ("post", 0),
            ("lose", 0),
        ),
    ),
    Configuration(
        "rerouted",
        "a request is given up at one producer and sent to another, into the same block",
        producers=TWO_PREFILLS,
        transfers=REROUTED,
        budgets=budgets_of(cancel=1),
        connections=1,
        prelude=UNDER_WAY,
    ),
    Configuration(
        "rerouted-lost",
        "the link is lost over a WRITE, and the request sent to another producer",
        producers=TWO_PREFILLS,
        transfers=REROUTED,
        budgets=budgets_of(lose=1),
        connections=1,
        prelude=(*UNDER_WAY, ("post", 0), ("lose", 0)),
    ),
    Configuration(
        "rerouted-alone",
        "one leg alone is sent again: the same transfer at two producers",
        producers=TWO_PREFILLS,
        transfers=(Transfer(offers=2, again="q"),),
        policy=RETRYING,
        budgets=budgets_of(lose=1),
        connections=1,
        prelude=(*UNDER_WAY, ("post", 0), ("lose", 0)),
    ),
)
