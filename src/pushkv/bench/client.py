"""One request of a client, dispatched to the engines as a router would, its tokens timed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from time import perf_counter

import anyio
import httpx
from attrs import define, field

from pushkv.core.errors import PushKVError
from pushkv.demo.systems import new_name

from .fleet import Pair

__all__ = ["Answer", "Router"]

Json = dict[str, object]


class RequestError(PushKVError):
    """A leg of a request failed; the message is the reason, short and countable."""


@define
class Answer:
    """What one request came to.

    Attributes:
        planned_at: When it was to arrive, by `perf_counter`.
        transfer: The name of its hand-over.
        token_at: When each event with tokens came.
        tokens: How many tokens came.
        failure: Why it failed; empty if it did not.
        cancelled: Its client left.
    """

    planned_at: float
    transfer: str = field(factory=new_name)
    token_at: list[float] = field(factory=list)
    tokens: int = 0
    failure: str = ""
    cancelled: bool = False

    @property
    def completed(self) -> bool:
        """Whether every token came."""
        return not self.failure and not self.cancelled

    @property
    def ttft_s(self) -> float:
        """From the planned arrival to the first token."""
        return self.token_at[0] - self.planned_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None where there is no other."""
        if self.tokens < 2:
            return None
        return (self.token_at[-1] - self.token_at[0]) / (self.tokens - 1)


class Router:
    """Sends requests of one mode; a router inside the client, so that no mode pays for a proxy.

    Args:
        client: For all connections.
        urls: Base URL of each engine by name.
        pair: The pair; None for the monolithic engine.
        concurrent: Send both legs at once.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        urls: Mapping[str, str],
        pair: Pair | None,
        concurrent: bool,
    ) -> None:
        self._client = client
        self._urls = urls
        self._pair = pair
        self._concurrent = concurrent

    async def ask(
        self,
        prompt: Sequence[int],
        output_tokens: int,
        planned_at: float,
        *,
        timeout_s: float,
        leave_s: float | None = None,
    ) -> Answer:
        """Send a request now and read all of its answer; never raises for what an engine does.

        Args:
            prompt: Token ids.
            output_tokens: How many tokens to ask for; fewer are a failure.
            planned_at: When it was to be sent, by `perf_counter`.
            timeout_s: Longer is a failure.
            leave_s: The client leaves after this time, in seconds, if it is not over.
        """
        answer = Answer(planned_at)
        left = timeout_s if leave_s is None else min(leave_s, timeout_s)
        with anyio.move_on_after(left) as scope:
            try:
                await self._dispatch(prompt, output_tokens, answer)
                if answer.tokens < output_tokens:
                    answer.failure = "too few tokens"
            except RequestError as error:
                answer.failure = str(error)
            except (httpx.HTTPError, ValueError, LookupError) as error:
                answer.failure = type(error).__name__
        if scope.cancelled_caught:
            answer.cancelled = leave_s is not None and leave_s < timeout_s
            answer.failure = "" if answer.cancelled else "no answer in time"
        return answer

    async def _dispatch(self, prompt: Sequence[int], output: int, answer: Answer) -> None:
        body: Json = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if self._pair is None:
            await self._stream("mono", body, answer)
            return
        system = self._pair.system
        leg = body | {"max_tokens": 1, "kv_transfer_params": system.prefill(answer.transfer)}
        if not self._concurrent or system.decode is None:
            params = await self._prefill(leg, answer)
            await self._stream(self._pair.decode, body | {"kv_transfer_params": params}, answer)
            return
        params = system.decode(answer.transfer, self._pair.place)
        failure: RequestError | httpx.HTTPError | None = None
        async with anyio.create_task_group() as legs:

            async def prefill() -> None:
                nonlocal failure
                try:
                    await self._prefill(leg, answer)
                except (RequestError, httpx.HTTPError) as error:
                    failure = failure or error
                    legs.cancel_scope.cancel()

            legs.start_soon(prefill)
            try:
                await self._stream(self._pair.decode, body | {"kv_transfer_params": params}, answer)
            except (RequestError, httpx.HTTPError) as error:
                failure = failure or error
            legs.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _prefill(self, body: Json, answer: Answer) -> Json:
        assert self._pair is not None
        url = self._urls[self._pair.prefill] + "/v1/completions"
        response = await self._client.post(
            url, json=body, headers={"X-Request-Id": answer.transfer}
        )
        if response.status_code != 200:
            raise RequestError(f"prefill answered {response.status_code}")
        params = response.json().get("kv_transfer_params")
        if not isinstance(params, dict):
            raise RequestError("prefill gave no kv_transfer_params")
        return params

    async def _stream(self, engine: str, body: Json, answer: Answer) -> None:
        async with self._client.stream(
            "POST",
            self._urls[engine] + "/v1/completions",
            json=body | {"stream": True},
            headers={"X-Request-Id": answer.transfer},
        ) as response:
            if response.status_code != 200:
                raise RequestError(f"{engine.partition('-')[0]} answered {response.status_code}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                now = perf_counter()
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RequestError("an error in the stream")
                choice = event["choices"][0]
                if choice.get("finish_reason") == "error":
                    raise RequestError("the engine ended it with an error")
                count = len(choice.get("token_ids") or ())
                if count:
                    answer.token_at.append(now)
                    answer.tokens += count
