"""A worker's bell is heard by the engine of its user, and the engine knows where it is not."""

from __future__ import annotations

import queue
import socket
import threading

import pytest

pytest.importorskip("vllm")

from pushkv_vllm import bell as module
from pushkv_vllm.bell import Bell, Bells

pytestmark = pytest.mark.vllm
SOON_S = 20.0


class Hearing:
    """An engine that listens to bells."""

    def __init__(self, *bells: Bell) -> None:
        found = Bells.at([each.address for each in bells])
        assert found is not None
        self.bells = found
        self.heard: queue.Queue[bool] = queue.Queue()
        found.listen(lambda: self.heard.put(found.rung))


def test_every_bell_is_heard() -> None:
    first, second = Bell(), Bell()
    engine = Hearing(first, second)
    for each in (first, second):
        each.ring()
        assert engine.heard.get(timeout=SOON_S)
        engine.bells.rung = False
    first.close()
    second.close()


def test_a_bell_that_rings_on_and_on_never_blocks() -> None:
    bell = Bell()
    found = Bells.at([bell.address])
    assert found is not None
    for _ in range(500_000):  # more than a socket holds: nobody takes any
        bell.ring()
    rung = threading.Event()
    found.listen(rung.set)
    assert rung.wait(SOON_S)
    bell.close()


def test_the_end_of_a_worker_is_a_ring_and_the_last_one() -> None:
    bell = Bell()
    engine = Hearing(bell)
    bell.close()
    assert engine.heard.get(timeout=SOON_S)
    bell.ring()
    with pytest.raises(queue.Empty):
        engine.heard.get(timeout=0.05)


def test_where_a_worker_cannot_be_heard_none_is() -> None:
    bell = Bell()
    assert Bells.at([bell.address, ""]) is None
    assert Bells.at([bell.address, "\0pushkv-bell-of-nobody"]) is None
    bell.close()


def test_another_users_process_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    bell = Bell()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(bell.address)
        users = iter([4_711])
        known = module._user
        monkeypatch.setattr(module, "_user", lambda peer: next(users, None) or known(peer))
        engine = Hearing(bell)
        bell.ring()
        assert engine.heard.get(timeout=SOON_S)
        stranger.settimeout(SOON_S)
        assert stranger.recv(1) == b""
    bell.close()
