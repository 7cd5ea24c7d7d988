"""The bell: no ring is lost, and one that rings without a pause starves nobody."""

from __future__ import annotations

import threading
import time

import anyio
import pytest

from pushkv.runtime.wakeup import Wakeup

pytestmark = pytest.mark.asyncio

RINGS = 3_000


async def test_no_ring_is_lost_under_racing_threads() -> None:
    bell = Wakeup()
    said = [0, 0]

    def ring(thread: int) -> None:
        for count in range(1, RINGS + 1):
            said[thread] = count
            bell.set()
            if count % 100 == 0:
                time.sleep(0.0005)  # let the listener go to sleep

    threads = [threading.Thread(target=ring, args=(each,)) for each in range(2)]
    for thread in threads:
        thread.start()
    with anyio.fail_after(10):  # a lost ring means waiting for ever
        while True:
            bell.clear()
            if said == [RINGS, RINGS]:
                break
            await bell.wait()
    for thread in threads:
        thread.join()
    bell.close()


async def test_a_ring_between_clear_and_wait_is_heard() -> None:
    bell = Wakeup()
    bell.clear()
    bell.set()
    with anyio.fail_after(5):
        await bell.wait()
    bell.clear()
    with anyio.move_on_after(0.02) as scope:
        await bell.wait()
    assert scope.cancelled_caught, "cleared means silent"
    bell.close()


async def test_a_bell_that_rings_without_pause_lets_other_tasks_run() -> None:
    bell = Wakeup()
    ran = 0

    async def other() -> None:
        nonlocal ran
        while True:
            ran += 1
            await anyio.sleep(0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        for _ in range(50):
            bell.clear()
            bell.set()
            await bell.wait()
        tasks.cancel_scope.cancel()
    assert ran >= 50
    bell.close()


async def test_ringing_a_closed_bell_harms_nobody() -> None:
    bell = Wakeup()
    bell.close()
    bell.set()
