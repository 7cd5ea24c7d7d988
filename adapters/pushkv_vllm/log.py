"""The adapter's logger: below vLLM's own, so that its handlers and levels apply."""

from __future__ import annotations

import logging

from vllm.logger import init_logger

__all__ = ["join", "logger"]

logger: logging.Logger = init_logger("vllm.pushkv")


def join() -> None:
    """Let what the rest of pushkv logs go where vLLM's log goes, unless somebody said where.

    vLLM gives handlers to its own loggers alone; without any, the lines of failures would come
    without time and process, and those that are no warnings not at all.
    """
    ours, theirs = logging.getLogger("pushkv"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
