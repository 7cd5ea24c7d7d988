"""Ends over a memory fabric of their own, with crashes and pauses that the fabric makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import evolve

from pushkv.core.capabilities import Capabilities
from pushkv.core.ids import Worker, seconds
from pushkv.model.faults import Fault, FaultRule
from pushkv.testing import Limits, LocalEnds
from pushkv.testing.conformance.bench import PRODUCER
from pushkv.transport import Transport
from pushkv_memory import CAPABILITIES, MemoryFabric, MemoryTransport

# A machine that is busy with other tests can hold up a copy for longer than the default bound.
STRONG = evolve(CAPABILITIES, write_bound=seconds(5), death_bound=seconds(5))
LATE = (
    FaultRule(Fault.ARRIVAL_DUPLICATION, 300_000, least=seconds(0.001), most=seconds(0.05)),
    FaultRule(Fault.DELAY, 1_000_000, least=seconds(0.001), most=seconds(0.01)),
    FaultRule(Fault.REORDERING, 500_000),
)
HASTY = Limits(quiet_s=0.02, idle_s=0.3)
SIBLING_RANKS = range(1000, 1020)


_fabrics: list[MemoryFabric] = []


def end_fabrics() -> None:
    """Kill every worker: a broken transport leaves WRITEs behind, and they keep a thread busy."""
    while _fabrics:
        fabric = _fabrics.pop()
        for worker in list(fabric._ports):
            fabric.crash(worker, bytes_land=False)


def memory_ends(
    faults: Iterable[FaultRule] = (),
    capabilities: Capabilities = STRONG,
    transport: Callable[[MemoryFabric], Transport] = MemoryTransport,
    large_bytes: int = 2_100_000,
) -> LocalEnds:
    """Ends of one fabric; `transport` makes what is checked."""
    fabric = MemoryFabric(1, faults, capabilities, timeout=seconds(5))
    _fabrics.append(fabric)

    def pause(worker: Worker) -> None:
        for rank in (PRODUCER.rank, *SIBLING_RANKS):
            fabric.partition(evolve(PRODUCER, rank=rank), worker)

    return LocalEnds(
        lambda: transport(fabric), fabric.crash, pause, lambda worker: fabric.heal(), large_bytes
    )
