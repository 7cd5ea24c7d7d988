"""The faults: each does its worst to a fleet and says which answers were due."""

from __future__ import annotations

import signal
import socket

import anyio

from pushkv.demo.systems import HOLD_S, new_name
from pushkv.demo.tiny_model import make_prompt

from .scene import LONG, SHORT, Fault, Scene
from .vllm_legs import LEG_FAULTS
from .vllm_proxy import PROXY_FAULTS
from .vllm_square import SQUARE_FAULTS

__all__ = ["FAULTS"]


async def killed_prefill_before(scene: Scene) -> None:
    """The prefill engine is dead when the request comes."""
    prompt = await scene.prompt(SHORT)
    scene.kill("prefill")
    await scene.client(prompt, new_name())


async def killed_prefill_during(scene: Scene) -> None:
    """The prefill engine is killed while it computes; decode has registered."""
    async with scene.busy():
        scene.kill("prefill")


async def killed_prefill_registered(scene: Scene) -> None:
    """Decode has registered, or knows where to pull from, and waits; then prefill is killed."""
    prompt, name, fleet = await scene.prompt(LONG), new_name(), scene.fleet
    async with anyio.create_task_group() as tasks:
        if fleet.system.decode is not None:
            tasks.start_soon(scene.decode_only, prompt, name)
            await anyio.sleep(2)
        tasks.start_soon(scene.crowd)
        if fleet.system.decode is None:
            tasks.start_soon(scene.client, prompt, name)
        else:
            tasks.start_soon(scene.prefill_only, prompt, name)
        await scene.until_busy()
        scene.kill("prefill")


async def killed_prefill_after(scene: Scene) -> None:
    """The prefill engine is killed once it has answered, before decode is dispatched."""
    prompt, name = await scene.prompt(SHORT), new_name()
    params = await scene.prefill_only(prompt, name)
    scene.kill("prefill")
    await scene.decode_only(prompt, name, params=params)


async def stopped_prefill(scene: Scene) -> None:
    """The prefill engine is stopped for eight seconds while it computes."""
    async with scene.busy():
        scene.fleet.signal("prefill", signal.SIGSTOP)
        await anyio.sleep(8)
        scene.fleet.signal("prefill", signal.SIGCONT)


async def killed_decode_during(scene: Scene) -> None:
    """The decode engine is killed while it waits; its client can only get an error."""
    scene.may_fail = True
    async with scene.busy():
        scene.kill("decode")


async def restarted_decode(scene: Scene) -> None:
    """The decode engine, which prefill knows, is killed and started again."""
    for _ in range(2):
        await scene.client(await scene.prompt(SHORT), new_name())
        if not scene.down:
            scene.kill("decode")
            await scene.revive()
    await scene.client(await scene.prompt(SHORT), new_name())


async def restarted_prefill(scene: Scene) -> None:
    """The prefill engine, which decode knows, is killed and started again."""
    await scene.client(await scene.prompt(SHORT), new_name())
    scene.kill("prefill")
    await scene.revive()
    for _ in range(2):
        await scene.client(await scene.prompt(SHORT), new_name())


async def aborted_undispatched(scene: Scene) -> None:
    """The prefill leg never goes out, and the client leaves after a second."""
    prompt = await scene.prompt(LONG)
    with anyio.move_on_after(1):
        await scene.decode_only(prompt, new_name())


async def abort_storm(scene: Scene) -> None:
    """Twelve clients leave within two seconds, in a cache that holds three of them."""
    prompts = [await scene.prompt(LONG if index % 2 else SHORT) for index in range(4)]

    async def leave(index: int) -> None:
        with anyio.move_on_after(0.15 * (index + 1)):
            await scene.fleet.dispatch(prompts[index % 4], new_name())

    async with anyio.create_task_group() as tasks:
        for index in range(12):
            tasks.start_soon(leave, index)
    await scene.client(prompts[0], new_name())


async def duplicate_request(scene: Scene) -> None:
    """The same request comes twice at once under one name."""
    prompt, name = await scene.prompt(SHORT), new_name()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.client, prompt, name)
        tasks.start_soon(scene.client, prompt, name)


