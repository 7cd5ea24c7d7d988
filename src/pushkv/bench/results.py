"""What a run found, as it is written to and read from JSON; all times in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from attrs import Factory, frozen

from pushkv.core.errors import ConfigurationError

__all__ = [
    "MODES",
    "CellResult",
    "Hooks",
    "ModeResult",
    "Percentiles",
    "Results",
    "Transfers",
    "percentiles",
    "read_results",
    "write_results",
]

MODES = ("mono", "pull", "push", "push_sequential", "pushkv")
"""One engine alone; vLLM's NixlConnector; its NixlPushConnector with both legs at once, and with
the prefill leg first; pushkv with both legs at once."""


@frozen
class Percentiles:
    """Of at least one value; linear between ranks."""

    p50: float
    p95: float
    p99: float
    mean: float


@frozen
class Hooks:
    """Time of the engines' threads in hooks of the KV connector, both engines together.

    Attributes:
        calls: Outermost calls.
        wall_s: From call to return.
        cpu_s: CPU of the thread meanwhile.
    """

    calls: int
    wall_s: float
    cpu_s: float


@frozen
class Transfers:
    """From pushkv's traces.

    Attributes:
        n: Transfers that were delivered.
        early_share: The share of them whose registration was there before prefill was over.
        write_s: From the first WRITE ordered to the last one done.
        exposed_s: From the end of prefill to delivery.
        hidden_s: The part of `write_s` before the end of prefill.
    """

    n: int
    early_share: float
    write_s: Percentiles
    exposed_s: Percentiles
    hidden_s: Percentiles


@frozen
class ModeResult:
    """One mode in one cell, warm-up excluded.

    Attributes:
        n: Requests that were sent.
        failed: Of them: answered with an error, not in time, or with too few tokens.
        cancelled: Of them: their client left before the end, as the workload says.
        failures: How often each reason.
        ttft_s: From the planned arrival to the first token, of requests that completed.
        tpot_s: (last token - first token) / (tokens - 1).
        itl_s: All gaps between tokens.
        excess_s: Median TTFT less the cell's `prefill_only_s`.
        ttft_each_s: The TTFT of each request that completed, in the order of arrival.
        goodput_qps: Requests per second that completed within both objectives.
        good_share: The share of requests, those of clients that left aside, that did so.
        duration_s: Time in which the mode had requests.
        cpu_s: CPU of its engines in that time.
        engines: How many those are.
        cost_per_request: `engines` for `duration_s` at the price given, per request that completed.
        queue_s: Mean time that vLLM says its requests were queued, by engine. A decode engine's
            includes the wait for KV.
        nixl_transfer_s: Mean time of a transfer, by the metrics of vLLM's own connectors.
        computed_at_decode: Prompt tokens that the decode engine computed itself, by vLLM's count.
        hooks: Time in hooks; none for `mono`.
        transfers: From pushkv's traces.
    """

    n: int
    failed: int
    cancelled: int
    failures: Mapping[str, int]
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    itl_s: Percentiles | None
    excess_s: float | None
    ttft_each_s: Sequence[float]
    goodput_qps: float
    good_share: float
    duration_s: float
    cpu_s: float
    engines: int
    cost_per_request: float | None
    queue_s: Mapping[str, float]
    nixl_transfer_s: float | None = None
    computed_at_decode: int | None = None
    hooks: Hooks | None = None
    transfers: Transfers | None = None

    @property
    def completed(self) -> int:
        """Requests that got all of their tokens."""
        return self.n - self.failed - self.cancelled


@frozen
class CellResult:
    """One point of load.

    Attributes:
        title: The cell in a few words.
        prompt: Prompt tokens, mean.
        qps: Arrivals per second; 0: one at a time.
        shared: Tokens that all prompts begin with.
        output: Output tokens, mean.
        prefill_only_s: Median TTFT of such prompts, one at a time, one output token, at `mono`.
        prefill_only_each_s: All of them.
        modes: By name.
    """

    title: str
    prompt: float
    qps: float
    shared: int
    output: float
    prefill_only_s: float
    prefill_only_each_s: Sequence[float]
    modes: Mapping[str, ModeResult]


@frozen
class Results:
    """One run.

    Attributes:
        configuration: What it was asked for.
        machine: Where it ran.
        idle_cpu_share: CPU of each mode's engines while nobody asks, as a share of a core.
        cells: In the order they were run.
    """

    configuration: Mapping[str, str | int | float | bool | Sequence[str] | None]
    machine: Mapping[str, str | int | float]
    idle_cpu_share: Mapping[str, float]
    cells: Sequence[CellResult] = Factory(list)


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """None of nothing."""
    if not values:
        return None
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return Percentiles(at(0.5), at(0.95), at(0.99), statistics.fmean(ordered))


def write_results(results: Results, path: Path) -> None:
    """Write a run as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read_results(path: Path) -> Results:
    """A run that was written.

    Raises:
        ConfigurationError: The file cannot be read, or holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError("results", str(path), f"those of a run ({error})") from error
