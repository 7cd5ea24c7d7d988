"""When a peer is connected, lost, connected anew and forgotten."""

from __future__ import annotations

import pytest

from pushkv.core.ids import EngineId, Incarnation, Worker
from pushkv.transport import Region
from pushkv_nixl import _peers
from pushkv_nixl._codec import agent_name, encode_memory
from pushkv_nixl._library import NixlError
from pushkv_nixl._peers import Peer, Peers
from pushkv_nixl._regions import RegionTable

D = Worker(EngineId("D"), Incarnation(1), 0)
NEXT = Worker(EngineId("D"), Incarnation(2), 0)
TABLE = RegionTable.of([Region(4096, 8)])


class FakeAgent:
    """Knows peers as NIXL does: it refuses a name it knows under other metadata."""

    def __init__(self) -> None:
        self.known: dict[str, bytes] = {}
        self.loads = 0
        self.refuses = False

    def load(self, metadata: bytes) -> str:
        if self.refuses:
            self.loads += 1
            raise NixlError("nixlBackendError", "no")
        name, _, rest = metadata.decode().partition("|")
        if rest == "broken" or self.known.get(name, metadata) != metadata:
            raise NixlError("nixlNotAllowedError", "no")
        self.loads += 1
        self.known[name] = metadata
        return name

    def forget(self, name: str) -> None:
        if name not in self.known:
            raise NixlError("nixlNotFoundError", "who?")
        del self.known[name]


def memory(worker: Worker, rest: str = "", library: str = "1.5.1", backend: str = "UCX") -> bytes:
    name = agent_name(worker)
    return encode_memory(library, backend, name, TABLE, f"{name}|{rest}".encode())


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def peers(agent: FakeAgent) -> Peers:
    return Peers(agent, "1.5.1", "UCX", checks=False)  # type: ignore[arg-type]


def found(peers: Peers, worker: Worker = D) -> Peer:
    peer = peers.find(worker)
    assert isinstance(peer, Peer)
    return peer


def test_the_same_memory_again_changes_nothing(peers: Peers, agent: FakeAgent) -> None:
    peers.add(D, memory(D))
    peer = found(peers)
    peers.add(D, memory(D))
    assert found(peers) is peer
    assert peers.usable(peer) == ""
    assert agent.loads == 1


def test_incarnations_of_one_engine_are_different_peers(peers: Peers, agent: FakeAgent) -> None:
    peers.add(D, memory(D))
    peers.add(NEXT, memory(NEXT))
    assert len(agent.known) == 2
    peers.remove(D)
    assert list(agent.known) == [agent_name(NEXT)]
    assert "unknown peer" in str(peers.find(D))
    assert peers.usable(found(peers, NEXT)) == ""


def test_nixl_is_not_asked_to_load_what_has_not_its_form(agent: FakeAgent) -> None:
    peers = Peers(agent, "1.5.1", "UCX", checks=True)  # type: ignore[arg-type]
    peers.add(D, memory(D))
    assert "NIXL is not asked" in peers.usable(found(peers))
    assert (agent.loads, agent.known) == (0, {})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (memory(D, library="1.3.2"), "NIXL version '1.3.2'"),
        (memory(D, backend="LIBFABRIC"), "backend 'LIBFABRIC'"),
        (memory(NEXT), "agent"),
        (memory(D, "broken"), "does not take its metadata"),
        (encode_memory("1.5.1", "UCX", agent_name(D), TABLE, b"other|"), "names agent 'other'"),
    ],
)
def test_a_peer_that_does_not_fit_says_why_and_leaves_nothing_behind(
    peers: Peers, agent: FakeAgent, data: bytes, said: str
) -> None:
    peers.add(D, data)
    assert said in peers.usable(found(peers))
    assert agent.known == {}
    peers.add(D, memory(D))
    assert peers.usable(found(peers)) == ""


def test_a_peer_that_nixl_refused_once_is_tried_again(
    peers: Peers, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 10**12
    monkeypatch.setattr("time.monotonic_ns", lambda: now)
    agent.refuses = True  # as for want of a descriptor
    peers.add(D, memory(D))
    peer = found(peers)
    assert peer.memory is not None
    assert "does not take" in peers.usable(peer)
    assert agent.loads == 1
    now += _peers.RECONNECT_NS
    assert "does not take" in peers.usable(peer)
    assert agent.loads == 2
    agent.refuses = False
    assert "does not take" in peers.usable(peer), "it is not tried all the time"
    now += _peers.RECONNECT_NS
    assert peers.usable(peer) == ""
    assert agent.loads == 3


def test_a_lost_peer_is_connected_anew_but_not_at_once_and_not_under_open_handles(
    peers: Peers, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 10**12
    monkeypatch.setattr("time.monotonic_ns", lambda: now)
    peers.add(D, memory(D))
    peer = found(peers)
    peers.lose(peer)
    assert "lost" in peers.usable(peer)
    now += _peers.RECONNECT_NS
    peer.handles = 1
    assert "lost" in peers.usable(peer)
    peer.handles = 0
    assert peers.usable(peer) == ""
    assert agent.loads == 2

    peers.lose(peer)
    assert "lost" in peers.usable(peer)
    peers.add(D, memory(D))  # its link was made anew: no need to wait
    assert peers.usable(peer) == ""
    assert agent.loads == 3


def test_a_removed_peer_is_forgotten_with_its_last_handle(peers: Peers, agent: FakeAgent) -> None:
    peers.add(D, memory(D))
    peer = found(peers)
    peer.handles = 1
    peers.remove(D)
    assert "unknown peer" in str(peers.find(D))
    assert peers.usable(peer)
    assert agent.known
    peer.handles = 0
    peers.settle(peer)
    assert agent.known == {}
    assert len(peers) == 0
    peers.remove(D)


def test_a_peer_that_is_added_again_before_its_last_handle_stays(
    peers: Peers, agent: FakeAgent
) -> None:
    peers.add(D, memory(D))
    peer = found(peers)
    peer.handles = 1
    peers.remove(D)
    peers.add(D, memory(D))
    assert found(peers) is peer
    peer.handles = 0
    peers.settle(peer)
    assert peers.usable(peer) == ""
    assert agent.loads == 1


def test_changed_memory_is_refused_while_handles_are_open(peers: Peers, agent: FakeAgent) -> None:
    peers.add(D, memory(D))
    peer = found(peers)
    peer.handles = 1
    peers.add(D, memory(D, "changed"))
    assert "changed" in peers.usable(peer)
    peer.handles = 0
    peers.add(D, memory(D, "changed"))
    assert peers.usable(found(peers)) == ""
    assert agent.loads == 2
    peers.forget_all()
    assert agent.known == {}
