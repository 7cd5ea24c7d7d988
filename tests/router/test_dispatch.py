"""What the published router sends to either leg: the ground the adapter's parameters stand on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from attrs import define
from tests.demo.backends import Engine, Exchange, Json, engine, wait_for
from tests.router.router import router_server

from pushkv.demo.supervise import run_servers

pytestmark = [pytest.mark.router, pytest.mark.asyncio]

PULL: Json = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "P-1",
    "remote_host": "10.0.0.1",
    "remote_port": 7000,
    "tp_size": 1,
    "transfer_id": "t-1",
    "of_another_version": {"kept": True},
}
PUSH = PULL | {"transfer_mode": "push"}


@define
class Stage:
    """One prefill and one decode engine behind the router."""

    prefill: Engine
    decode: Engine
    url: str

    async def ask(self, answer: Json) -> tuple[Json, Json]:
        """One request, for which the prefill engine answers these parameters.

        Returns the parameters that each leg was sent.
        """

        async def prefilled(exchange: Exchange) -> None:
            await exchange.answer(COMPLETION | {"kv_transfer_params": answer})

        async def decoded(exchange: Exchange) -> None:
            await exchange.answer(COMPLETION)

        self.prefill.behave, self.decode.behave = prefilled, decoded
        body = {"model": "tiny", "prompt": "baba", "max_tokens": 8, "n": 2}
        async with httpx.AsyncClient(timeout=30) as client:
            response = await client.post(
                f"{self.url}/v1/completions", json=body, headers={"X-Request-Id": "the client's"}
            )
        assert response.status_code == 200
        assert self.prefill.seen[-1].body["max_tokens"] == 1
        assert self.decode.seen[-1].body["max_tokens"] == 8
        assert self.prefill.seen[-1].body["n"] == self.decode.seen[-1].body["n"] == 2
        return self.prefill.seen[-1].params, self.decode.seen[-1].params

    @property
    def request_ids(self) -> tuple[str, str]:
        """The X-Request-Id of the last request, as each leg got it."""
        first, second = self.prefill.seen[-1], self.decode.seen[-1]
        return first.headers["x-request-id"], second.headers["x-request-id"]


COMPLETION: Json = {
    "id": "cmpl-1",
    "object": "text_completion",
    "model": "tiny",
    "choices": [{"index": 0, "text": "words", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


@asynccontextmanager
async def staged(tmp_path: Path) -> AsyncIterator[Stage]:
    with engine() as prefill, engine() as decode:
        async with run_servers([router_server([prefill.url], [decode.url])], tmp_path) as servers:
            yield Stage(prefill, decode, servers["router"].url)


async def test_sequential_dispatch_hands_the_prefill_response_on_as_it_is(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        for _ in range(2):
            first, second = await stage.ask(PULL)
            assert first == {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            }
            assert second == PULL
            assert stage.request_ids[0] == stage.request_ids[1] != "the client's"


async def test_push_mode_sends_what_it_learned_and_its_own_request_id(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        for engine_id in ("P-1", "P-2"):
            _, second = await stage.ask(PUSH | {"remote_engine_id": engine_id})
            assert second == {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "P-1",  # one response behind a producer that restarted
                "remote_host": "10.0.0.1",
                "remote_port": 7000,
                "tp_size": 1,
                "remote_request_id": stage.request_ids[0],
            }
            assert stage.request_ids[0] == stage.request_ids[1] != "the client's"


async def test_push_mode_is_concurrent_from_the_second_request_on(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.ask(PUSH)
        decode_asked = stage.decode.arrived
        decode_asked.clear()

        async def after_decode(exchange: Exchange) -> None:
            await wait_for(decode_asked)
            await exchange.answer(COMPLETION | {"kv_transfer_params": PUSH})

        async def decoded(exchange: Exchange) -> None:
            await exchange.answer(COMPLETION)

        stage.prefill.behave, stage.decode.behave = after_decode, decoded
        async with httpx.AsyncClient(timeout=30) as client:
            response = await client.post(
                f"{stage.url}/v1/completions", json={"model": "tiny", "prompt": "baba"}
            )
        assert response.status_code == 200
