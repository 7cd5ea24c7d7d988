"""Configurations in which one certain mistake shows, each as small as it may be."""

from __future__ import annotations

from attrs import evolve

from .bounds import (
    POLICY,
    RETRYING,
    STILL,
    STRONG_UNBOUNDED,
    WEAK_UNBOUNDED,
    Configuration,
    Transfer,
    budgets_of,
)

__all__ = ["OF_RULES"]

STREAM = Transfer(tokens=2, chunks=(1, 2))
"""Two parts, the first of which is written while prefill runs."""

OF_RULES: tuple[Configuration, ...] = (
    Configuration(
        "fences",
        "a link is lost, and the next one too, before a permit was given over it",
        budgets=budgets_of(lose=2),
        prelude=(("arrive", 1), ("offer", 0)),
        rates=STILL,
    ),
    Configuration(
        "two-writers-early",
        "two producer ranks, and the link of one is lost before a permit was given over it",
        producers=(("p", 0), ("p", 1)),
        budgets=budgets_of(lose=1),
        prelude=(("arrive", 1), ("arrive", 2)),
        connections=1,
        rates=STILL,
    ),
    Configuration(
        "weak-parts",
        "a link is lost between two parts, of which the first is done and not visible",
        transfers=(STREAM,),
        blocks=2,
        capabilities=WEAK_UNBOUNDED,
        budgets=budgets_of(lose=1),
        prelude=(("arrive", 1), ("offer", 0)),
        rates=STILL,
    ),
    Configuration(
        "weak-repeated",
        "two parts, and the arrival of one comes twice before that of the other",
        transfers=(STREAM,),
        blocks=2,
        capabilities=WEAK_UNBOUNDED,
        budgets=budgets_of(arrival_repeat=1, cancel=1),
        prelude=(("arrive", 1), ("offer", 0)),
        connections=1,
        rates=STILL,
    ),
    Configuration(
        "overtaken",
        "a message overtakes another, which connections exclude: what is remembered backs them up",
        capabilities=STRONG_UNBOUNDED,
        budgets=budgets_of(overtake=1, resend=1, cancel=1),
        connections=1,
        rates=STILL,
    ),
    Configuration(
        "delivers-retried",
        "a WRITE fails and is made again, and its request is delivered",
        transfers=(STREAM,),
        blocks=2,
        policy=evolve(POLICY, write_retries=1),
        budgets=budgets_of(write_failure=1),
        prelude=(("arrive", 1), ("offer", 0)),
        connections=1,
        rates=STILL,
        eventually="delivers",
    ),
    Configuration(
        "delivers-again",
        "an attempt fails, and its request is delivered by the next",
        transfers=(evolve(STREAM, offers=2),),
        blocks=2,
        policy=RETRYING,
        budgets=budgets_of(write_failure=1),
        prelude=(("arrive", 1), ("offer", 0)),
        connections=1,
        rates=STILL,
        eventually="delivers",
    ),
    Configuration(
        "delivers-ranks",
        "two consumer ranks, and each is delivered, however late it registers",
        consumers=(("d", 0), ("d", 1)),
        prelude=(("arrive", 2),),
        connections=1,
        rates=STILL,
        eventually="delivers",
    ),
    Configuration(
        "frees-relinked",
        "a link is lost while arrivals are outstanding, which count all the same",
        capabilities=WEAK_UNBOUNDED,
        budgets=budgets_of(lose=1),
        prelude=(("arrive", 1), ("offer", 0)),
        rates=STILL,
        eventually="frees",
    ),
)
"""All of them; together fewer than half a million states."""
