"""Schedules are read or refused, and goodput is told by when requests arrived."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from pushkv.bench import faults
from pushkv.bench.client import Router
from pushkv.bench.faults import Fault, Outcome, parse_schedule, run_faults, summarise
from pushkv.bench.fleet import Fleet, Pair
from pushkv.bench.replay import Load, Settings
from pushkv.bench.workload import parse_cell, parse_lengths
from pushkv.core.errors import ConfigurationError
from pushkv.demo.supervise import ServerError, ServerSpec, free_ports
from pushkv.demo.systems import PUSHKV, Place


def test_a_schedule_is_read() -> None:
    assert parse_schedule("20:kill:prefill,25.5:start:prefill,30:freeze:decode") == (
        Fault(20, "kill", "prefill"),
        Fault(25.5, "start", "prefill"),
        Fault(30, "freeze", "decode"),
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", ""),
        ("20:kill", "20:kill"),
        ("x:kill:prefill", "x:kill:prefill"),
        ("20:hit:prefill", "20:hit:prefill"),
        ("20:kill:proxy", "20:kill:proxy"),
        ("-1:kill:prefill", "-1:kill:prefill"),
        ("nan:kill:prefill", "nan:kill:prefill"),
        ("20:kill:prefill,10:start:prefill", "10:start:prefill"),
        ("20:start:prefill", "20:start:prefill"),
        ("20:kill:prefill,21:kill:prefill", "21:kill:prefill"),
        ("20:freeze:prefill,21:start:prefill", "21:start:prefill"),
    ],
)
def test_what_cannot_be_is_refused(text: str, part: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_schedule(text)
    assert (caught.value.field, caught.value.value) == ("fault_schedule", part)


def test_what_comes_of_requests_is_told_by_their_arrival() -> None:
    bad = "prefill answered 500"
    result = summarise(
        [
            Outcome(1, 2, True, 4),
            Outcome(5, 12, False, 4),  # too slow, and ends after the fault: before, not failed
            Outcome(11, 13, False, 4, bad),
            Outcome(19, 20, False, 2, bad),
            Outcome(20, 21, False, 2),
            Outcome(22, 23, True, 2),
            Outcome(23, 24, False, 2),
            Outcome(24, 25, True, 2),
            Outcome(25, 26, True, 2),
            Outcome(26, 27, True, 2),
        ],
        first_s=10,
        last_s=20,
        end_s=30,
    )
    windows = [(w.n, w.good, w.failed, w.goodput_qps) for w in (result.before, result.during)]
    assert windows == [(2, 1, 0, 0.1), (2, 0, 2, 0.0)]
    assert (result.after.n, result.after.good, result.after.goodput_qps) == (6, 4, 0.4)
    assert result.recovery_s == 4
    assert result.wasted_block_s == 4 * 2 + 2 * 1
    assert result.failures == {bad: 2}


OUTCOMES = st.lists(
    st.builds(
        Outcome,
        st.floats(0, 29),
        st.just(30.0),
        st.booleans(),
        st.integers(1, 9),
        st.just(""),
    ),
    max_size=20,
)


@given(OUTCOMES)
@examples(deadline=None)
def test_every_request_is_in_one_window_and_recovery_needs_three(outcomes: list[Outcome]) -> None:
    result = summarise(outcomes, 10, 20, 30)
    assert result.before.n + result.during.n + result.after.n == len(outcomes)
    if result.recovery_s is not None:
        assert result.after.good >= 3
    assert result.wasted_block_s == 0


@pytest.mark.parametrize(("cell", "mode"), [("128", "pushkv"), ("128@1", "mono")])
def test_a_run_that_makes_no_sense_is_refused(cell: str, mode: str) -> None:
    settings = Settings([Load(parse_cell(cell, parse_lengths("4")))], modes=(mode,))
    with pytest.raises(ConfigurationError):
        run_faults(settings, parse_schedule("1:kill:prefill"), lambda text: None)


class Engines:
    """Two engines that answer at once, or fail while they are dead; a start takes its time."""

    def __init__(self) -> None:
        self.dead = False
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.dead:
            raise httpx.ConnectError("nobody listens")
        if request.url.host == "p":
            return httpx.Response(200, json={"kv_transfer_params": {}})
        event = json.dumps({"choices": [{"token_ids": [7, 7, 7, 7], "finish_reason": "length"}]})
        return httpx.Response(200, text=f"data: {event}\n\n")

    async def act(self, action: str) -> None:
        if action == "start":
            await anyio.sleep(0.5)
        self.dead = action == "kill"

    def require_alive(self) -> None:
        """Nothing else kills these."""

    @staticmethod
    def settings(logs: Path | None = None) -> Settings:
        cell = parse_cell("16@60", parse_lengths("4"))
        return Settings([Load(cell)], modes=("pushkv",), slo_ttft_s=60, slo_tpot_s=60, logs=logs)


@pytest.mark.asyncio
async def test_arrivals_go_on_while_an_engine_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start is late: the next action is then overdue, and so are arrivals after a stall."""
    monkeypatch.setattr(faults, "AFTER_S", 0.5)
    engines = Engines()
    pair = Pair(PUSHKV, Place(1), "p", "d")
    router = Router(engines.client, {"p": "http://p", "d": "http://d"}, pair, True)
    schedule = parse_schedule("0.5:kill:prefill,0.6:start:prefill,0.7:freeze:decode")
    traffic = faults._Traffic(engines.settings(), router, "pushkv")
    result = await traffic.under(
        schedule,
        {"prefill": engines, "decode": engines},  # type: ignore[dict-item]
        lambda text: None,
    )
    assert result.before.good == result.before.n > 5
    assert result.during.failed > 5
    assert result.after.good == result.after.n > 5
    assert result.failures == {"ConnectError": result.during.failed}
    assert result.recovery_s is not None


