"""A swarm of real runtimes in virtual time: many engines, many transfers, every fault, one seed."""

from .report import SwarmReport, SwarmSettings, Violation
from .swarm import run_swarm
from .virtual import Backend
from .weather import Kind

__all__ = ["Backend", "Kind", "SwarmReport", "SwarmSettings", "Violation", "run_swarm"]
