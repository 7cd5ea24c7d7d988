"""What proves that a producer is dead, and what does not."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator

import anyio
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.descriptors import few_descriptors

from pushkv.core.effects import PeerJoined, WriterJoined
from pushkv.core.events import WriterGone
from pushkv.core.ids import Duration, EngineId, Incarnation, Worker, seconds
from pushkv.core.messages import Hello, RankAddress
from pushkv.runtime.deaths import Deaths
from pushkv.runtime.processes import ProcessEndedError, open_process, this_process

NAME = "from pushkv.runtime.processes import this_process; print(this_process(), flush=True)"
P = Worker(EngineId("p"), Incarnation(1), 0)
HELLO = Hello(
    protocol=1,
    nonce=0,
    engine=P.engine,
    incarnation=P.incarnation,
    rank=0,
    model=(),
    layout=(),
    transport="t",
    transport_version="1",
    lease=seconds(1),
    directory=(RankAddress(0, "host-of-p", 1),),
    memory=b"",
)


class Child:
    """A process that says its name and waits."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NAME + "; input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.name = self._process.stdout.readline().strip()

    def kill(self, *, reap: bool = True) -> None:
        self._process.kill()
        if reap:
            self._process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.kill()


def test_a_process_that_lives_is_watched_until_it_has_ended(child: Child) -> None:
    opened = open_process(child.name)
    assert opened is not None
    try:
        assert select.select([opened], [], [], 0)[0] == []
        child.kill(reap=False)
        assert select.select([opened], [], [], 10)[0] == [opened]
    finally:
        os.close(opened)


def test_one_that_has_ended_is_known_to_have(child: Child) -> None:
    child.kill()
    with pytest.raises(ProcessEndedError):
        open_process(child.name)


def test_whoever_has_the_number_now_is_somebody_else() -> None:
    *host, number, began = this_process().split(" ")
    with pytest.raises(ProcessEndedError):
        open_process(" ".join((*host, number, str(int(began) - 1))))


@pytest.mark.parametrize("place", [0, 1])
def test_of_another_host_or_namespace_nothing_is_known(place: int) -> None:
    words = this_process().split(" ")
    words[place] = "another"
    words[2] = str(2**22 + 1)  # no such number here, which says nothing about there
    assert open_process(" ".join(words)) is None


@pytest.mark.parametrize("least", [0, 2_000])
def test_a_process_hidden_from_us_is_not_taken_for_dead(
    child: Child, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    def hidden(pid: int) -> str:
        raise FileNotFoundError(pid)

    def many_open(pid: int, opens: Callable[[int], int] = os.pidfd_open) -> int:
        """As in an engine with many descriptors: select(2) knows none above 1023."""
        low = opens(pid)
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, least)
        os.close(low)
        return high

    monkeypatch.setattr("pushkv.runtime.processes._began", hidden)
    monkeypatch.setattr("os.pidfd_open", many_open)
    opened = open_process(child.name)
    assert opened is not None
    os.close(opened)


@given(st.text(max_size=60) | st.lists(st.text("0123456789 -:[]abc", max_size=9)).map(" ".join))
def test_a_peer_may_say_anything(name: str) -> None:
    assert open_process(name) is None


class Watch:
    """A `Deaths` in its task group, and what it reports."""

    def __init__(
        self, ask: Callable[[Worker, str], bool] | None = None, bound_s: float = 0.05
    ) -> None:
        self.gone: list[Worker] = []
        self.quarantined = frozenset([P])
        self.is_written_to = False
        self.deaths = Deaths(
            Duration(int(bound_s * 1e9)),
            ask,
            lambda: self.quarantined,
            lambda worker: self.is_written_to,
            self._add,
        )

    def _add(self, event: WriterGone) -> None:
        self.gone.append(event.worker)

    async def until_gone(self) -> None:
        with anyio.fail_after(10):
            while not self.gone:
                await anyio.sleep(0.01)


@pytest.mark.asyncio
async def test_a_death_is_told_once_after_the_bound(child: Child) -> None:
    watch = Watch(bound_s=0.3)
    async with anyio.create_task_group() as tasks:
        watch.deaths.serve(tasks)
        joined = WriterJoined(P, evolve(HELLO, process=child.name))
        watch.deaths.joined(joined)
        watch.deaths.joined(joined)
        await anyio.sleep(0.05)
        child.kill()
        began = anyio.current_time()
        await watch.until_gone()
        assert anyio.current_time() - began >= 0.3
        assert watch.gone == [P]
        tasks.cancel_scope.cancel()


@pytest.mark.asyncio
async def test_a_consumer_is_watched_too(child: Child) -> None:
    watch = Watch()
    async with anyio.create_task_group() as tasks:
        watch.deaths.serve(tasks)
        watch.deaths.joined(PeerJoined(P, evolve(HELLO, process=child.name)))
        child.kill()
        await watch.until_gone()
        assert watch.gone == [P]
        tasks.cancel_scope.cancel()


@pytest.mark.asyncio
async def test_the_proof_is_repeated_until_no_write_to_the_dead_is_open(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that hangs is given up seconds after the death of who it was made for."""
    monkeypatch.setattr("pushkv.runtime.deaths.ASK_EVERY_S", 0.01)
    watch = Watch()
    watch.is_written_to = True
    async with anyio.create_task_group() as tasks:
        watch.deaths.serve(tasks)
        watch.deaths.joined(PeerJoined(P, evolve(HELLO, process=child.name)))
        child.kill()
        with anyio.fail_after(10):
            while len(watch.gone) < 3:
                await anyio.sleep(0.01)
        watch.is_written_to = False
        await anyio.sleep(0.05)
        told = len(watch.gone)
        await anyio.sleep(0.05)
        assert len(watch.gone) == told
        tasks.cancel_scope.cancel()


@pytest.mark.asyncio
async def test_a_process_is_watched_as_soon_as_there_is_a_descriptor(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pushkv.runtime.deaths.ASK_EVERY_S", 0.01)
    watch = Watch()
    async with anyio.create_task_group() as tasks:
        watch.deaths.serve(tasks)
        with few_descriptors(0):
            with pytest.raises(OSError, match="Too many open files"):
                open_process(child.name)
            watch.deaths.joined(WriterJoined(P, evolve(HELLO, process=child.name)))
            await anyio.sleep(0.05)
        child.kill()
        await watch.until_gone()
        assert watch.gone == [P]
        tasks.cancel_scope.cancel()


@pytest.mark.asyncio
async def test_one_that_died_before_it_was_looked_at_is_gone(child: Child) -> None:
    child.kill()
    watch = Watch()
    async with anyio.create_task_group() as tasks:
        watch.deaths.serve(tasks)
        watch.deaths.joined(WriterJoined(P, evolve(HELLO, process=child.name)))
        await watch.until_gone()
        tasks.cancel_scope.cancel()


@pytest.mark.asyncio
async def test_an_orchestrator_is_asked_until_it_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pushkv.runtime.deaths.ASK_EVERY_S", 0.01)
    asked: list[tuple[Worker, str]] = []

    def ask(worker: Worker, host: str) -> bool:
        asked.append((worker, host))
        if len(asked) == 1:
            raise OSError("the orchestrator is away")
        return len(asked) == 3

    watch = Watch(ask)
    async with anyio.create_task_group() as tasks:
        watch.deaths.serve(tasks)
        watch.deaths.joined(WriterJoined(P, HELLO))
        await watch.until_gone()
        assert asked == [(P, "host-of-p")] * 3
        watch.quarantined = frozenset()
        await anyio.sleep(0.05)
        assert len(asked) == 3
        tasks.cancel_scope.cancel()
