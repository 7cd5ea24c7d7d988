"""Every mistake that is known by name, and where each is missed."""

from __future__ import annotations

from .elsewhere import ELSEWHERE
from .mistakes import MISTAKES
from .mistakes_outside import OUTSIDE
from .taken_out import TAKEN_OUT

__all__ = ["EXCLUDED", "KNOWN", "MISSED_IN", "TOLD_BY", "rule_of"]

KNOWN = TAKEN_OUT | MISTAKES | OUTSIDE | ELSEWHERE
"""The rules taken out, and other ways to get the protocol wrong, each against a rule."""

MISSED_IN = {
    "cancel frees": "streaming",
    "link end frees": "ends",
    "no permit": "ends",
    "permit without drift": "drift",
    "permit from the grant": "ends",
    "write bound not counted": "ends",
    "fence at the last grant": "ends",
    "grant on an ended link": "ends",
    "nothing remembered": "weak-unbounded",
    "verdict before the handles close": "ends",
    "any attempt will do": "retry",
    "done is taken for visible": "weak",
    "new permit covers old registrations": "relink",
    "first rank frees": "two-writers-lost",
    "first rank delivers": "two-writers-lost",
    "no restart grace": "consumer-restart",
    "a new incarnation proves death": "producer-restart",
    "an unknown write is over": "unknown",
    "settling by the own clock alone": "drift-weak",
    "coverage unchecked": "lying",
    "the newest link has the fence": "fences",
    "one fence per engine": "two-writers-early",
    "any grant will do": "producer-restart",
    "a verdict frees without arrivals": "weak",
    "parts are forgotten when the link ends": "weak-parts",
    "what was computed is kept when preempted": "streaming",
    "a preempted source goes at once": "streaming-unknown",
    "part numbers are used again": "delivers-retried",
    "what was ordered is kept for the next attempt": "delivers-again",
    "abort without a drain": "abort",
    "failed parts are owed": "delivers-retried",
    "exposure is not counted": "weak",
    "the source is free when registered ranks are": "delivers-ranks",
    "no producer rank": "two-writers",
    "no consumer rank": "two-readers",
    "a registration takes the place of one that drains": "two-decoders",
    "attempts count from zero": "retry",
    "arrivals are void with their link": "frees-relinked",
    "a cancel is ignored before a retry": "retry",
    "a revoke is unanswered before the request comes": "cancel",
    "a tombstone ends by time": "weak-lost",
    "a tombstone until received where messages overtake": "overtaken",
    "a write is open only when posted": "cancel",
    "a permit is checked when ordered": "ends",
    "waiting has no end": "delivers-in-time",
    "a revoke is waited for without an end": "nothing-to-send",
    "a write is waited for without an end": "delivers-in-time",
    "late input is not counted": "repeated",
    "a repeated registration is served again": "repeated",
    "the reason is lost on the way": "streaming-faults",
    "siblings blame each other": "two-writers-early",
    "an expired source is told as any other": "two-transfers",
    "a time out frees": "ends",
    "a new link frees": "fences",
    "a hold ends under a write": "ends",
    "what is in flight is forgotten with the link": "weak-parts",
    "the first error closes the others": "streaming-retry",
    "what was given back is served again": "delivers-again",
    "arrivals are counted": "weak-repeated",
    "a late success revives": "repeated",
    "a failed write ends nothing": "delivers-retried",
    "a hold has no end": "delivers-in-time",
    "a quarantine has no end": "fences",
    "whoever is unreachable is waited for": "delivers-in-time",
    "late input raises": "repeated",
}
"""Configurations in which one is missed after few states."""

TOLD_BY = {
    "a cancel is not sent": "b23_abort_in_every_state",
    "nothing to transfer is not told": "b04_nothing_to_transfer",
    "samples share a transfer": "b21_samples_have_their_own_keys",
    "whoever answers is asked": "b75_another_life_at_the_address",
}
"""Scenario scripts that come out otherwise with those that cost no safety, or need an engine."""

EXCLUDED = {
    "a grant names no incarnation": "a connection joins two lives, and a GRANT goes over no other",
}
"""Why the rest changes nothing in the search; a test sends by hand what would have to come."""


def rule_of(name: str) -> str:
    """Which rule is not in force: the first word of what is said about it."""
    said = KNOWN[name].__doc__ or ""
    return said.split(".")[0].split(":")[0].strip()
