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

from .causes import logging_config

__all__ = ["PAIR", "SMALL", "SQUARE", "Answer", "Fleet", "Plan", "fleet"]

BLOCKS = 48
"""Of 128 tokens each: three long prompts fill a decode engine."""
MAX_MODEL_LEN = 2_048
PROBE_S = 10.0
START_S = 600.0
"""Within which an engine must answer; four at once take minutes on two cores that others use."""
STOP_S = 60.0
"""Within which an engine must end that was told to."""


@frozen
class Plan:
    """The engines that a fault needs.

    Attributes:
        engines: Their names; those that begin with "prefill" are producers.
        blocks: Of 128 tokens, in the KV cache of each.
        arguments: More of vLLM's options, for all.
    """

    engines: tuple[str, ...] = ("prefill", "decode")
    blocks: int = BLOCKS
    arguments: tuple[str, ...] = ()

    @property
    def ways(self) -> list[tuple[str, str]]:
        """Each prefill engine with each decode engine."""
        prefill = [name for name in self.engines if name.startswith("prefill")]
        decode = [name for name in self.engines if name.startswith("decode")]
        return [(first, second) for first in prefill for second in decode]


PAIR = Plan()
SQUARE = Plan(("prefill", "prefill2", "decode", "decode2"))
SMALL = Plan(
    blocks=24,
    # vLLM admits requests whose first chunks fit beside each other, and preempts the youngest.
    arguments=("--max-num-batched-tokens", "256", "--no-scheduler-reserve-full-isl"),
)
"""Fits no two long prompts, and two middling ones until more is generated for them."""


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
    metrics: int
    child: Launched
    stack: contextlib.ExitStack = field(factory=contextlib.ExitStack)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.spec.port}"