@pytest.fixture
def broken_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Engines whose processes end at once."""
    ports = free_ports(2)
    specs = [
        ServerSpec(name, [sys.executable, "-c", "raise SystemExit(3)"], port)
        for name, port in zip(("p", "d"), ports, strict=True)
    ]
    fleet = Fleet(specs, {"pushkv": Pair(PUSHKV, Place(1), "p", "d")}, {}, (tmp_path, tmp_path))
    monkeypatch.setattr(faults, "describe_fleet", lambda *arguments, **options: fleet)
    monkeypatch.setattr(faults, "write_tiny_model", lambda path, shape: path)
    return tmp_path


def test_an_engine_that_does_not_start_is_told_as_such(broken_engines: Path) -> None:
    with pytest.raises(ServerError, match="exit status 3"):
        run_faults(
            Engines.settings(broken_engines), parse_schedule("1:kill:prefill"), lambda text: None
        )


@pytest.mark.asyncio
async def test_a_death_that_was_not_asked_for_is_no_result(tmp_path: Path) -> None:
    """As when the system is out of memory: its cost would be told as the connector's."""
    (port,) = free_ports(1)
    code = f"""
import http.server, threading, time
server = http.server.HTTPServer(("127.0.0.1", {port}), http.server.BaseHTTPRequestHandler)
http.server.BaseHTTPRequestHandler.do_GET = lambda self: (
    self.send_response(200), self.end_headers())
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    time.sleep(1)
"""
    engine = faults._Engine(ServerSpec("p", [sys.executable, "-c", code], port), tmp_path)
    try:
        await engine.start()
        engine.require_alive()
        await engine.act("kill")
        engine.require_alive()
        await engine.act("start")
        assert engine._child is not None
        os.killpg(engine._child.group, signal.SIGKILL)
        await engine._child.end()
        with pytest.raises(ServerError, match="did not ask for"):
            engine.require_alive()
    finally:
        engine.close()
