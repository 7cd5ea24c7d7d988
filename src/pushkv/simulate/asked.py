"""How a question is asked, and what its answers are made with."""

from __future__ import annotations

from attrs import asdict, evolve, frozen

from .answers import Progress
from .calibration import Calibration
from .run import Result, Spread
from .settings import EngineModel, LinkModel, Settings, Traffic

__all__ = ["Asked", "decode_hz", "middle_and_tail", "milliseconds", "prefill_hz", "told"]


@frozen
class Asked:
    """How a question is asked.

    Attributes:
        requests: In each cell, where it does not matter how many they are.
    """

    calibration: Calibration
    seed: int = 0
    requests: int = 400
    progress: Progress | None = None

    @property
    def engine(self) -> EngineModel:
        """The calibrated engine, with slots for many."""
        return evolve(self.calibration.engine(), slots=64)

    @property
    def link(self) -> LinkModel:
        """The calibrated network."""
        return self.calibration.link()


def prefill_hz(engine: EngineModel, traffic: Traffic) -> float:
    """How many prompts per second one engine can compute, one by one."""
    left = traffic.prompt_tokens * (1 - traffic.cached_prefill)
    tokens = max(float(engine.block_tokens), left)
    chunks = -(-tokens // engine.chunk_tokens)
    return 1 / (chunks * engine.prefill_step_s + tokens * engine.prefill_token_s)


def decode_hz(engine: EngineModel, traffic: Traffic) -> float:
    """How many outputs per second one engine can decode with all its slots."""
    context = engine.slots * traffic.prompt_tokens * engine.decode_context_s
    return engine.slots / (traffic.output_tokens * (engine.decode_step_s + context))


def milliseconds(seconds: float) -> str:
    """Whole milliseconds."""
    return f"{seconds * 1e3:,.0f}"


def middle_and_tail(spread: Spread) -> str:
    """The 50th and the 99th percentile, in milliseconds."""
    return f"{milliseconds(spread.p50)} / {milliseconds(spread.p99)}"


def told(settings: Settings, result: Result, **extra: object) -> dict[str, object]:
    """A cell for JSON: what was set, and what came of it."""
    return {**extra, "settings": asdict(settings), "result": asdict(result)}
