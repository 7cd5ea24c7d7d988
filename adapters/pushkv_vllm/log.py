"""The adapter's logger: below vLLM's own, so that its handlers and levels apply."""

from __future__ import annotations

from vllm.logger import init_logger

__all__ = ["logger"]

logger = init_logger("vllm.pushkv")
