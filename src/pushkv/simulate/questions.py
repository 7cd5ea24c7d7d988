"""What users must decide, answered with the calibrated models.

The engines are those of the calibration with more slots, except where it says so. All numbers are
of the model: docs/simulate.md says how far it is from what was measured.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from .answers import Answer, Cells, Figure, Lines
from .asked import Asked, decode_hz, middle_and_tail, milliseconds, prefill_hz, told
from .settings import Deployment, Design, Faults, Settings, Traffic
from .sweep import sweep

__all__ = ["QUESTIONS", "early_or_late", "fleet", "placement", "quarantine"]


DEATHS_EVERY_S = 5.0
"""Far more often than anywhere, so that a short run has many."""


def early_or_late(asked: Asked) -> Answer:
    """Whether to send both legs at once, under load and with prefixes that are cached."""
    designs = (Design.PULL, Design.PUSH_LATE, Design.PUSH_EARLY)
    cells = []
    for reuse in (0.0, 0.5, 0.9):
        traffic = Traffic(
            requests=asked.requests, prompt_tokens=8192, cached_prefill=reuse, cached_decode=reuse
        )
        for load in (0.3, 0.6, 0.9):
            sent = evolve(traffic, rate_hz=load * prefill_hz(asked.engine, traffic))
            for design in designs:
                settings = Settings(design, asked.engine, asked.link, traffic=sent, seed=asked.seed)
                cells.append((f"reuse {reuse}, load {load}, {design}", settings, reuse, load))
    runner = Cells(asked.progress)
    done = runner.run((what, settings) for what, settings, _, _ in cells)
    lines: Lines = {}
    rows, results = [], []
    for group in range(0, len(done) - len(designs) + 1, len(designs)):
        _, settings, reuse, load = cells[group]
        three = [result for _, result in done[group : group + len(designs)]]
        early, late = three[2], three[1]
        rows.append(
            (
                f"{reuse:.0%}",
                f"{load:.0%}",
                f"{settings.traffic.rate_hz:.1f}",
                *(
                    f"{milliseconds(each.ttft_s.p50)} / {milliseconds(each.ttft_s.p99)}"
                    for each in three
                ),
                f"{milliseconds(late.ttft_s.mean - early.ttft_s.mean)}",
                f"{early.reserved_block_s / max(1e-9, late.reserved_block_s):.1f}",
            )
        )
        for design, result in zip(designs, three, strict=True):
            lines.setdefault(f"{design}, {reuse:.0%} reused", []).append(
                (load, result.ttft_s.p50 * 1e3)
            )
            results.append(told(settings, result, design=design, reuse=reuse, load=load))
    return Answer(
        "Early or late registration",
        "One prefill and one decode engine, prompts of 8,192 tokens, 128 output tokens. Load: of "
        "the prefill engine. Reuse: share of each prompt that both engines have cached. TTFT p50 / "
        "p99 in ms. Gain: mean TTFT of late less that of early, in ms. Held: decode blocks times "
        "seconds without KV in them, early over late.",
        ("reuse", "load", "q/s", "pull", "push late", "push early", "gain", "held"),
        rows,
        Figure("Time to first token", "load of the prefill engine", "TTFT p50, ms", lines),
        results,
        runner.partial,
    )


def placement(asked: Asked) -> Answer:
    """What it costs to choose the decode engine before the prompt is computed."""
    engine = evolve(asked.engine, slots=8)
    traffic = Traffic(requests=asked.requests, prompt_tokens=4096, output_tokens=256, spread=1.5)
    kinds = Deployment(prefill=4, decode=4)
    cells = []
    for load in (0.5, 0.7, 0.9):
        rate = load * kinds.decode * decode_hz(engine, traffic)
        for design in (Design.PUSH_LATE, Design.PUSH_EARLY):
            sent = evolve(traffic, rate_hz=rate)
            settings = Settings(design, engine, asked.link, kinds, sent, seed=asked.seed)
            cells.append((f"load {load}, {design}", settings, load))
    runner = Cells(asked.progress)
    done = runner.run((what, settings) for what, settings, _ in cells)
    lines: Lines = {}
    rows, results = [], []
    for (settings, result), (_, _, load) in zip(done, cells, strict=False):
        name = str(settings.design)
        waits = result.wait_s.mean + result.slot_s.mean
        share = result.reserved_block_s * result.per_s / (kinds.decode * engine.blocks)
        rows.append(
            (
                f"{load:.0%}",
                name,
                middle_and_tail(result.ttft_s),
                milliseconds(waits),
                milliseconds(result.prefill_s.mean),
                f"{result.tpot_s.mean * 1e3:.2f}",
                f"{share:.2%}",
            )
        )
        lines.setdefault(name, []).append((load, result.ttft_s.p99 * 1e3))
        results.append(told(settings, result, load=load))
    return Answer(
        "Choosing the decode engine early",
        "Four prefill and four decode engines with 8 slots, prompts and outputs of 4,096 and 256 "
        "tokens, varied by up to 4.5 times, least-loaded routing. Load: of the decode engines' "
        "slots. TTFT p50 / p99 in ms; waits: mean ms in the decode engine's queue and for a slot; "
        "prefill: mean ms until the prompt is computed; TPOT in ms; held: share of decode blocks "
        "taken without KV in them.",
        ("load", "design", "TTFT", "waits", "prefill", "TPOT", "held"),
        rows,
        Figure("Tail of the time to first token", "load of decode slots", "TTFT p99, ms", lines),
        results,
        runner.partial,
    )


def quarantine(asked: Asked) -> Answer:
    """How large the budget of exposed blocks must be when prefill engines die."""
    engine = evolve(asked.engine, blocks=20_000)
    kinds = Deployment(prefill=4, decode=4)
    traffic = Traffic(requests=4 * asked.requests, prompt_tokens=8192)
    traffic = evolve(traffic, rate_hz=0.6 * kinds.prefill * prefill_hz(engine, traffic))
    cells = []
    for proof_s in (1.0, 10.0, 60.0, 600.0):
        for share in (0.1, 0.25, 1.0):
            faults = Faults(1 / DEATHS_EVERY_S, proof_s, share, restarts_most=5)
            settings = Settings(
                Design.PUSH_EARLY, engine, asked.link, kinds, traffic, faults, asked.seed
            )
            cells.append((f"proof {proof_s:.0f} s, budget {share:.0%}", settings))
    runner = Cells(asked.progress)
    lines: Lines = {}
    rows, results = [], []
    pool = kinds.decode * engine.blocks
    for settings, result in runner.run(cells):
        faults = settings.faults
        most = result.quarantined_most / pool
        reserved = result.reserved_block_s * result.per_s / kinds.prefill
        expected = min(faults.proof_s * faults.deaths_hz, result.deaths) * reserved
        rows.append(
            (
                f"{faults.proof_s:.0f}",
                f"{faults.budget_share:.0%}",
                f"{result.deaths}",
                f"{most:.1%}",
                f"{expected / pool:.1%}",
                middle_and_tail(result.ttft_s),
                f"{milliseconds(result.wait_s.p99)}",
                f"{result.tries:.3f}",
                f"{result.failed}",
            )
        )
        line = lines.setdefault(f"budget {faults.budget_share:.0%}", [])
        line.append((faults.proof_s, result.ttft_s.p99 * 1e3))
        results.append(told(settings, result))
    return Answer(
        "Quarantine budget",
        "Four prefill and four decode engines of 320,000 tokens each, prompts of 8,192 tokens, "
        f"load 0.6, push early; a prefill engine dies every {DEATHS_EVERY_S:.0f} s on average. "
        "Proof: seconds until somebody proves that nothing of a dead engine can land. Budget: most "
        "of a decode engine's blocks that may be registered or quarantined. Quarantined: at most, "
        "of all decode blocks; expected: deaths within the time of a proof, times what one "
        "prefill engine has reserved. TTFT p50 / p99 and wait p99 for decode blocks in ms; tries "
        "per request.",
        (
            "proof s",
            "budget",
            "deaths",
            "quarantined",
            "expected",
            "TTFT",
            "wait p99",
            "tries",
            "failed",
        ),
        rows,
        Figure(
            "Deaths of prefill engines", "seconds until proof", "TTFT p99, ms", lines, log_x=True
        ),
        results,
        runner.partial,
    )


def fleet(asked: Asked) -> Answer:
    """How the hand-over does in fleets, and how long it takes to find out."""
    traffic = Traffic(prompt_tokens=2048, spread=0.5)
    rate = 0.6 * prefill_hz(asked.engine, traffic)
    cells = []
    for pairs, machines in (
        (1, True),
        (16, False),
        (16, True),
        (256, False),
        (256, True),
        (1024, True),
        (2048, False),
    ):
        sent = evolve(traffic, rate_hz=rate * pairs, requests=max(pairs * 6, asked.requests))
        for design in (Design.PUSH_LATE, Design.PUSH_EARLY):
            kinds = Deployment(pairs, pairs, looked_at=2)
            settings = Settings(
                design, asked.engine, asked.link, kinds, sent, seed=asked.seed, machines=machines
            )
            cells.append((f"{2 * pairs} engines, {design}", settings))
    runner = Cells(asked.progress)
    lines: Lines = {}
    rows, results = [], []
    for settings, result in runner.run(cells):
        engines = 2 * settings.deployment.prefill
        name = f"{settings.design}, {'machines' if settings.machines else 'latencies only'}"
        rows.append(
            (
                f"{engines:,}",
                str(settings.design),
                "yes" if settings.machines else "no",
                f"{result.requests:,}",
                middle_and_tail(result.ttft_s),
                f"{result.messages:.1f}",
                f"{result.cpu_s:.1f}",
                f"{result.events / result.cpu_s:,.0f}",
            )
        )
        lines.setdefault(name, []).append((engines, result.ttft_s.p50 * 1e3))
        results.append(told(settings, result))
    return Answer(
        "Fleets",
        "As many prefill as decode engines, prompts of about 2,048 tokens, load 0.6, the less "
        "loaded of two engines drawn at random. Machines: hand-overs by the real machines, or "
        "their messages' latencies alone. TTFT p50 / p99 in ms; messages: control messages per "
        "request; CPU: seconds of one core of the machine that ran this, and events per second.",
        ("engines", "design", "machines", "requests", "TTFT", "messages", "CPU", "events/s"),
        rows,
        Figure("Fleets", "engines", "TTFT p50, ms", lines, log_x=True),
        results,
        runner.partial,
    )


QUESTIONS: dict[str, Callable[[Asked], Answer]] = {
    "sweep": sweep,
    "early-or-late": early_or_late,
    "placement": placement,
    "quarantine": quarantine,
    "fleet": fleet,
}
