"""Drives the core in a thread of its own: channel, transport, clock, the engine's bridge."""

from .admission import Limits
from .bridge import Bridge
from .config import RuntimeConfig, new_incarnation
from .credentials import Certificates, SharedSecret
from .deaths import AskWhetherGone
from .health import Health
from .rank_bridges import RankBridges
from .runtime import Runtime

__all__ = [
    "AskWhetherGone",
    "Bridge",
    "Certificates",
    "Health",
    "Limits",
    "RankBridges",
    "Runtime",
    "RuntimeConfig",
    "SharedSecret",
    "new_incarnation",
]
