"""Real vLLM engines of one system, which can be killed, stopped and started again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import httpx
from attrs import define, evolve, field, frozen

from pushkv.demo.engines import vllm_server
from pushkv.demo.supervise import Launched, ServerSpec, free_ports, launched, until_ready
from pushkv.demo.systems import Json, Place, System

__all__ = ["ANSWER_S", "Answer", "Fleet"]

BLOCKS = 48
"""Of 128 tokens each: three long prompts fill a decode engine."""
MAX_MODEL_LEN = 2_048
ANSWER_S = 60.0
"""Within which every client must have an answer. Nothing else runs on the machine's two cores that
long; a healthy pair needs about a second."""
PROBE_S = 10.0


@frozen
class Answer:
    """What a client got: tokens with status 200, an honest error, or nothing in time."""

    tokens: tuple[tuple[int, ...], ...] = ()
    error: str = ""
    after_s: float = 0.0

    @property
    def came(self) -> bool:
        """Whether there was any answer."""
        return bool(self.tokens or self.error)


@define(eq=False)
class _Engine:
    spec: ServerSpec
    port: int
    child: Launched
    stack: contextlib.ExitStack = field(factory=contextlib.ExitStack)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.spec.port}"


class Fleet:
    """A prefill and a decode engine of `system`, and the router between them, which is the test."""

    def __init__(self, system: System, model: Path, logs: Path) -> None:
        self.system = system
        self._model = model
        self._logs = logs
        self._engines: dict[str, _Engine] = {}
        self._lives = 0
        self.client = httpx.AsyncClient(
            timeout=None,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Self:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.start, "prefill", 0)
            tasks.start_soon(self.start, "decode", 1)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for engine in self._engines.values():
            engine.stack.close()
        with anyio.CancelScope(shield=True):
            await self.client.aclose()

    # -- engines

    async def start(self, name: str, core: int) -> None:
        """Start an engine, on the ports it had before, if it ever ran."""
        before = self._engines.get(name)
        port, control = (before.spec.port, before.port) if before else free_ports(2)
        self._lives += 1
        spec = vllm_server(
            name,
            self._model,
            core,
            self.system.config(name, control),
            port=port,
            max_model_len=MAX_MODEL_LEN,
            arguments=(
                *("--num-gpu-blocks-override", str(BLOCKS)),
                "--no-enable-prefix-caching",
            ),
            environment=self.system.environment(control),
        )
        stack = contextlib.ExitStack()
        child = stack.enter_context(launched(spec, self._logs / f"{self._lives}"))
        self._engines[name] = _Engine(spec, control, child, stack)
        await until_ready(spec, child, None)

    def kill(self, name: str) -> None:
        """``kill -9`` of the engine and all of its processes; waits until they are dead."""
        self.signal(name, signal.SIGKILL)
        self._engines[name].child.process.wait()
        self._engines[name].stack.close()

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to every process of an engine."""
        os.killpg(self._engines[name].child.group, number)

    def alive(self, name: str) -> bool:
        """Whether an engine's processes run."""
        return self._engines[name].child.alive()

    @property
    def place(self) -> Place:
        """Where the prefill engine's control port is."""
        return Place(self._engines["prefill"].port)

    def control_port(self, name: str) -> int:
        """The control or side-channel port that an engine was given."""
        return self._engines[name].port

    # -- requests

    async def ask(
        self,
        name: str,
        prompt: str,
        params: Json | None = None,
        *,
        request: str | None = None,
        tokens: int = 8,
        samples: int = 1,
        bound_s: float = ANSWER_S,
    ) -> tuple[Answer, Json]:
        """One leg at one engine; its answer, and the whole of what it said."""
        body: Json = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0 if samples == 1 else 1,  # greedy sampling takes no more than one
            "top_k": 1,
            "ignore_eos": True,
            "return_token_ids": True,
            "n": samples,
        }
        if params is not None:
            body["kv_transfer_params"] = params
        headers = {} if request is None else {"X-Request-Id": request}
        url = self._engines[name].url + "/v1/completions"
        said: Json = {}
        answer = Answer()
        began = anyio.current_time()
        with anyio.move_on_after(bound_s):
            try:
                response = await self.client.post(url, json=body, headers=headers)
                said = response.json()
                if response.status_code == 200:
                    choices = said["choices"]
                    assert isinstance(choices, list)
                    answer = Answer(tuple(tuple(each["token_ids"]) for each in choices))
                else:
                    answer = Answer(error=f"{response.status_code}: {response.text[:200]}")
            except (httpx.HTTPError, ValueError) as error:
                answer = Answer(error=repr(error)[:200])
        return evolve(answer, after_s=anyio.current_time() - began), said

    async def dispatch(
        self, prompt: str, name: str, *, samples: int = 1, params: Json | None = None
    ) -> Answer:
        """One request of a client, as its router sends it; the decode leg's answer.

        Both legs at once where the system can. A prefill leg that fails does not cancel the decode
        leg, as with the routers there are.
        """
        decode = self.system.decode
        if decode is None:
            _, said = await self.ask(
                "prefill", prompt, self.system.prefill(name), request=name, tokens=1
            )
            found = said.get("kv_transfer_params") or {}
            assert isinstance(found, dict)
            merged = {**found, **(params or {})}
            answer, _ = await self.ask("decode", prompt, merged, request=name, samples=samples)
            return answer
        answers: list[Answer] = []
        async with anyio.create_task_group() as legs:
            legs.start_soon(
                lambda: self.ask(
                    "prefill", prompt, self.system.prefill(name), request=name, tokens=1
                )
            )
            merged = {**decode(name, self.place), **(params or {})}
            answer, _ = await self.ask("decode", prompt, merged, request=name, samples=samples)
            answers.append(answer)
            legs.cancel_scope.cancel()
        return answers[0]

    # -- what is left

    async def used(self, name: str) -> float:
        """The share of an engine's cache in use; 1.0 where it does not even answer.

        The gauge moves with an engine's steps only, so it is made to take one.
        """
        answer, _ = await self.ask(name, "nudge", tokens=1, bound_s=PROBE_S)
        if not answer.tokens:
            return 1.0
        with anyio.move_on_after(PROBE_S):
            try:
                text = (await self.client.get(self._engines[name].url + "/metrics")).text
            except httpx.HTTPError:
                return 1.0
            for line in text.splitlines():
                if line.startswith("vllm:kv_cache_usage_perc"):
                    return float(line.rsplit(" ", 1)[1])
        return 1.0

    async def leaked_blocks(self, within_s: float) -> int:
        """Blocks that do not come back within a time, over the engines that run."""
        deadline = anyio.current_time() + within_s
        while True:
            used = [await self.used(name) for name in self._engines if self.alive(name)]
            leaked = round(sum(used) * BLOCKS)
            if leaked == 0 or anyio.current_time() > deadline:
                return leaked
            await anyio.sleep(1)


@contextlib.asynccontextmanager
async def fleet(system: System, model: Path, logs: Path) -> AsyncIterator[Fleet]:
    """A fleet that leaves no process behind, however it is left."""
    found = Fleet(system, model, logs)
    try:
        await found.__aenter__()
        yield found
    finally:
        await found.__aexit__(None, None, None)
