"""Drives the core in a thread of its own: channel, transport, clock, the engine's bridge."""

from .bridge import Bridge
from .config import RuntimeConfig, new_incarnation
from .runtime import Runtime

__all__ = ["Bridge", "Runtime", "RuntimeConfig", "new_incarnation"]
