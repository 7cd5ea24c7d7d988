"""The transport contract over a fabric."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pushkv.core.capabilities import Capabilities
from pushkv.core.errors import TransportError
from pushkv.core.ids import Worker
from pushkv.transport import Arrival, Completion, Region, Write

from .fabric import MemoryFabric, default_fabric
from .port import Port

__all__ = ["MemoryTransport"]


class MemoryTransport:
    """A transport between workers of one process: a WRITE is a copy from address to address.

    Without faults a WRITE is over when `post` returns, so `post` takes as long as the copy, and
    `wake` is called from `post`. With delays it is over when its time comes: the fabric's own
    thread completes it in real time, `MemoryFabric.advance` in virtual time.

    Args:
        fabric: What joins the transports; by default one for the whole process, without faults.
    """

    version = "1"

    def __init__(self, fabric: MemoryFabric | None = None) -> None:
        self._fabric = default_fabric() if fabric is None else fabric
        self._port: Port | None = None

    @property
    def fabric(self) -> MemoryFabric:
        """What this transport is part of."""
        return self._fabric

    @property
    def capabilities(self) -> Capabilities:
        """What the fabric promises; constant."""
        return self._fabric.capabilities

    def start(
        self,
        worker: Worker,
        regions: Sequence[Region],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        """Make `regions` writable by peers of the same fabric and begin.

        The memory must stay mapped until `close` returned True or `MemoryFabric.crash` returned.

        Raises:
            TransportError: Started before; a region is on a device; or a worker of that engine and
                rank is still there.
        """
        if self._port is not None:
            raise TransportError("start was called twice: make a new MemoryTransport")
        for region in regions:
            if region.device != -1:
                raise TransportError(
                    f"device = {region.device}: the memory transport copies host memory only"
                )
        port = Port(worker, regions, clock, wake)
        self._fabric.attach(port)
        self._port = port

    def memory(self) -> bytes:
        """Which fabric this is, so that a peer in another process finds that it cannot reach it."""
        return self._fabric.name

    def add_peer(self, peer: Worker, memory: bytes) -> None:
        """Learn how to WRITE to `peer`; one that is not on this fabric shows at the first WRITE."""
        with self._fabric.lock:
            self._started().peers[peer] = memory

    def remove_peer(self, peer: Worker) -> None:
        """Forget `peer`; what is in flight to it stays so."""
        with self._fabric.lock:
            self._started().peers.pop(peer, None)

    def post(self, write: Write) -> None:
        """Order a WRITE; its permit is checked once it is `ready`, just before the post (R5)."""
        self._fabric.post(self._started(), write)

    def look_for_arrivals(self, active: bool) -> None:
        """Tell arrivals from now on, those of before included, or keep them for later."""
        self._fabric.look(self._started(), active)

    def poll(self) -> Sequence[Completion | Arrival]:
        """What has happened since the last call; a crashed worker learns nothing."""
        with self._fabric.lock:
            return () if self._port is None else self._port.take()

    def close(self, timeout_s: float) -> bool:
        """Stop; in real time, wait up to `timeout_s` seconds for open WRITEs.

        Nothing lands in this worker's memory afterwards, and nothing is read from it.
        """
        return self._port is None or self._fabric.detach(self._port, timeout_s)

    def _started(self) -> Port:
        if self._port is None:
            raise TransportError("the transport has not been started: call start first")
        return self._port
