"""One run of one fault on a fleet of vLLM engines."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
from attrs import define, field, frozen

from pushkv.demo.systems import Json, new_name
from pushkv.demo.tiny_model import make_prompt

from .causes import Telling
from .fleet import PAIR, Answer, Fleet, Plan

__all__ = ["LONG", "SHORT", "Fault", "Scene"]

LONG = 1_900
SHORT = 300
POLL_S = 0.02
HAPPENS_S = 30.0


@define
class Scene:
    """One run of one fault.

    Attributes:
        seed: Prompts differ from run to run.
        expected: By prompt, what a single engine generates.
        asked: Each client's prompt and answer.
        may_fail: No healthy path exists, so that an honest error is right.
        broken: Prompts whose client's connection ends at what the fault killed.
        down: Engines that the fault itself has ended.
    """

    fleet: Fleet
    telling: Telling
    seed: int
    expected: dict[str, tuple[int, ...]] = field(factory=dict)
    asked: list[tuple[str, Answer]] = field(factory=list)
    may_fail: bool = False
    broken: list[str] = field(factory=list)
    down: list[str] = field(factory=list)

    async def prompt(self, length: int, *, tokens: int = 8) -> str:
        """A new prompt of so many tokens, and what is to be generated for it."""
        self.seed += 1
        text = make_prompt(length, seed=self.seed)
        healthy = next(name for name in self.fleet.plan.engines if self.fleet.alive(name))
        answer, _ = await self.fleet.ask(healthy, text, tokens=tokens)
        if not answer.tokens:
            raise RuntimeError(f"the reference answer did not come: {answer.error}")
        self.expected[text] = answer.tokens[0]
        return text

    async def client(
        self,
        prompt: str,
        name: str,
        *,
        samples: int = 1,
        tokens: int = 8,
        prefill: str = "prefill",
        decode: str = "decode",
    ) -> Answer:
        """A client whose request takes both legs."""
        log = self.fleet.log(decode)
        answer = await self.fleet.dispatch(
            prompt, name, samples=samples, tokens=tokens, prefill=prefill, decode=decode
        )
        self.answered(prompt, name, answer, log)
        return answer

    def answered(self, prompt: str, name: str, answer: Answer, log: Path) -> None:
        """A client's answer, which came from the life of a decode engine that has that log."""
        self.asked.append((prompt, answer))
        if answer.tokens:
            self.telling.legs.append((log, name, len(answer.tokens)))

    async def decode_only(
        self, prompt: str, name: str, *, decode: str = "decode", params: Json | None = None
    ) -> None:
        """A client whose decode leg goes out alone; for pull, towards what is not there."""
        system, place = self.fleet.system, self.fleet.place()
        if params is None and system.decode is not None:
            params = system.decode(name, place)
        elif params is None:
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": place.engine,
                "remote_host": place.host,
                "remote_port": place.port,
                "remote_request_id": f"cmpl-{name}-0",
                "remote_block_ids": [[1, 2, 3]],
                "tp_size": 1,
            }
        answer, _ = await self.fleet.ask(decode, prompt, params, request=name)
        self.answered(prompt, name, answer, self.fleet.log(decode))

    async def prefill_only(self, prompt: str, name: str, *, prefill: str = "prefill") -> Json:
        """The prefill leg alone; what its answer tells the decode leg."""
        params = self.fleet.system.prefill(name)
        _, said = await self.fleet.ask(prefill, prompt, params, request=name, tokens=1)
        found = said.get("kv_transfer_params")
        return found if isinstance(found, dict) else {}

    async def crowd(self, count: int = 10) -> None:
        """Keep the prefill engine busy with others' prompts; they are not clients of the fault."""
        prompts = [make_prompt(LONG, seed=self.seed + 50_000 + index) for index in range(count)]
        async with anyio.create_task_group() as tasks:
            for each in prompts:
                tasks.start_soon(self.fleet.ask, "prefill", each)

    async def rises(self, engine: str, metric: str, above: float) -> None:
        """Wait until one of vLLM's metrics exceeds a value.

        Raises:
            RuntimeError: It does not: what the fault is about did not happen.
        """
        with anyio.move_on_after(HAPPENS_S):
            while await self.fleet.reading(engine, metric) <= above:
                await anyio.sleep(POLL_S)
            return
        raise RuntimeError(f"{metric} of {engine} stays at {above:g}: nothing was tried")

    @contextlib.asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """Prefill computes others' prompts, and a client waits; leaves when all are answered."""
        prompt = await self.prompt(LONG)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.crowd)
            tasks.start_soon(self.client, prompt, new_name())
            await self.until_busy()
            yield

    async def until_busy(self) -> None:
        """Wait until prefill computes the crowd's prompts, the fault's own behind them."""
        await self.rises("prefill", "vllm:num_requests_running", 0)
        await anyio.sleep(0.1)

    def kill(self, name: str) -> None:
        """``kill -9``."""
        self.fleet.kill(name)
        self.down.append(name)

    async def stop(self, name: str) -> None:
        """SIGTERM, and wait until the engine has ended."""
        self.down.append(name)
        await self.fleet.stop(name)

    async def revive(self) -> None:
        """Start again what the fault has ended."""
        while self.down:
            await self.fleet.start(self.down.pop())


@frozen
class Fault:
    """What is done, and the fleet it is done to."""

    happens: Callable[[Scene], Awaitable[object]]
    plan: Plan = PAIR
