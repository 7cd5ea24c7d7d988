"""Drives the core in a thread of its own: channel, transport, clock, the engine's bridge."""

from .admission import Limits
from .bridge import Bridge
from .config import RuntimeConfig, new_incarnation
from .credentials import Certificates, SharedSecret
from .runtime import Runtime

__all__ = [
    "Bridge",
    "Certificates",
    "Limits",
    "Runtime",
    "RuntimeConfig",
    "SharedSecret",
    "new_incarnation",
]
