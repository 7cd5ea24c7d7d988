"""An admin endpoint tells nothing to who has no credentials, and costs no more than its bound."""

from __future__ import annotations

import socket
import ssl
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.runtime.keys import Authority
from tests.runtime.node import Node, right, until
from tests.runtime.operator_calls import WAIT_S, ask, place, state

from pushkv.cli.engines import UnreachableError, engine_at
from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import EngineId
from pushkv.runtime import Certificates, RuntimeConfig, SharedSecret
from pushkv.runtime.admin import operator, server
from pushkv.runtime.credentials import client_context
from pushkv.testing.reference_engine import ReferenceCache
from pushkv_memory import MemoryFabric

__all__ = ["place"]
PROMPT = tuple(range(100))


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def secret(path: Path, letter: str) -> SharedSecret:
    path.write_text(letter * 40)
    return SharedSecret(path)


@pytest.mark.parametrize("kind", ["secret", "certificates"])
def test_over_tcp_only_who_has_the_credentials_is_told_anything(place: Path, kind: str) -> None:
    port = free_port()
    target = f"127.0.0.1:{port}"
    credentials: Any = secret(place / "ours", "a")
    options: tuple[Path | None, ...] = (credentials.path, None, None, None)
    wrong: Any = secret(place / "theirs", "b")
    if kind == "certificates":
        credentials, wrong = (
            Authority(place, name).sign(f"{name}-d", ("D",)) for name in ("ours-ca", "theirs-ca")
        )
        options = (None, credentials.authority, credentials.certificate, credentials.key)
    with Node(MemoryFabric(), "D", credentials=credentials, admin_port=port) as node:
        assert engine_at(target, *options).state().engine == "D"
        told = node.runtime.counters["admin_answered"]
        nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
        for context in (None, nobody, client_context(wrong)):
            assert b"HTTP" not in heard(port, context)
        if kind == "secret":
            with pytest.raises(UnreachableError, match="credentials its own"):
                engine_at(target, wrong.path, None, None, None).drain(on=True)
        assert node.runtime.counters["admin_answered"] == told
        assert engine_at(target, *options).state().drain.is_on is False


def heard(port: int, context: ssl.SSLContext | None) -> bytes:
    """What comes back for a request over plain TCP, or over TLS with `context`."""
    question = b"POST /v1/drain HTTP/1.1\r\nhost: e\r\ncontent-length: 0\r\n\r\n"
    data = b""
    try:
        with ExitStack() as stack:
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            stream = plain if context is None else context.wrap_socket(plain)
            stack.enter_context(stream)
            stream.sendall(question)
            while chunk := stream.recv(65_536):
                data += chunk
    except (ssl.SSLError, ConnectionError):
        pass
    return data


def test_without_credentials_there_is_no_admin_port(tmp_path: Path) -> None:
    layout = ReferenceCache(layers=2, block_count=8).layout
    with pytest.raises(ConfigurationError, match="admin_port"):
        RuntimeConfig(EngineId("D"), layout, admin_port=1)
    certificates = Certificates(tmp_path, tmp_path, tmp_path)
    with pytest.raises(ConfigurationError, match="admin_port"):
        RuntimeConfig(EngineId("D"), layout, credentials=certificates, admin_port=65_536)


def test_who_connects_and_is_silent_holds_up_neither_transfers_nor_memory(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, a few are taken; the rest cost nothing until those are over."""
    monkeypatch.setattr(server, "AT_ONCE", 3)
    monkeypatch.setattr(server, "EXCHANGE_S", 0.5)
    live = most = 0
    exchange = server.AdminServer._exchange

    async def counted(self: server.AdminServer, *arguments: Any) -> None:
        nonlocal live, most
        live += 1
        most = max(most, live)
        try:
            await exchange(self, *arguments)
        finally:
            live -= 1

    monkeypatch.setattr(server.AdminServer, "_exchange", counted)
    fabric, d = MemoryFabric(), place / "d"
    with (
        Node(fabric, "P") as producer,
        Node(fabric, "D", admin_socket=d) as consumer,
        ExitStack() as stack,
    ):
        for _ in range(40):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(str(d))
        until(lambda: live == 3)
        producer.produce("t", PROMPT).result(10)
        assert consumer.consume("t", PROMPT, producer.address).result(10).tokens == right(PROMPT)
        assert most == 3
        stack.close()
        assert state(d).engine == "D"


def test_a_flood_of_questions_is_answered_at_a_rate(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the share of the thread that they take is bounded, whatever comes."""
    rate, questions = 10, 25
    monkeypatch.setattr(server, "PER_S", rate)
    began: list[float] = []
    exchange = server.AdminServer._exchange

    async def timed(self: server.AdminServer, *arguments: Any) -> None:
        began.append(anyio.current_time())
        await exchange(self, *arguments)

    monkeypatch.setattr(server.AdminServer, "_exchange", timed)
    d = place / "d"
    with Node(MemoryFabric(), "D", admin_socket=d), ThreadPoolExecutor(questions) as pool:
        answers = list(pool.map(lambda _: ask(d, "GET", "/v1/state")[0], range(questions)))
    assert answers == [200] * questions
    assert began[-1] - began[0] >= (questions - rate - 2) / rate


def test_the_machines_are_looked_at_no_more_often_than_that(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond, everybody is told the same; what a command changed is told at once."""
    monkeypatch.setattr(operator, "FRESH_NS", 3_600_000_000_000)
    looks = 0
    make = operator.Operator._state

    def counted(self: operator.Operator, most: int) -> Any:
        nonlocal looks
        looks += 1
        return make(self, most)

    monkeypatch.setattr(operator.Operator, "_state", counted)
    d = place / "d"
    with Node(MemoryFabric(), "D", admin_socket=d):
        for _ in range(20):
            assert state(d).drain.is_on is False
        assert looks == 1
        assert ask(d, "POST", "/v1/drain")[0] == 200
        assert state(d).drain.is_on is True
        assert looks == 2


def test_what_is_off_is_not_there() -> None:
    """No socket, no ages kept, and h11 is not asked for."""
    with Node(MemoryFabric(), "D") as node:
        loop = node.runtime._loop
        assert loop is not None
        assert loop._ages is None
        assert loop._endpoint._machines.lives == loop._trace.life  # type: ignore[union-attr]


def test_without_h11_it_says_what_to_install(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h11", None)
    monkeypatch.delitem(sys.modules, "pushkv.runtime.admin.server", raising=False)
    node = Node(MemoryFabric(), "D", admin_socket=place / "d")
    with pytest.raises(ImportError, match=r"pip install \"pushkv\[admin\]\""):
        node.runtime.start()
