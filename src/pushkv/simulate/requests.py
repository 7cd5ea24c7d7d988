"""Requests, their tries, and the traffic that makes them."""

from __future__ import annotations

from math import ceil, exp, log, log1p, sinh
from random import Random

from attrs import define

from .engine import Engine, Job
from .handover import Transfer
from .settings import Settings
from .timeline import nanoseconds

__all__ = ["Request", "Try", "arrivals"]


@define(eq=False)
class Try:
    """One way of a request through the engines; another one follows where a prefill engine is lost.

    Attributes:
        name: Of its transfer, and of whoever holds its blocks.
        decode: Chosen at once, or after prefill.
        admitted_at: When the decode engine took blocks for it; -1 before, as everywhere.
        prefilled_at: When its prompt was computed.
        delivered_at: When its KV was in place.
    """

    request: Request
    name: str
    prefill: Engine
    decode: Engine | None = None
    transfer: Transfer | None = None
    decode_job: Job | None = None
    waits_at: int = -1
    admitted_at: int = -1
    prefilled_at: int = -1
    delivered_at: int = -1


@define(eq=False)
class Request:
    """A request and what became of it. Instants in nanoseconds; -1 for what did not happen.

    Attributes:
        now: The try that counts.
        tries: How many there were.
        failed: It ended with an error.
    """

    number: int
    arrival: int
    prompt: int
    output: int
    now: Try | None = None
    tries: int = 0
    first_at: int = -1
    ended_at: int = -1
    failed: bool = False

    @property
    def ended(self) -> bool:
        """Whether its client has all of it, or an error."""
        return self.ended_at >= 0


def arrivals(settings: Settings, start: int) -> list[Request]:
    """All requests of a run, by arrival; the same for every design with the same seed."""
    traffic = settings.traffic
    random = Random(f"traffic {settings.seed}")  # noqa: S311
    at, instants, lengths = 0.0, [], []
    mean = sinh(traffic.spread) / traffic.spread if traffic.spread else 1.0
    for _ in range(traffic.requests):
        at += random.expovariate(traffic.rate_hz)
        instants.append(at)
        prompt, output = (
            max(1, round(tokens * exp(random.uniform(-1, 1) * traffic.spread) / mean))
            for tokens in (traffic.prompt_tokens, traffic.output_tokens)
        )
        if traffic.stops:
            output = min(output, max(1, ceil(log(1 - random.random()) / log1p(-traffic.stops))))
        lengths.append((prompt, output))
    stretch = traffic.requests / traffic.rate_hz / at if traffic.exact else 1.0
    return [
        Request(number, start + nanoseconds(instant * stretch), prompt, output)
        for number, (instant, (prompt, output)) in enumerate(zip(instants, lengths, strict=True))
    ]