async def colliding_names(scene: Scene) -> None:
    """Two prompts come at once under one name, which clients may choose."""
    first, second, name = await scene.prompt(SHORT), await scene.prompt(SHORT), new_name()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.client, first, name)
        tasks.start_soon(scene.client, second, name)


async def missing_key(scene: Scene) -> None:
    """A client leaves a key of `kv_transfer_params` out."""
    prompt, name = await scene.prompt(SHORT), new_name()
    params = await scene.prefill_only(prompt, name)
    for key in ("remote_engine_id", "remote_host", "remote_request_id", "transfer_id"):
        if key in params:
            left = {each: value for each, value in params.items() if each != key}
            await scene.decode_only(prompt, new_name(), params=left)


async def late_decode(scene: Scene) -> None:
    """Decode is dispatched when the hold time of the finished prefill is over."""
    prompt, fleet, name = await scene.prompt(SHORT), scene.fleet, new_name()
    params = await scene.prefill_only(prompt, name)
    await anyio.sleep(HOLD_S + 2)
    # Whoever comes next gets the blocks that were given up.
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(fleet.ask, "prefill", make_prompt(LONG, seed=scene.seed + 7))
    await scene.decode_only(prompt, name, params=params)


async def malformed_frame(scene: Scene) -> None:
    """A stranger sends nonsense to the prefill engine; then a new decode engine comes."""
    port = scene.fleet.place().port
    if scene.fleet.system.is_zeromq:
        await anyio.to_thread.run_sync(_send_over_zeromq, port)
    else:
        for nonsense in (b"nonsense", b"\x00\x00\x00\x08\x01\x0dnonsens", b"\xff" * 64):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(nonsense)
    await anyio.sleep(0.5)
    scene.kill("decode")
    await scene.revive()
    await scene.client(await scene.prompt(SHORT), new_name())


def _send_over_zeromq(port: int) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 500
        stranger.connect(f"tcp://127.0.0.1:{port}")
        stranger.send_multipart([b"", b"nonsense"])


async def parallel_samples(scene: Scene) -> None:
    """Three samples of one prompt share their parameters."""
    await scene.client(await scene.prompt(SHORT), new_name(), samples=3)


async def aborted_prefill(scene: Scene) -> None:
    """The prefill leg is given up right after it was sent; decode waits for it."""
    prompt, name, fleet = await scene.prompt(LONG), new_name(), scene.fleet
    async with anyio.create_task_group() as tasks:
        if fleet.system.decode is not None:
            tasks.start_soon(scene.decode_only, prompt, name)
        with anyio.move_on_after(0.05):
            await fleet.ask("prefill", prompt, fleet.system.prefill(name), request=name, tokens=1)


FAULTS: dict[str, Fault] = {
    "prefill killed before": Fault(killed_prefill_before),
    "prefill killed while it computes": Fault(killed_prefill_during),
    "prefill killed, decode registered": Fault(killed_prefill_registered),
    "prefill killed once finished": Fault(killed_prefill_after),
    "prefill stopped for 8 s": Fault(stopped_prefill),
    "prefill leg given up": Fault(aborted_prefill),
    "prefill restarted": Fault(restarted_prefill),
    "decode killed while it waits": Fault(killed_decode_during),
    "decode restarted": Fault(restarted_decode),
    "decode leg alone, given up": Fault(aborted_undispatched),
    "abort storm, small cache": Fault(abort_storm),
    "duplicate request": Fault(duplicate_request),
    "colliding names": Fault(colliding_names),
    "key missing in parameters": Fault(missing_key),
    "decode after the hold time": Fault(late_decode),
    "malformed frame, then a new peer": Fault(malformed_frame),
    "three samples of one prompt": Fault(parallel_samples),
    **LEG_FAULTS,
    **PROXY_FAULTS,
    **SQUARE_FAULTS,
}
"""Rows on one pair first: a fleet of engines stays warm while rows need the same."""
