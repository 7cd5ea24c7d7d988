"""The admin endpoint of running engines: what it tells, what it does, and who gets nothing."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attrs import evolve
from tests.runtime.node import QUICK, Node, right, until
from tests.runtime.operator_calls import Bomb, ask, place, say, state, unbounded

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import Duration, seconds
from pushkv.core.messages import Reason
from pushkv.model.faults import Fault, FaultRule
from pushkv.runtime.admin.operator import RISK
from pushkv_memory import CAPABILITIES, MemoryFabric

PROMPT = tuple(range(100))
SLOW = {"expected": seconds(60), "waiting": seconds(60), "hold": seconds(60)}
__all__ = ["place"]
CONFIRMED = {"nothing_can_reach_them": True}


def test_it_tells_of_links_and_of_transfers_under_way(place: Path) -> None:
    fabric = MemoryFabric()
    p, d = place / "p", place / "d"
    with (
        Node(fabric, "P", admin_socket=p, changes=SLOW) as producer,
        Node(fabric, "D", admin_socket=d, changes=SLOW) as consumer,
    ):
        generation = consumer.consume("t", PROMPT, producer.address)
        until(lambda: state(d).transfers and state(d).transfers[0].status == "consumer.registered")
        until(lambda: state(p).transfers and state(p).transfers[0].attempt == 0)
        until(lambda: state(p).links[0].lease_left_s)
        here, there = state(d), state(p)
        (mine,), (theirs,) = here.transfers, there.transfers
        assert (mine.role, mine.transfer, mine.attempt, mine.blocks) == ("consumer", "t", 0, 7)
        assert (theirs.role, theirs.transfer, theirs.attempts) == ("producer", "t", 1)
        assert theirs.status == "producer.expected"
        assert (str(mine.peer), str(theirs.peer)) == (_name(producer), _name(consumer))
        assert mine.age_s >= mine.status_s >= 0.0
        assert (here.engine, here.rank, here.process) == ("D", 0, os.getpid())
        assert here.health.exposed_blocks == 7
        (link,), (other,) = here.links, there.links
        host, port = producer.runtime.address
        assert (link.role, link.address, link.status) == ("consumer", f"{host}:{port}", "link.up")
        assert (other.role, other.address) == ("producer", "")
        assert (str(link.peer), str(other.peer)) == (_name(producer), _name(consumer))
        lease_s = QUICK.lease / 1e9
        assert link.lease_left_s is not None
        assert 0 < link.lease_left_s <= lease_s
        assert other.lease_left_s is not None
        assert 0 < other.lease_left_s < lease_s
        producer.produce("t", PROMPT)
        assert generation.result(10).tokens == right(PROMPT)
        until(lambda: not state(d).transfers and not state(p).transfers)


def _name(node: Node) -> str:
    return f"{node.config.engine}/{node.config.incarnation:016x}/0"


def test_the_oldest_come_first_and_no_more_than_were_asked_for(place: Path) -> None:
    fabric = MemoryFabric()
    d = place / "d"
    with (
        Node(fabric, "P", changes=SLOW) as producer,
        Node(fabric, "D", admin_socket=d, changes=SLOW) as consumer,
    ):
        for name in "abc":
            consumer.consume(name, (1, 2, 3), producer.address)
            until(lambda: len(state(d).transfers) == 1 + "abc".index(name))  # noqa: B023
        assert [each.transfer for each in state(d).transfers] == ["a", "b", "c"]
        few = state(d, "?most=2")
        assert [each.transfer for each in few.transfers] == ["a", "b"]
        assert few.transfers_in_all == 3
        for bad in ("x", "-1", "1" * 20):
            assert ask(d, "GET", f"/v1/state?most={bad}")[0] == 400
        for name in "abc":
            consumer.engine.cancel(name)  # type: ignore[arg-type]


def test_a_drain_begins_and_ends_from_outside(place: Path) -> None:
    fabric = MemoryFabric()
    d = place / "d"
    with (
        Node(fabric, "P") as producer,
        Node(fabric, "D", admin_socket=d) as consumer,
    ):
        assert state(d).drain.is_on is False
        assert ask(d, "POST", "/v1/drain") == (200, {"is_on": True, "left": 0, "is_empty": True})
        producer.produce("t", PROMPT).result(10)
        drained = consumer.consume("t", PROMPT, producer.address).result(10)
        assert drained.reason is Reason.CLOSED
        assert state(d).drain.is_on is True
        status, told = ask(d, "POST", "/v1/undrain")
        assert (status, told["is_on"]) == (200, False)
        producer.produce("u", PROMPT).result(10)
        assert consumer.consume("u", PROMPT, producer.address).result(10).reason is None


def test_quarantined_blocks_come_back_on_the_operators_word(place: Path) -> None:
    fabric, bomb, path = unbounded(death_bound=None), Bomb(), place / "d"
    with (
        Node(fabric, "P", changes=SLOW, observer=bomb) as producer,
        Node(fabric, "D", changes=SLOW, admin_socket=path) as consumer,
    ):
        free = consumer.free
        consumer.consume("t", PROMPT, producer.address)
        until(lambda: state(path).transfers and state(path).links[0].lease_left_s)
        bomb.armed = True
        until(lambda: state(path).quarantined)
        (held,) = state(path).quarantined
        assert (held.role, held.transfer, held.blocks) == ("consumer", "t", 7)
        assert [proof.kind for proof in held.proofs] == ["verdict", "word"]
        assert state(path).health.quarantined_blocks == 7

        status, told = ask(path, "POST", "/v1/release", {"transfer": "t"})
        assert (status, RISK in told["error"]) == (409, True)
        assert ask(path, "POST", "/v1/release", {"transfer": "u", **CONFIRMED})[0] == 404
        assert consumer.free < free

        status, told = ask(path, "POST", "/v1/release", {"transfer": "t", **CONFIRMED})
        assert status == 200
        assert [each["transfer"] for each in told["released"]] == ["t"]
        until(lambda: consumer.free == free)
        assert state(path).quarantined == ()


@pytest.mark.parametrize("bound", [None, CAPABILITIES.write_bound])
def test_it_says_which_proofs_would_do(place: Path, bound: Duration | None) -> None:
    fabric = MemoryFabric(capabilities=evolve(CAPABILITIES, write_bound=bound))
    bomb, path = Bomb(), place / "d"
    slow = {**SLOW, "lease": seconds(30)}
    with (
        Node(fabric, "P", changes=slow, observer=bomb) as producer,
        Node(fabric, "D", changes=slow, admin_socket=path) as consumer,
    ):
        consumer.consume("t", PROMPT, producer.address)
        until(lambda: state(path).transfers and state(path).links[0].lease_left_s)
        bomb.armed = True
        producer.produce("t", PROMPT)
        until(lambda: state(path).quarantined)
        (held,) = state(path).quarantined
        fence = () if bound is None else ("fence",)
        assert tuple(each.kind for each in held.proofs) == (*fence, "verdict", "death", "word")
        due_s = held.proofs[0].due_s
        assert due_s is None if bound is None else 0 < due_s <= 30  # type: ignore[operator]
        assert str(held.peer) == _name(producer)
        assert ask(path, "POST", "/v1/release", {"transfer": "t", **CONFIRMED})[0] == 200
        until(lambda: not state(path).quarantined)


def test_a_peer_is_released_as_a_whole_and_no_other(place: Path) -> None:
    fabric, path, bombs = unbounded(), place / "d", (Bomb(), Bomb())
    with (
        Node(fabric, "P", changes=SLOW, observer=bombs[0]) as one,
        Node(fabric, "Q", changes=SLOW, observer=bombs[1]) as two,
        Node(fabric, "D", changes=SLOW, admin_socket=path) as consumer,
    ):
        for name, producer in (("a", one), ("b", one), ("c", two)):
            consumer.consume(name, (1, 2, 3), producer.address)
        until(lambda: len(state(path).transfers) == 3)
        until(lambda: all(link.lease_left_s for link in state(path).links))
        peer = {"engine": "P", "incarnation": f"{one.config.incarnation:016x}", "rank": 0}
        for bomb in bombs:
            bomb.armed = True
        until(lambda: len(state(path).quarantined) == 3)
        status, told = ask(path, "POST", "/v1/release", {"peer": peer, **CONFIRMED})
        assert status == 200
        assert {each["transfer"] for each in told["released"]} == {"a", "b"}
        until(lambda: [each.transfer for each in state(path).quarantined] == ["c"])
        assert ask(path, "POST", "/v1/release", {"transfer": "c", **CONFIRMED})[0] == 200


def test_a_peer_whose_link_is_up_is_not_dead(place: Path) -> None:
    """One of its transfers is quarantined all the same: the operator is told what to do instead."""
    faults = [
        FaultRule(Fault.UNKNOWN_OUTCOME, script=(0,), least=seconds(60), most=seconds(60)),
        FaultRule(Fault.SOURCE_BUSY, 1_000_000),
    ]
    capabilities = evolve(CAPABILITIES, write_bound=None)
    fabric, path = MemoryFabric(faults=faults, capabilities=capabilities), place / "d"
    with (
        Node(fabric, "P", changes=SLOW, admin_socket=place / "p") as producer,
        Node(fabric, "D", changes=SLOW, admin_socket=path) as consumer,
    ):
        generation = consumer.consume("t", PROMPT, producer.address)
        producer.produce("t", PROMPT)
        until(lambda: state(path).quarantined and state(place / "p").quarantined)
        peer = {"engine": "P", "incarnation": f"{producer.config.incarnation:016x}", "rank": 0}
        status, told = ask(path, "POST", "/v1/release", {"peer": peer, **CONFIRMED})
        assert (status, "its link is up" in told["error"]) == (409, True)
        (source,) = state(place / "p").quarantined
        assert (source.role, str(source.peer)) == ("producer", _name(consumer))
        assert [each.kind for each in source.proofs] == ["death", "word"]
        for each in (path, place / "p"):
            assert ask(each, "POST", "/v1/release", {"transfer": "t", **CONFIRMED})[0] == 200
        until(lambda: not state(path).quarantined and not state(place / "p").quarantined)
        assert generation.result(10).tokens == right(PROMPT)


BAD_ORDERS: tuple[tuple[object, int], ...] = (
    ({}, 400),
    ({"transfer": "t", "peer": {"engine": "P", "incarnation": "0", "rank": 0}}, 400),
    ({"transfer": 7}, 400),
    ({"transfer": "t", "confirmed": True}, 400),
    ([], 400),
    ({"peer": {"engine": "P"}}, 400),
    ({"peer": {"engine": "P", "incarnation": "no number", "rank": 0}}, 404),
)


def test_what_is_malformed_harms_only_itself(place: Path) -> None:
    d = place / "d"
    with Node(MemoryFabric(), "D", admin_socket=d) as node:
        for order, expected in BAD_ORDERS:
            assert ask(d, "POST", "/v1/release", order)[0] == expected, order
        assert ask(d, "GET", "/v1/drain")[0] == 405
        assert ask(d, "GET", "/v2")[0] == 404
        assert b" 400 " in say(d, b"\x16\x03\x01\0\xff garbage\r\n\r\n")
        assert b" 431 " in say(d, b"GET / HTTP/1.1\r\nhost: e\r\nx: " + b"x" * 17_000)
        long = b"POST /v1/release HTTP/1.1\r\nhost: e\r\ncontent-length: 99999\r\n\r\n"
        assert b" 413 " in say(d, long + b"x" * 66_000)
        assert say(d, b"") == b""
        assert b" 400 " in say(d, b"GET / HTTP/1.1\r\n\r\n")
        pipelined = b"GET /v1/state HTTP/1.1\r\nhost: e\r\n\r\n" * 3
        assert say(d, pipelined).count(b"HTTP/1.1 200") == 1
        assert state(d).drain.is_on is False
        assert node.runtime.counters["admin_refused"] == len(BAD_ORDERS) + 7
        assert node.runtime.health is not None
        assert node.runtime.health.is_running


def _connect_as(user: int, path: Path) -> None:
    """In a thread that is over soon: only its own view of the file system changes."""
    ctypes.CDLL(None).setfsuid(user)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))


def test_only_this_user_gets_in(place: Path) -> None:
    d = place / "d"
    with Node(MemoryFabric(), "D", admin_socket=d):
        assert stat.S_IMODE(d.stat().st_mode) == 0o600
        if os.geteuid() != 0:
            pytest.skip("only root can try as another user")
        with pytest.raises(PermissionError), ThreadPoolExecutor(1) as pool:
            pool.submit(_connect_as, 65_534, d).result()
        _connect_as(0, d)
    assert not d.exists()


def test_a_socket_that_is_left_over_is_replaced_and_one_in_use_is_not(place: Path) -> None:
    d = place / "d"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(d))
    with Node(MemoryFabric(), "D", admin_socket=d):
        other = Node(MemoryFabric(), "E", admin_socket=d)
        with pytest.raises(ConfigurationError, match="another engine answers there"):
            other.runtime.start()
        assert state(d).engine == "D"


def test_a_path_that_cannot_be_is_named(place: Path) -> None:
    node = Node(MemoryFabric(), "D", admin_socket=place / ("x" * 120))
    with pytest.raises(ConfigurationError, match="admin_socket"):
        node.runtime.start()