class Fleet:
    """Prefill and decode engines of `system`, and the router between them, which is the test."""

    def __init__(self, system: System, plan: Plan, model: Path, logs: Path) -> None:
        self.system = system
        self.plan = plan
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
        for first in range(0, len(self.plan.engines), 2):
            async with anyio.create_task_group() as tasks:
                for name in self.plan.engines[first : first + 2]:
                    tasks.start_soon(self.start, name)
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

    async def start(self, name: str) -> None:
        """Start an engine, on the ports it had before, if it ever ran."""
        before = self._engines.get(name)
        if before is None:
            port, control, metrics = free_ports(3)
        else:
            port, control, metrics = before.spec.port, before.port, before.metrics
        self._lives += 1
        spec = vllm_server(
            name,
            self._model,
            int(name.startswith("decode")),
            self.system.config(name, control, metrics),
            port=port,
            max_model_len=MAX_MODEL_LEN,
            arguments=(
                *("--num-gpu-blocks-override", str(self.plan.blocks)),
                "--no-enable-prefix-caching",
                # Else vLLM 0.32 kills its EngineCore at once, and who waits is never answered.
                *("--shutdown-timeout", "20"),
                *self.plan.arguments,
            ),
            environment={
                **self.system.environment(control),
                "VLLM_LOGGING_CONFIG_PATH": str(logging_config(self._logs)),
            },
        )
        spec = evolve(spec, start_timeout_s=START_S)
        stack = contextlib.ExitStack()
        child = stack.enter_context(launched(spec, self._logs / f"{self._lives}"))
        self._engines[name] = _Engine(spec, control, metrics, child, stack)
        await until_ready(spec, child, None)

    def kill(self, name: str) -> None:
        """``kill -9`` of the engine and all of its processes; waits until they are dead."""
        self.signal(name, signal.SIGKILL)
        self._engines[name].child.process.wait()
        self._engines[name].stack.close()

    async def stop(self, name: str) -> None:
        """Tell an engine to end, as an operator does, and wait until it has.

        Raises:
            RuntimeError: It does not in time; it is killed then.
        """
        child = self._engines[name].child
        os.kill(child.group, signal.SIGTERM)
        with anyio.move_on_after(STOP_S) as bound:
            await child.end()
        self._engines[name].stack.close()
        if bound.cancelled_caught:
            raise RuntimeError(f"{name} did not end within {STOP_S:g} s of SIGTERM")

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to every process of an engine."""
        os.killpg(self._engines[name].child.group, number)

    def alive(self, name: str) -> bool:
        """Whether an engine's processes run."""
        return self._engines[name].child.alive()

    def place(self, prefill: str = "prefill") -> Place:
        """Where a prefill engine's control port is."""
        return Place(self._engines[prefill].port, prefill)

    def url(self, name: str) -> str:
        """Where an engine's API is."""
        return self._engines[name].url

    def log(self, name: str) -> Path:
        """The log of an engine's present life."""
        return self._engines[name].child.log_path

    async def metrics(self, name: str) -> str:
        """What pushkv's own metrics of an engine say; nothing where it is another's."""
        url = f"http://127.0.0.1:{self._engines[name].metrics}/metrics"
        return (await self.client.get(url)).text if self.system.says_why else ""

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
        bound_s: float | None = None,
        url: str | None = None,
    ) -> tuple[Answer, Json]:
        """One leg at one engine, or at `url`; its answer, and the whole of what it said."""
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
        url = (url or self._engines[name].url) + "/v1/completions"
        said: Json = {}
        answer = Answer()
        began = anyio.current_time()
        with anyio.move_on_after(bound_s or self.system.answer_s):
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
        self,
        prompt: str,
        name: str,
        *,
        samples: int = 1,
        tokens: int = 8,
        prefill: str = "prefill",
        decode: str = "decode",
    ) -> Answer:
        """One request of a client, as its router sends it; the decode leg's answer.

        Both legs at once where the system can. A prefill leg that fails does not cancel the decode
        leg, as with the routers there are.
        """
        params = self.system.decode

        async def prefill_leg() -> Json:
            first = self.system.prefill(name)
            asked = self.ask(prefill, prompt, first, request=name, tokens=1, samples=samples)
            return (await asked)[1]

        async def decode_leg(params: Json) -> Answer:
            asked = self.ask(decode, prompt, params, request=name, tokens=tokens, samples=samples)
            return (await asked)[0]

        if params is None:
            found = (await prefill_leg()).get("kv_transfer_params") or {}
            assert isinstance(found, dict)
            return await decode_leg(found)
        async with anyio.create_task_group() as legs:
            legs.start_soon(prefill_leg)
            answer = await decode_leg(params(name, self.place(prefill)))
            legs.cancel_scope.cancel()
        return answer

    # -- what is left

    async def used(self, name: str) -> float:
        """The share of an engine's cache in use; 1.0 where it does not even answer.

        The gauge moves with an engine's steps only, so it is made to take one.
        """
        answer, _ = await self.ask(name, "nudge", tokens=1, bound_s=PROBE_S)
        if not answer.tokens:
            return 1.0
        return await self.reading(name, "vllm:kv_cache_usage_perc")

    async def reading(self, name: str, metric: str) -> float:
        """What one of vLLM's metrics stands at; 1.0 where the engine does not answer."""
        with anyio.move_on_after(PROBE_S):
            try:
                text = (await self.client.get(self._engines[name].url + "/metrics")).text
            except httpx.HTTPError:
                return 1.0
            for line in text.splitlines():
                if line.startswith(metric):
                    return float(line.rsplit(" ", 1)[1])
        return 1.0

    async def leaked_blocks(self, within_s: float) -> int:
        """Blocks that do not come back within a time, over the engines that run."""
        deadline = anyio.current_time() + within_s
        while True:
            used = [await self.used(name) for name in self._engines if self.alive(name)]
            leaked = round(sum(used) * self.plan.blocks)
            if leaked == 0 or anyio.current_time() > deadline:
                return leaked
            await anyio.sleep(1)


@contextlib.asynccontextmanager
async def fleet(system: System, plan: Plan, model: Path, logs: Path) -> AsyncIterator[Fleet]:
    """A fleet that leaves no process behind, however it is left."""
    found = Fleet(system, plan, model, logs)
    try:
        await found.__aenter__()
        yield found
    finally:
        await found.__aexit__(None, None, None)
