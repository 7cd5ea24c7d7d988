"""Faults of two prefill and two decode engines: requests sent again elsewhere, rolling restarts."""

from __future__ import annotations

from itertools import cycle

import anyio
from attrs import Factory, define

from pushkv.demo.systems import new_name

from .fleet import SQUARE, Answer
from .scene import LONG, SHORT, Fault, Scene
from .vllm_legs import given_up

__all__ = ["SQUARE_FAULTS"]

TRIES = 4
CLIENTS = 3
PROMPTS = 6
THINKING_S = 0.3


async def sent_again_whole(scene: Scene) -> None:
    """Decode is killed while it waits; the router sends both legs again, under a new name."""
    prompt = await scene.prompt(LONG)
    first: list[Answer] = []

    async def client() -> None:
        answer = await scene.fleet.dispatch(prompt, new_name())
        first.append(answer)
        if answer.error:
            await scene.client(prompt, new_name(), decode="decode2")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.crowd)
        tasks.start_soon(client)
        await scene.until_busy()
        scene.kill("decode")
    if not first[0].error:
        raise RuntimeError("the request was answered before decode died: nothing was tried")


async def decode_leg_sent_again(scene: Scene) -> None:
    """Decode is killed while it waits; the router sends the decode leg alone to another one.

    The prefill leg of the same name goes on. Routers should not do that, and may all the same.
    """
    prompt, name = await scene.prompt(LONG), new_name()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.crowd)
        tasks.start_soon(scene.prefill_only, prompt, name)
        params = scene.fleet.system.decode
        if params is not None:
            leg = params(name, scene.fleet.place())
            tasks.start_soon(lambda: scene.fleet.ask("decode", prompt, leg, request=name))
        await scene.until_busy()
        scene.kill("decode")
        await scene.decode_only(prompt, name, decode="decode2")


async def prefill_sent_again(scene: Scene) -> None:
    """Prefill is killed before it is done; the router gives both legs up and sends them again."""
    prompt = await scene.prompt(LONG)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.crowd)
        await given_up(scene, scene.fleet.dispatch, prompt, new_name())
        scene.kill("prefill")
    await scene.client(prompt, new_name(), prefill="prefill2")


async def prefill_leg_sent_again(scene: Scene) -> None:
    """Prefill is killed before it is done; the router sends the prefill leg alone to another one.

    Decode knows nothing of that engine, so it computes the prompt itself.
    """
    prompt, name = await scene.prompt(LONG), new_name()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.crowd)
        tasks.start_soon(scene.client, prompt, name)
        await scene.until_busy()
        scene.kill("prefill")
        await scene.prefill_only(prompt, name, prefill="prefill2")


@define
class Router:
    """Sends requests to engines that are up, in turn, and again where one ends meanwhile.

    Attributes:
        down: Engines that get nothing new.
    """

    scene: Scene
    down: set[str] = Factory(set)
    _ways: cycle[tuple[str, str]] = Factory(lambda: cycle(SQUARE.ways))

    def _next(self) -> tuple[str, str]:
        return next(way for way in self._ways if not self.down.intersection(way))

    async def request(self, prompt: str) -> None:
        """One request of a client, until it has tokens; an error counts if it is the last."""
        fleet = self.scene.fleet
        for left in reversed(range(TRIES)):
            name, (prefill, decode) = new_name(), self._next()
            log = fleet.log(decode)
            answer = await fleet.dispatch(prompt, name, prefill=prefill, decode=decode)
            has_ended = decode in self.down or log != fleet.log(decode)
            # Only the end of its own decode engine excuses an error.
            if not (left and answer.error and has_ended):
                self.scene.answered(prompt, name, answer, log)
                return


async def rolling_restart(scene: Scene) -> None:
    """Each engine is told to end and started again, in turn, while clients ask and ask."""
    prompts = [await scene.prompt(LONG if index % 3 else SHORT) for index in range(PROMPTS)]
    router, is_over = Router(scene), False

    async def client(first: int) -> None:
        for index in cycle(range(PROMPTS)):
            if is_over:
                return
            await router.request(prompts[(first + index) % PROMPTS])
            await anyio.sleep(THINKING_S)

    async with anyio.create_task_group() as tasks:
        for number in range(CLIENTS):
            tasks.start_soon(client, number)
        for name in SQUARE.engines:
            await anyio.sleep(2)
            router.down.add(name)
            await scene.stop(name)
            await scene.revive()
            router.down.remove(name)
        await anyio.sleep(2)
        is_over = True


SQUARE_FAULTS: dict[str, Fault] = {
    "decode killed, both legs sent again": Fault(sent_again_whole, SQUARE),
    "decode killed, its leg alone sent again": Fault(decode_leg_sent_again, SQUARE),
    "prefill killed, both legs sent again": Fault(prefill_sent_again, SQUARE),
    "prefill killed, its leg alone sent again": Fault(prefill_leg_sent_again, SQUARE),
    "rolling restart under load": Fault(rolling_restart, SQUARE),
}
