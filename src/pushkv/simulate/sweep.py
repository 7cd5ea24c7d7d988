"""The published sweep, at every point of its chart, and with the designs that it had not."""

from __future__ import annotations

from .answers import Answer, Cells, Figure, Lines
from .asked import Asked, told
from .settings import Design, Settings, Traffic

__all__ = ["sweep"]

DESIGNS = (Design.PULL, Design.PULL_THREAD, Design.PUSH_LATE, Design.PUSH_EARLY)
REPEATS = 3
RUN_REQUESTS = 100
"""As many as a run of the published script sends: where an engine is over its limit, the queue, and
so the mean, grows with it."""


def sweep(asked: Asked) -> Answer:
    """What of the published gain is the thread that posts, and what is registering early."""
    engine = asked.calibration.engine()
    cells = []
    for prompt in (1024, 4096, 16_384):
        for rate in (1.0, 2.0, 4.0, 8.0):
            traffic = Traffic(
                rate,
                RUN_REQUESTS,
                prompt,
                stops=asked.calibration.values["stops"],
                cached_prefill=1.0,
                exact=True,
            )
            for design in DESIGNS:
                for repeat in range(REPEATS):
                    settings = Settings(
                        design, engine, asked.link, traffic=traffic, seed=asked.seed + repeat
                    )
                    cells.append((f"{prompt} tokens, {rate:g} q/s, {design}", settings))
    runner = Cells(asked.progress)
    done = runner.run(cells)
    rows, results = [], []
    lines: Lines = {}
    row = len(DESIGNS) * REPEATS
    for group in range(0, len(done) - row + 1, row):
        traffic = done[group][0].traffic
        ttft, tpot = [], []
        for number, design in enumerate(DESIGNS):
            begin = group + number * REPEATS
            runs = [result for _, result in done[begin : begin + REPEATS]]
            ttft.append(_mean_ms([run.ttft_s.mean for run in runs]))
            tpot.append(_mean_ms([run.tpot_s.mean for run in runs]))
            if traffic.prompt_tokens == 16_384:
                lines.setdefault(str(design), []).append((traffic.rate_hz, ttft[-1]))
        rows.append(
            (
                f"{traffic.prompt_tokens:,}",
                f"{traffic.rate_hz:g}",
                *(f"{each:,.0f} ({step:.1f})" for each, step in zip(ttft, tpot, strict=True)),
            )
        )
        results += [told(settings, result) for settings, result in done[group : group + row]]
    return Answer(
        "The published sweep",
        f"One prefill and one decode engine with 8 slots, as published; {RUN_REQUESTS} requests a "
        f"run, {REPEATS} runs. Mean TTFT (mean TPOT) in ms. pull-thread: pull with a thread that "
        "prepares the READ.",
        ("prompt", "q/s", "pull", "pull-thread", "push late", "push early"),
        rows,
        Figure("Prompts of 16,384 tokens, 8 slots", "q/s", "mean TTFT, ms", lines),
        results,
        runner.partial,
    )


def _mean_ms(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds) * 1e3
