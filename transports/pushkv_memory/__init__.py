"""The in-process transport: real copies between workers of one process, with faults as data.

`MemoryTransport()` joins the fabric of this process. Tests make their own `MemoryFabric`, with a
seed, faults, the capabilities they want to see kept, and a clock of theirs.
"""

from .fabric import CAPABILITIES, MemoryFabric, default_fabric
from .history import Crashed, Ended, Entry, Landed, Noticed, PathCut, PathHealed, Posted
from .transport import MemoryTransport

__all__ = [
    "CAPABILITIES",
    "Crashed",
    "Ended",
    "Entry",
    "Landed",
    "MemoryFabric",
    "MemoryTransport",
    "Noticed",
    "PathCut",
    "PathHealed",
    "Posted",
    "default_fabric",
]
