"""A request ends as what it was: completed, failed with the reason, or left by its client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from time import perf_counter

import anyio
import httpx
import pytest
from attrs import define, field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pushkv.bench.client import Answer, Router
from pushkv.bench.fleet import Pair
from pushkv.demo.systems import PULL, PUSH, PUSHKV, Place, System

pytestmark = pytest.mark.asyncio


@define
class Engines:
    """All engines of a test behind one application; what they were asked, in order."""

    prefill_status: int = 200
    decode_status: int = 200
    prefill_s: float = 0.0
    tokens: int = 3
    last: str = "length"
    stall: bool = False
    error: bool = False
    asked: list[tuple[str, dict[str, object], str]] = field(factory=list)

    async def answer(self, request: Request) -> Response:
        name = str(request.path_params["name"])
        body = await request.json()
        self.asked.append((name, body, request.headers["x-request-id"]))
        if name == "p":
            await anyio.sleep(self.prefill_s)
            params = {"from": "prefill"}
            return JSONResponse({"kv_transfer_params": params}, self.prefill_status)
        return StreamingResponse(self._events(), self.decode_status, media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        for index in range(self.tokens):
            reason = self.last if index == self.tokens - 1 else None
            choice = {"token_ids": [7], "finish_reason": reason}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
        if self.error:
            yield b'data: {"error": {"message": "broken"}}\n\n'
        if self.stall:
            await anyio.sleep(60)
        yield b"data: [DONE]\n\n"

    async def ask(
        self, system: System | None = None, *, concurrent: bool = False, **more: float
    ) -> Answer:
        app = Starlette(routes=[Route("/{name}/v1/completions", self.answer, methods=["POST"])])
        pair = None if system is None else Pair(system, Place(1), "p", "d")
        urls = {name: f"http://engines/{name}" for name in ("p", "d", "mono")}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            router = Router(client, urls, pair, concurrent)
            timeout_s = more.pop("timeout_s", 30.0)
            return await router.ask([4, 5], 3, perf_counter(), timeout_s=timeout_s, **more)

    def legs(self) -> dict[str, object]:
        return {name: body.get("kv_transfer_params") for name, body, _ in self.asked}


async def test_the_monolithic_engine_gets_the_request_as_it_is() -> None:
    engines = Engines()
    answer = await engines.ask()
    assert answer.completed
    assert answer.tokens == 3
    assert answer.ttft_s > 0
    assert answer.tpot_s is not None
    ((name, body, _),) = engines.asked
    assert (name, body["prompt"], body["max_tokens"]) == ("mono", [4, 5], 3)
    assert "kv_transfer_params" not in body


async def test_in_sequence_decode_gets_what_prefill_answered() -> None:
    engines = Engines()
    assert (await engines.ask(PULL)).completed
    assert [name for name, _, _ in engines.asked] == ["p", "d"]
    assert engines.asked[0][1]["max_tokens"] == 1
    assert engines.legs()["d"] == {"from": "prefill"}
    assert engines.asked[0][2] == engines.asked[1][2]


@pytest.mark.parametrize("system", [PUSH, PUSHKV], ids=lambda system: system.name)
async def test_at_once_both_legs_name_the_hand_over(system: System) -> None:
    engines = Engines()
    answer = await engines.ask(system, concurrent=True)
    assert answer.completed
    legs = engines.legs()
    assert set(legs) == {"p", "d"}
    assert answer.transfer in json.dumps(legs["d"])
    assert {request for _, _, request in engines.asked} == {answer.transfer}


async def test_at_once_does_not_wait_for_prefill() -> None:
    engines = Engines(prefill_s=60.0)
    assert (await engines.ask(PUSHKV, concurrent=True)).completed


@pytest.mark.parametrize(
    ("engines", "concurrent", "reason"),
    [
        (Engines(prefill_status=500), False, "prefill answered 500"),
        (Engines(prefill_status=500, stall=True), True, "prefill answered 500"),
        (Engines(decode_status=503), False, "d answered 503"),
        (Engines(tokens=2), False, "too few tokens"),
        (Engines(error=True), False, "an error in the stream"),
        (Engines(last="error"), False, "the engine ended it with an error"),
    ],
)
async def test_a_failure_is_a_failure_with_its_reason(
    engines: Engines, concurrent: bool, reason: str
) -> None:
    answer = await engines.ask(PUSHKV, concurrent=concurrent)
    assert answer.failure == reason
    assert not answer.completed
    assert not answer.cancelled


async def test_no_answer_in_time_is_a_failure() -> None:
    answer = await Engines(stall=True).ask(timeout_s=0.05)
    assert (answer.failure, answer.cancelled) == ("no answer in time", False)


async def test_a_client_that_leaves_is_no_failure() -> None:
    answer = await Engines(stall=True).ask(leave_s=0.05)
    assert (answer.failure, answer.cancelled, answer.completed) == ("", True, False)


async def test_a_client_that_would_leave_later_has_everything() -> None:
    assert (await Engines().ask(leave_s=20.0)).completed


async def test_an_engine_that_is_not_there_is_a_failure() -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        router = Router(client, {"mono": "http://127.0.0.1:1"}, None, False)
        answer = await router.ask([1], 1, perf_counter(), timeout_s=10)
    assert answer.failure == "ConnectError"
