"""Faults of the proxy in front of a pair: a process of its own, killed, stopped and told to end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial

import anyio

from pushkv.demo.supervise import Launched, ServerSpec, free_ports, launched, until_ready
from pushkv.demo.systems import PULL, new_name

from .scene import LONG, SHORT, Fault, Scene

__all__ = ["PROXY_FAULTS"]

ENDS_S = 20.0
"""Within which a proxy must end that was told to, its requests answered."""


@contextlib.asynccontextmanager
async def proxy(scene: Scene) -> AsyncIterator[tuple[Launched, str]]:
    """The demo's proxy in front of the pair, and where it listens."""
    fleet, (port,) = scene.fleet, free_ports(1)
    place = fleet.place()
    command = [
        *(sys.executable, "-m", "pushkv.demo.proxy", "--port", str(port)),
        *("--prefill", f"{fleet.url('prefill')},{place.host},{place.port},{place.engine}"),
        *("--decode", fleet.url("decode")),
        *("--dispatch", "sequential" if fleet.system is PULL else "concurrent"),
    ]
    spec = ServerSpec("proxy", command, port)
    with launched(spec, fleet.log("decode").parent / f"proxy-{port}") as child:
        await until_ready(spec, child, None)
        yield child, f"http://127.0.0.1:{port}"


async def through(scene: Scene, url: str, prompt: str) -> None:
    """A client of the proxy."""
    log, name = scene.fleet.log("decode"), new_name()
    answer, _ = await scene.fleet.ask("decode", prompt, request=name, url=url)
    scene.answered(prompt, name, answer, log)


async def afterwards(scene: Scene) -> None:
    """A proxy that is started again serves the same engines; its client must be right."""
    async with proxy(scene) as (_, url):
        await through(scene, url, await scene.prompt(SHORT))


async def kill(child: Launched) -> None:
    """``kill -9``."""
    os.killpg(child.group, signal.SIGKILL)
    await child.end()


async def stop(child: Launched) -> None:
    """SIGSTOP, and SIGCONT after five seconds."""
    os.killpg(child.group, signal.SIGSTOP)
    await anyio.sleep(5)
    os.killpg(child.group, signal.SIGCONT)


async def end(child: Launched) -> None:
    """SIGTERM; a proxy answers what it was asked before."""
    os.killpg(child.group, signal.SIGTERM)
    with anyio.fail_after(ENDS_S):
        await child.end()


Fate = Callable[[Launched], Coroutine[None, None, None]]


async def while_waiting(fate: Fate, scene: Scene, *, is_lost: bool) -> None:
    """It strikes while the decode leg waits for a prefill engine that is stopped meanwhile."""
    prompt = await scene.prompt(SHORT)
    async with proxy(scene) as (child, url), anyio.create_task_group() as tasks:
        scene.fleet.signal("prefill", signal.SIGSTOP)
        tasks.start_soon(through, scene, url, prompt)
        await anyio.sleep(1)
        tasks.start_soon(fate, child)
        await anyio.sleep(1)
        scene.fleet.signal("prefill", signal.SIGCONT)
    await judge(scene, is_lost=is_lost)


async def during_prefill(fate: Fate, scene: Scene, *, is_lost: bool) -> None:
    """It strikes while the prefill engine is busy."""
    prompt = await scene.prompt(LONG)
    async with proxy(scene) as (child, url), anyio.create_task_group() as tasks:
        tasks.start_soon(scene.crowd)
        tasks.start_soon(through, scene, url, prompt)
        await scene.until_busy()
        await fate(child)
    await judge(scene, is_lost=is_lost)


async def judge(scene: Scene, *, is_lost: bool) -> None:
    """A killed proxy's client sees its connection break, which is all the answer it can get."""
    prompt, answer = scene.asked[-1]
    if is_lost and answer.error:
        # Right for what it is; whoever comes next must be served.
        scene.broken.append(prompt)
    await afterwards(scene)


PROXY_FAULTS: dict[str, Fault] = {
    f"proxy {what} {when}": Fault(partial(happens, fate, is_lost=fate is kill))
    for what, fate in (("killed", kill), ("stopped for 5 s", stop), ("told to end", end))
    for when, happens in (
        ("while a request waits", while_waiting),
        ("during prefill", during_prefill),
    )
}
