"""Faults of single legs: given up at each phase, preempted, and engines told to end or stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine
from functools import partial

import anyio

from pushkv.demo.systems import new_name
from pushkv.demo.tiny_model import make_prompt

from .fleet import SMALL
from .scene import LONG, SHORT, Fault, Scene

__all__ = ["LEG_FAULTS"]

RUNNING = "vllm:num_requests_running"
GENERATED = "vllm:generation_tokens_total"
PREEMPTED = "vllm:num_preemptions_total"
MIDDLE = 1_340
"""A prompt of 11 blocks; two fill a small cache until both need their twelfth."""
MANY = 300
"""Tokens to generate where something shall happen meanwhile: the twelfth, while the other request,
whose prompt is computed after the first one's, still comes in time for it."""


async def given_up(
    scene: Scene, leg: Callable[[str, str], Coroutine[None, None, object]], prompt: str, name: str
) -> None:
    """A leg whose client leaves while prefill is busy with the crowd."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leg, prompt, name)
        await scene.until_busy()
        tasks.cancel_scope.cancel()


async def decode_gone_before_prefill(scene: Scene) -> None:
    """The client leaves while decode waits; then the prefill leg comes all the same."""
    prompt, name = await scene.prompt(LONG), new_name()
    with anyio.move_on_after(1):
        await scene.decode_only(prompt, name)
    await scene.prefill_only(prompt, name)
    await scene.client(await scene.prompt(SHORT), new_name())


async def decode_gone_during_prefill(scene: Scene) -> None:
    """The decode leg is given up while prefill is busy; the prefill leg goes on."""
    prompt, name = await scene.prompt(LONG), new_name()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.crowd)
        tasks.start_soon(scene.prefill_only, prompt, name)
        await given_up(scene, scene.decode_only, prompt, name)
    await scene.client(await scene.prompt(SHORT), new_name())


async def decode_gone_after_delivery(scene: Scene) -> None:
    """The client leaves while its answer is being generated."""
    prompt, name, fleet = await scene.prompt(SHORT), new_name(), scene.fleet
    before = await fleet.reading("decode", GENERATED)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: fleet.dispatch(prompt, name, tokens=1_500))
        await scene.rises("decode", GENERATED, before + 3)
        tasks.cancel_scope.cancel()
    await scene.client(await scene.prompt(SHORT), new_name())


async def prefill_gone_before_decode(scene: Scene) -> None:
    """The prefill leg is given up before the decode leg comes, which then waits for nothing."""
    prompt, name = await scene.prompt(LONG), new_name()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.crowd)
        await given_up(scene, scene.prefill_only, prompt, name)
        await scene.decode_only(prompt, name)


async def prefill_gone_while_queued(scene: Scene) -> None:
    """The prefill leg is given up behind other prompts; decode has registered and waits."""
    prompt, name = await scene.prompt(LONG), new_name()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.crowd)
        tasks.start_soon(scene.decode_only, prompt, name)
        await given_up(scene, scene.prefill_only, prompt, name)


async def both_gone(scene: Scene) -> None:
    """The client leaves while prefill is busy, and its router gives both legs up."""
    prompt = await scene.prompt(LONG)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.crowd)
        await given_up(scene, scene.fleet.dispatch, prompt, new_name())
    await scene.client(await scene.prompt(SHORT), new_name())


async def one_of_two_samplers_gone(scene: Scene) -> None:
    """Two clients ask for three samples each; one of them leaves."""
    leaving, staying = await scene.prompt(LONG), await scene.prompt(SHORT)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.crowd)
        tasks.start_soon(lambda: scene.client(staying, new_name(), samples=3))
        await given_up(scene, partial(scene.fleet.dispatch, samples=3), leaving, new_name())


async def preempted_prefill(scene: Scene) -> None:
    """The prefill engine, which generates for others, preempts a prompt half computed."""
    prompt, fleet = await scene.prompt(MIDDLE), scene.fleet
    before = await fleet.reading("prefill", PREEMPTED)
    others = [make_prompt(SHORT, seed=scene.seed + 50_000 + index) for index in range(5)]
    async with anyio.create_task_group() as tasks:
        for each in others:  # of three blocks and more, which leaves too few of 23
            tasks.start_soon(lambda text: fleet.ask("prefill", text, tokens=100), each)
        await scene.rises("prefill", RUNNING, len(others) - 1)
        tasks.start_soon(scene.client, prompt, new_name())
    # vLLM counts it with the request's next output: once the prompt, begun anew, is computed.
    await scene.rises("prefill", PREEMPTED, before)


async def preempted_decode(scene: Scene) -> None:
    """The decode engine preempts what was delivered to it: what is generated does not fit."""
    prompts = [await scene.prompt(MIDDLE, tokens=MANY) for _ in range(2)]
    before = await scene.fleet.reading("decode", PREEMPTED)
    async with anyio.create_task_group() as tasks:
        for each in prompts:
            tasks.start_soon(lambda text: scene.client(text, new_name(), tokens=MANY), each)
        await scene.rises("decode", PREEMPTED, before)


async def ended_prefill(scene: Scene) -> None:
    """The prefill engine is told to end while it is busy; decode has registered."""
    async with scene.busy():
        await scene.stop("prefill")


async def ended_decode(scene: Scene) -> None:
    """The decode engine is told to end while a request waits; its client can get an error."""
    scene.may_fail = True
    async with scene.busy():
        await scene.stop("decode")


async def stopped_decode(scene: Scene) -> None:
    """The decode engine is stopped for eight seconds while it waits."""
    async with scene.busy():
        scene.fleet.signal("decode", signal.SIGSTOP)
        await anyio.sleep(8)
        scene.fleet.signal("decode", signal.SIGCONT)


LEG_FAULTS: dict[str, Fault] = {
    "decode leg given up, then prefill comes": Fault(decode_gone_before_prefill),
    "decode leg given up during prefill": Fault(decode_gone_during_prefill),
    "decode leg given up while it generates": Fault(decode_gone_after_delivery),
    "prefill leg given up, then decode comes": Fault(prefill_gone_before_decode),
    "prefill leg given up while queued": Fault(prefill_gone_while_queued),
    "both legs given up during prefill": Fault(both_gone),
    "one of two clients with 3 samples leaves": Fault(one_of_two_samplers_gone),
    "decode stopped for 8 s": Fault(stopped_decode),
    "prefill told to end": Fault(ended_prefill),
    "decode told to end": Fault(ended_decode),
    "prompt preempted at prefill": Fault(preempted_prefill, SMALL),
    "request preempted at decode": Fault(preempted_decode, SMALL),
}
