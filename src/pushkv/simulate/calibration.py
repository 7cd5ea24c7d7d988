"""What the models' parameters are: which are given and by whom, which are fitted, and to what.

`fitted.json` has the fitted values; `fit` makes them anew. A point is predicted by running its
traffic as it was sent, several times with other arrivals.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from math import exp, log
from random import Random

from attrs import evolve, frozen

from .published import Point
from .run import Result, simulate
from .settings import Design, EngineModel, LinkModel, Settings

__all__ = ["FREE", "GIVEN", "Calibration", "Free", "fit", "fitted", "loss", "predict"]

QWEN = "qwen3-32b"
PULL_REQUEST = "pr-35264"


@frozen
class Free:
    """A fitted parameter, and where it is looked for (on a logarithmic scale)."""

    name: str
    least: float
    most: float
    meaning: str


FREE = (
    Free("prefill_step_s", 1e-3, 0.15, "qwen3-32b: a step with prefill in it"),
    Free("prefill_token_s", 5e-6, 5e-5, "qwen3-32b: a prompt token computed"),
    Free("decode_step_s", 4e-3, 7e-3, "qwen3-32b: a step with decode in it"),
    Free("decode_context_s", 1e-9, 4e-8, "both: a token of context read in a decode step"),
    Free("leg_s", 5e-4, 0.1, "both: an HTTP leg"),
    Free("leg_token_s", 1e-7, 5e-6, "both: an HTTP leg, per prompt token"),
    Free("bandwidth_bytes_s", 1e10, 4e11, "both: one engine's adapters, per direction"),
    Free("latency_s", 1e-3, 5e-2, "both: a transfer, however small"),
    Free("descriptors_per_token", 0.05, 8.0, "both: descriptors after merging, per rank"),
    Free("stops", 1e-5, 1e-2, "both: chance per token that an output ends before 128"),
    Free("other_prefill_step_s", 1e-3, 0.1, "pr-35264: a step with prefill in it, 512 tokens"),
    Free("other_decode_step_s", 8e-3, 1.5e-2, "pr-35264: a step with decode in it"),
)

GIVEN = (
    ("slots", "8", "`--max-num-seqs 8` of the published scripts; assumed for pr-35264, too"),
    ("chunk_tokens", "8192", "vLLM's default on these machines"),
    ("token_bytes", "262,144", "Qwen3-32B: 64 layers x 8 heads x 128 x 2 x bfloat16"),
    ("token_bytes", "327,680", "pr-35264: of Llama-3.3-70B, whose name its author's comments give"),
    ("descriptor_s", "2.43 us", "comment of 2026-04-10 in #35264: 118 take 0.46 ms, 18,880 46 ms"),
    ("block_tokens", "16", "vLLM's default"),
    ("blocks", "200,000", "3.2 million tokens of 256 KiB: what 8 H200 hold beside the weights"),
    ("control_s", "0.2 ms", "a message from thread to thread, of this project's own measurements"),
    ("proxy_s", "1 ms", "assumed"),
    ("cached_prefill", "1", "of the sweep in push-blog: its prompts are sent again and again"),
)


@frozen
class Calibration:
    """Values of the free parameters, by name."""

    values: Mapping[str, float]

    def engine(self, system: str = QWEN) -> EngineModel:
        """The engines of a system."""
        value = self.values
        engine = EngineModel(
            prefill_step_s=value["prefill_step_s"],
            prefill_token_s=value["prefill_token_s"],
            decode_step_s=value["decode_step_s"],
            decode_context_s=value["decode_context_s"],
            leg_s=value["leg_s"],
            leg_token_s=value["leg_token_s"],
        )
        if system == PULL_REQUEST:
            return evolve(
                engine,
                prefill_step_s=value["other_prefill_step_s"],
                prefill_token_s=0.0,
                decode_step_s=value["other_decode_step_s"],
            )
        return engine

    def link(self, system: str = QWEN) -> LinkModel:
        """The network of a system."""
        value = self.values
        return LinkModel(
            bandwidth_bytes_s=value["bandwidth_bytes_s"],
            latency_s=value["latency_s"],
            token_bytes=327_680 if system == PULL_REQUEST else 262_144,
            descriptors_per_token=value["descriptors_per_token"],
            descriptor_s=(46e-3 - 0.46e-3) / (18_880 - 118),
            control_s=2e-4,
            proxy_s=1e-3,
        )


def fitted() -> Calibration:
    """The values in use."""
    text = files("pushkv.simulate").joinpath("fitted.json").read_text(encoding="utf-8")
    return Calibration(json.loads(text))


def predict(
    calibration: Calibration, points: Iterable[Point], repeats: int, *, machines: bool
) -> list[float]:
    """What the simulation says for each point: the mean of `repeats` runs with other arrivals."""
    runs: dict[object, list[Result]] = {}

    def results(point: Point, design: Design) -> list[Result]:
        key = (point.system, design, point.traffic)
        if key not in runs:
            runs[key] = [
                simulate(
                    Settings(
                        design,
                        calibration.engine(point.system),
                        calibration.link(point.system),
                        traffic=evolve(point.traffic, stops=calibration.values["stops"]),
                        seed=seed,
                        machines=machines,
                    )
                )
                for seed in range(repeats)
            ]
        return runs[key]

    return [_measure(calibration, point, results) for point in points]


def _measure(
    calibration: Calibration, point: Point, results: Callable[[Point, Design], list[Result]]
) -> float:
    if point.metric == "transfer_ms":
        link = calibration.link(point.system)
        size = point.traffic.prompt_tokens * link.token_bytes
        return (link.latency_s + size / link.bandwidth_bytes_s) * 1e3
    runs = results(point, point.design)
    if point.metric == "ttft_over_thread":
        threaded = results(point, Design.PULL_THREAD)
        return sum(each.ttft_s.mean for each in runs) / sum(each.ttft_s.mean for each in threaded)
    read: dict[str, Callable[[Result], float]] = {
        "ttft_mean_ms": lambda run: run.ttft_s.mean * 1e3,
        "ttft_p50_ms": lambda run: run.ttft_s.p50 * 1e3,
        "ttft_p99_ms": lambda run: run.ttft_s.p99 * 1e3,
        "tpot_mean_ms": lambda run: run.tpot_s.mean * 1e3,
        "prefill_ms": lambda run: run.prefill_s.mean * 1e3,
        "per_s": lambda run: run.per_s,
    }
    return sum(read[point.metric](run) for run in runs) / len(runs)


def loss(calibration: Calibration, points: list[Point], repeats: int) -> float:
    """Mean absolute logarithm of predicted over published: an outlier pulls no more than it must.

    The hand-over is the one without machines, which takes the same time.
    """
    predicted = predict(calibration, points, repeats, machines=False)
    return sum(
        abs(log(max(said, 1e-9) / point.value))
        for said, point in zip(predicted, points, strict=True)
    ) / len(points)


def fit(
    points: list[Point],
    seed: int,
    trials: int,
    repeats: int = 2,
    begin: Calibration | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> tuple[Calibration, float]:
    """Look for the least loss by random steps from the best so far, whose width adapts.

    Args:
        points: Those to fit to.
        seed: Of the search.
        repeats: Runs per point, each with other arrivals.
        trials: How many values to try.
        begin: Where to begin; the middle of every range by default.
        progress: Called after each trial with its number and the least loss so far.
    """
    random = Random(seed)  # noqa: S311
    spans = [(log(each.least), log(each.most)) for each in FREE]
    at = [
        log(begin.values[each.name]) if begin else (low + high) / 2
        for each, (low, high) in zip(FREE, spans, strict=True)
    ]
    best = loss(_named(at), points, repeats)
    width = 0.3
    for trial in range(trials):
        moved = list(at)
        for which in random.sample(range(len(at)), random.choice((1, 1, 2, 4, len(at)))):
            low, high = spans[which]
            moved[which] = min(high, max(low, at[which] + random.gauss(0, width * (high - low))))
        found = loss(_named(moved), points, repeats)
        if found < best:
            at, best, width = moved, found, min(0.4, width * 1.5)
        else:
            width = max(0.01, width * 0.96)
        if progress is not None:
            progress(trial + 1, best)
    return _named(at), best


def _named(logarithms: list[float]) -> Calibration:
    return Calibration({free.name: exp(at) for free, at in zip(FREE, logarithms, strict=True)})
