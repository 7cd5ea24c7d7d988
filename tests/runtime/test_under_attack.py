"""A producer that strangers and bad peers attack, and the peers that it serves meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tests.runtime.node import BLOCKS, QUICK, Node, right, until

from pushkv.core.ids import EngineId, Incarnation, seconds
from pushkv.core.messages import Grant, Hello, Ping, Reason
from pushkv.runtime import Limits, SharedSecret
from pushkv.runtime.credentials import Tls
from pushkv.wire import FRAME_BYTES_MOST, Decoder, frame
from pushkv_memory import MemoryFabric

PROMPT = tuple(range(60))
LEASE_S = QUICK.lease / 1e9
PATIENT = {
    "connect": seconds(5),
    "waiting": seconds(20),
    "expected": seconds(1),
    "hold": seconds(20),
}
"""A machine that is busy with strangers is slow, which is not what is asked here."""


@pytest.fixture(params=["plaintext", "tls"])
def credentials(request: pytest.FixtureRequest, tmp_path: Path) -> SharedSecret | None:
    if request.param == "plaintext":
        return None
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef" * 4)
    return SharedSecret(path)


@pytest.fixture
def fabric() -> MemoryFabric:
    return MemoryFabric()


@pytest.fixture
def producer(fabric: MemoryFabric, credentials: SharedSecret | None) -> Iterator[Node]:
    limits = Limits(handshake_s=0.5)
    with Node(fabric, "P", credentials=credentials, changes=PATIENT, limits=limits) as node:
        yield node


def connect(producer: Node, *, secure: bool = True) -> socket.socket:
    """A connection to the producer's control channel; with TLS where that is asked for there."""
    plain = socket.create_connection(producer.runtime.address, timeout=10)
    credentials = producer.config.credentials
    if credentials is None or not secure:
        return plain
    return Tls(credentials, EngineId("bad")).client().wrap_socket(plain)


def hello_of(peer: socket.socket) -> Hello:
    """The producer's; it speaks first."""
    decoder = Decoder()
    found: list[Any] = []
    while not found:
        found = decoder.feed(peer.recv(65_536))
    assert isinstance(found[0], Hello)
    return found[0]


def greet(producer: Node, name: str = "bad") -> socket.socket:
    """A peer that fits, and has said so."""
    peer = connect(producer)
    theirs = hello_of(peer)
    mine = evolve(theirs, engine=EngineId(name), incarnation=Incarnation(99), nonce=5)
    peer.sendall(frame(mine))
    return peer


