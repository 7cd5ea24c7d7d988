"""What is posted while a connection is being made: one handle, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.nixl.test_peers import D, FakeAgent, memory

from pushkv.core.capabilities import Capabilities
from pushkv.core.ids import AttemptId, EngineId, Incarnation, TransferId
from pushkv.transport import Permit, Write, WriteOutcome
from pushkv_nixl._library import NixlError
from pushkv_nixl._open_write import OpenWrite, Step
from pushkv_nixl._peers import Peer, Peers
from pushkv_nixl._pieces import Piece

STRONG = Capabilities("strong", done_means_visible=True)
ROW = np.array([[4096, 8, 0]], np.uint64)


class FakeNixl(FakeAgent):
    """Handles are open until `over` has them; one of `broken` has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[int] = []
        self.over: set[int] = set()
        self.broken: set[int] = set()

    def prepare(self, peer: str, piece: Piece, notice: bytes) -> int:
        return len(self.posted)

    def post(self, handle: int) -> bool:
        self.posted.append(handle)
        return handle in self.over

    def check(self, handle: int) -> bool:
        if handle in self.broken:
            raise NixlError("nixlRemoteDisconnectError", "gone")
        return handle in self.over

    def release(self, handle: int) -> None:
        assert handle in self.posted


class Rig:
    def __init__(self) -> None:
        self.nixl = FakeNixl()
        self.peers = Peers(self.nixl, "1.5.1", "UCX", checks=False)  # type: ignore[arg-type]
        self.peers.add(D, memory(D))

    def write(self, number: int, pieces: int = 1) -> OpenWrite:
        peer = self.peers.find(D)
        assert isinstance(peer, Peer)
        permit = Permit()
        permit.until_ns = 1 << 62
        attempt = AttemptId(EngineId("D"), Incarnation(1), 0, 0, TransferId("t"), number)
        write = Write(D, attempt, 0, 7, ROW[:, :2], ROW[:, :2], permit)
        return OpenWrite(number, write, peer, [Piece(ROW, ROW, False, False)] * pieces)

    def post(self, write: OpenWrite, before: Callable[[], None] = lambda: None) -> Step:
        nixl: Any = self.nixl
        return write.post_next(nixl, self.peers, lambda: 1, STRONG, set(), before)

    def check(self, write: OpenWrite) -> bool:
        return write.check(self.nixl, self.peers)  # type: ignore[arg-type]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_nothing_is_posted_beside_the_handle_that_connects(rig: Rig) -> None:
    first, second = rig.write(1, pieces=2), rig.write(2)
    assert rig.post(first) is Step.POSTED
    assert rig.post(first) is rig.post(second) is Step.NOT_READY
    assert (second.eager, rig.nixl.posted) == (False, [0])
    rig.nixl.over.add(0)
    assert rig.check(first)
    assert second.eager
    assert rig.post(first) is rig.post(second) is Step.STOPPED
    assert rig.nixl.posted == [0, 1, 2]


def test_a_handle_that_is_done_at_once_has_connected(rig: Rig) -> None:
    rig.nixl.over.add(0)
    assert {rig.post(rig.write(number)) for number in (1, 2, 3)} == {Step.STOPPED}
    assert rig.nixl.posted == [0, 1, 2], "the second is still open"


def test_what_is_done_before_a_post_may_take_so_long_that_the_permit_ends(rig: Rig) -> None:
    rig.nixl.over.add(0)
    kept, ended = rig.write(1), rig.write(2)
    seen: list[list[int]] = []
    assert rig.post(kept, lambda: seen.append(list(rig.nixl.posted))) is Step.STOPPED
    assert (seen, rig.nixl.posted) == ([[]], [0]), "before the post, not after it"

    def stop() -> None:
        ended.write.permit.until_ns = 0

    rig.nixl.release = lambda handle: None  # type: ignore[method-assign]
    assert rig.post(ended, stop) is Step.STOPPED
    assert (ended.outcome, rig.nixl.posted) == (WriteOutcome.REFUSED, [0])


def test_a_connection_that_is_made_anew_is_waited_for_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pushkv_nixl._peers.RECONNECT_NS", 0)
    rig.nixl.over.add(0)
    rig.post(rig.write(1))
    rig.nixl.broken.add(1)
    lost = rig.write(2)
    rig.post(lost)
    assert rig.check(lost)
    assert rig.peers.usable(lost.peer) == ""
    rig.post(rig.write(3))
    assert rig.post(rig.write(4)) is Step.NOT_READY
