"""The peers an agent knows, and whether it can WRITE to them. Used by the agent's thread alone."""

from __future__ import annotations

import logging
import time

from attrs import define

from pushkv.core.errors import RemoteProtocolError
from pushkv.core.ids import Worker

from ._codec import Memory, agent_name, decode_memory
from ._library import Agent, NixlError
from ._metadata import check_metadata

__all__ = ["RECONNECT_NS", "Peer", "Peers"]

_log = logging.getLogger("pushkv.nixl")

RECONNECT_NS = 1_000_000_000
"""Shortest time between two connections to one peer: each costs UCX a file descriptor for good."""


@define(eq=False)
class Peer:
    """One peer.

    Attributes:
        memory: What it told us; None where that was not usable.
        cause: Why nothing can be written to it; "" where something can.
        loaded: Whether NIXL knows it.
        lost: Whether its connection failed, or was refused by NIXL, and must be made anew.
        leaving: Whether it is to be forgotten once its last handle is over.
        handles: Posted handles that write to it.
        reached: Whether a handle that wrote to it, over the connection there is, has been done.
        connect_after_ns: Not before this instant (monotonic) is it connected again.
    """

    worker: Worker
    data: bytes
    memory: Memory | None = None
    cause: str = ""
    loaded: bool = False
    lost: bool = False
    leaving: bool = False
    handles: int = 0
    reached: bool = False
    connect_after_ns: int = 0

    @property
    def connecting(self) -> bool:
        """Whether the first handle is under way, which connects. No other is posted meanwhile.

        UCX aborts the process (``stubs.c``) when more is queued on a connection that is refused.
        """
        return self.handles > 0 and not self.reached

    @property
    def agent(self) -> str:
        """The name of its NIXL agent."""
        return agent_name(self.worker)


class Peers:
    """All peers of one agent, by worker: an incarnation is a peer of its own (R9).

    An agent over LIBFABRIC connects once to each peer. The two greet each other by name, and one
    that forgets the other and greets it again gets no answer: posts then wait for a minute, in
    vain. There NIXL is made to forget nobody, and a lost peer needs another agent.

    Attributes:
        spent: Connections that cost the agent something for good. Over UCX those taken down: each
            leaves a file descriptor or two at either side until the agent ends. Over LIBFABRIC
            those made: an agent has 255 in its life.
        lost: Where this agent does not reconnect, when (monotonic, ns) each lost peer was lost;
            may be read from any thread.
    """

    def __init__(
        self, agent: Agent, library: str, backend: str, *, checks: bool, reconnects: bool = True
    ) -> None:
        self._checks = checks
        self._agent = agent
        self._library = library
        self._backend = backend
        self._reconnects = reconnects
        self._peers: dict[Worker, Peer] = {}
        self.spent = 0
        self.lost: dict[Worker, int] = {}

    def add(self, worker: Worker, data: bytes) -> None:
        """Learn a peer, or learn it anew. What is wrong with it becomes the cause of its WRITEs."""
        known = self._peers.get(worker)
        if known is not None and known.loaded and known.data == data:
            known.leaving = False
            if known.lost:
                known.connect_after_ns = 0
            return
        if known is not None and known.loaded:
            if known.handles:
                _log.warning("%s changed its memory while WRITEs to it are open: refused", worker)
                known.cause = "the peer changed its memory while WRITEs to it were open"
                return
            self._unload(known)
        peer = self._peers[worker] = Peer(worker, data)
        self._load(peer)

    def remove(self, worker: Worker) -> None:
        """Forget a peer, once its last handle is over."""
        peer = self._peers.get(worker)
        if peer is not None:
            peer.leaving = True
            self.settle(peer)

    def settle(self, peer: Peer) -> None:
        """Forget a leaving peer whose last handle is over."""
        if peer.leaving and not peer.handles and self._reconnects:
            self._unload(peer)
            if self._peers.get(peer.worker) is peer:
                del self._peers[peer.worker]

    def find(self, worker: Worker) -> Peer | str:
        """The peer, or why there is none to WRITE to."""
        peer = self._peers.get(worker)
        if peer is None or peer.leaving:
            return f"unknown peer {worker}: nothing was posted"
        return peer

    def memory(self, worker: Worker) -> Memory | None:
        """What is known of a peer's memory so far. Any thread."""
        peer = self._peers.get(worker)
        return None if peer is None else peer.memory

    def usable(self, peer: Peer) -> str:
        """Why no WRITE can be posted to `peer` now; "" where one can. Reconnects a lost peer."""
        if peer.leaving:
            return "the peer was removed"
        may_connect = self._reconnects and peer.lost and not peer.handles
        if may_connect and time.monotonic_ns() >= peer.connect_after_ns:
            self._unload(peer)
            self._load(peer)
        if peer.lost and not peer.cause:
            return "the connection to the peer is lost and not yet made anew"
        return peer.cause

    def lose(self, peer: Peer) -> None:
        """Note that the connection to `peer` failed. NIXL itself would fail from now on."""
        if not peer.lost:
            peer.lost = True
            peer.connect_after_ns = time.monotonic_ns() + RECONNECT_NS
            if not self._reconnects:
                self.lost[peer.worker] = time.monotonic_ns()

    def forget_all(self) -> None:
        """Disconnect every peer: one that vanishes unsaid may leave a peer's queue pair broken."""
        for peer in self._peers.values():
            self._unload(peer)
        self._peers.clear()

    def __len__(self) -> int:
        return len(self._peers)

    def _load(self, peer: Peer) -> None:
        peer.lost = peer.reached = False
        peer.cause = self._try_to_load(peer)
        if peer.cause:
            _log.warning("no WRITE to %s is possible: %s", peer.worker, peer.cause)

    def _try_to_load(self, peer: Peer) -> str:
        try:
            memory = decode_memory(peer.data)
        except RemoteProtocolError as error:
            return f"its memory description is not usable: {error}"
        for name, ours, theirs in (
            # Metadata of another version has been seen to end the peer's process.
            ("NIXL version", self._library, memory.library),
            ("backend", self._backend, memory.backend),
            ("agent", peer.agent, memory.agent),
        ):
            if ours != theirs:
                return f"{name} {theirs!r} does not fit: expected {ours!r}"
        if not self._reconnects:
            self.spent += 1
        try:
            if self._checks:
                check_metadata(memory.metadata, peer.agent, self._backend, memory.regions)
            loaded = self._agent.load(memory.metadata)
        except RemoteProtocolError as error:
            return f"NIXL is not asked to take its metadata: {error}"
        except NixlError as error:
            self._forget(peer.agent)  # NIXL may keep half of what it refused
            # For want of a descriptor, or of the peer's answer, it says no more than that: another
            # time it may well take them.
            peer.memory = memory
            self.lose(peer)
            return f"NIXL does not take its metadata: {error}"
        if loaded != peer.agent:
            self._forget(loaded)
            return f"its metadata names agent {loaded!r}: expected {peer.agent!r}"
        peer.memory = memory
        peer.loaded = True
        return ""

    def _unload(self, peer: Peer) -> None:
        if peer.loaded:
            peer.loaded = False
            self._forget(peer.agent)

    def _forget(self, name: str) -> None:
        if not self._reconnects:
            return
        self.spent += 1
        try:
            self._agent.forget(name)
        except NixlError as error:
            _log.debug("NIXL did not forget %s: %s", name, error)