def is_hung_up_on(peer: socket.socket, within_s: float = 10.0) -> bool:
    peer.settimeout(within_s)
    try:
        while peer.recv(65_536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    finally:
        peer.close()
    return True


def serves_a_new_peer(producer: Node, name: str) -> None:
    """A peer that was never there before is served."""
    credentials = producer.config.credentials
    with Node(producer.fabric, name, credentials=credentials, changes=PATIENT) as consumer:
        producer.produce(name, PROMPT)
        generation = consumer.consume(name, PROMPT, producer.address).result(30)
        assert (generation.reason, generation.tokens) == (None, right(PROMPT))
        assert not generation.prefilled
        until(lambda: consumer.free == BLOCKS)


def bad_body(tag: int) -> bytes:
    return (7).to_bytes(4, "big") + bytes((1, tag)) + b"\xc1\xc1\xc1\xc1\xc1"


GARBAGE: dict[str, bytes] = {
    "empty frame": b"\0\0\0\0",
    "huge frame": (FRAME_BYTES_MOST + 1).to_bytes(4, "big"),
    "http": b"POST / HTTP/1.1\r\n\r\n",
    "malformed hello": bad_body(13),
    "malformed register": bad_body(1),
    "another protocol": b"\0\0\0\x03\x09\x0d\x90",
    "no message": bad_body(200),
    "random": os.urandom(3_000),
}


def test_one_malformed_frame_and_new_peers_still_connect(producer: Node) -> None:
    serves_a_new_peer(producer, "before")
    for name, garbage in GARBAGE.items():
        for secure in (True, False):
            peer = connect(producer, secure=secure)
            peer.sendall(garbage)
            assert is_hung_up_on(peer), name
        greeted = greet(producer)
        greeted.sendall(garbage)
        greeted.close()
    serves_a_new_peer(producer, "after")
    refused = {"broken_frame", "malformed_hello", "malformed_message", "tls_failed"}
    counted = producer.runtime.counters
    assert sum(counted[each] for each in refused) >= 2 * len(GARBAGE)
    assert not counted["connection_broke"], "nothing was unexpected"
    assert not counted["local_protocol_error"]


def test_a_first_frame_that_no_peer_of_this_layout_would_send_is_not_read(
    producer: Node,
) -> None:
    peer = connect(producer)
    theirs = hello_of(peer)
    with contextlib.suppress(OSError):
        peer.sendall(frame(evolve(theirs, memory=b"m" * 3_000_000)))
    assert is_hung_up_on(peer)
    assert producer.runtime.counters["broken_frame"] == 1
    serves_a_new_peer(producer, "next")


def test_a_thousand_strangers_and_a_transfer_among_them(
    producer: Node, caplog: pytest.LogCaptureFixture
) -> None:
    kept = []
    for number in range(1_000):
        kept.append(socket.create_connection(producer.runtime.address))
        if number in (300, 700):
            serves_a_new_peer(producer, f"after-{number}")
    serves_a_new_peer(producer, "last")
    assert producer.runtime.counters["stranger_dropped"] > 800
    warnings = [each for each in caplog.messages if "stranger_dropped" in each]
    assert 1 <= len(warnings) <= 5, "a line in ten seconds: no stranger fills the log"
    for stranger in kept:
        stranger.close()


@pytest.mark.parametrize("says", ["nothing", "half a message", "what keeps no link alive"])
def test_a_peer_that_is_greeted_and_idles_is_hung_up_on_after_a_lease(
    producer: Node, says: str
) -> None:
    peer = greet(producer)
    began = time.monotonic()
    if says == "half a message":
        peer.sendall(frame(Ping(1))[:-1])
    elif says == "what keeps no link alive":
        grant = Grant(1, QUICK.lease, Incarnation(99), producer.config.incarnation)
        peer.sendall(frame(grant) + frame(Ping(3)))
    assert is_hung_up_on(peer)
    assert time.monotonic() - began > LEASE_S / 2
    serves_a_new_peer(producer, "next")


def test_a_peer_that_answers_nothing_and_reads_nothing_is_let_go(producer: Node) -> None:
    peers = [greet(producer, f"bad-{number}") for number in range(20)]
    serves_a_new_peer(producer, "among them")
    for peer in peers:
        assert is_hung_up_on(peer)


def test_an_engine_that_is_told_to_dial_itself_says_that_nobody_prefills(producer: Node) -> None:
    """A client may write any address into its request, that of the decode engine itself, too."""
    generation = producer.consume("t", PROMPT, producer.address).result(30)
    assert generation.reason is Reason.NEVER_ARRIVED
    assert generation.tokens == right(PROMPT), "computed by itself"
    until(lambda: producer.free == BLOCKS)
    serves_a_new_peer(producer, "next")


def test_a_stranger_is_told_nothing_that_opens_memory(producer: Node) -> None:
    with connect(producer) as peer:
        assert hello_of(peer).memory == b""
    if producer.config.credentials is not None:
        with connect(producer, secure=False) as peer:
            peer.sendall(b"\x16\x03\x01\x00\x05hello")
            heard = b""
            peer.settimeout(10)
            try:
                while more := peer.recv(4_096):
                    heard += more
            except OSError:
                pass
            assert b"P" not in heard


def test_a_certificate_is_asked_for(producer: Node) -> None:
    if producer.config.credentials is None:
        pytest.skip("plaintext asks for none")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    plain = socket.create_connection(producer.runtime.address, timeout=10)
    with context.wrap_socket(plain) as peer, contextlib.suppress(ssl.SSLError):
        assert peer.recv(1) == b""
    until(lambda: producer.runtime.counters["tls_failed"] == 1)
    serves_a_new_peer(producer, "next")
