"""Goodput under faults: the same traffic while engines die and come back, system after system.

A schedule is a list of ``SECONDS:ACTION:ENGINE`` with engines ``prefill`` and ``decode``. *kill*
ends an engine with SIGKILL and *start* starts it again on its old ports; *freeze* and *thaw* stop
it and let it go on. Arrivals never pause: what comes meanwhile counts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

import anyio
import httpx
from attrs import field, frozen

from pushkv.core.errors import ConfigurationError
from pushkv.demo.supervise import Launched, ServerError, ServerSpec, launched, until_ready
from pushkv.demo.tiny_model import write_tiny_model

from .client import Answer, Router
from .fleet import ENGINE_MODEL, Fleet, describe_fleet
from .replay import CONCURRENT, HIGHEST_TOKEN, KEEPALIVE_S, LOWEST_TOKEN, Settings
from .results import MODES
from .trace_file import blocks_of
from .workload import BLOCK_TOKENS, Request, generate, split

__all__ = ["Fault", "FaultResult", "Outcome", "Window", "parse_schedule", "run_faults", "summarise"]

ENGINES = ("prefill", "decode")
ACTIONS = {
    "kill": ("runs", "dead"),
    "start": ("dead", "runs"),
    "freeze": ("runs", "frozen"),
    "thaw": ("frozen", "runs"),
}
"""What an engine must be, and what it is then."""
AFTER_S = 30.0
"""For how long requests still arrive once the last action is over."""
LONGEST_S = 1_800.0
WARM_UPS = 2
SETTLED = 3
"""So many good requests in a row, by arrival, are a recovery."""


@frozen
class Fault:
    """One action of a schedule.

    Attributes:
        at_s: In seconds after the first arrival may come.
        action: One of `ACTIONS`.
        engine: ``prefill`` or ``decode``.
    """

    at_s: float
    action: str
    engine: str


@frozen
class Outcome:
    """One request, by the time since arrivals began.

    Attributes:
        at_s: Its planned arrival.
        end_s: Its last token, or its failure.
        good: It was complete and within both objectives.
        blocks: KV blocks of its prompt.
        failure: Why it failed; empty if it did not.
    """

    at_s: float
    end_s: float
    good: bool
    blocks: int
    failure: str = ""


@frozen
class Window:
    """Requests that arrived in a stretch of time.

    Attributes:
        n: How many.
        good: Those that were complete and within both objectives.
        failed: Those that failed.
        goodput_qps: Good ones per second.
    """

    n: int
    good: int
    failed: int
    goodput_qps: float


@frozen
class FaultResult:
    """One system under one schedule.

    Attributes:
        before: Until the first action.
        during: From there until the last one is over; a start is when the engine answers.
        after: From there on.
        recovery_s: From the end of the last action to the arrival of the first of three requests in
            a row that were good; None where that never came.
        wasted_block_s: Blocks of the prompts of failed requests, each times the seconds from its
            arrival to its failure: cache that was held, or waited for, in vain.
        failures: How often each reason came.
    """

    before: Window
    during: Window
    after: Window
    recovery_s: float | None
    wasted_block_s: float
    failures: Mapping[str, int] = field(factory=dict)


def parse_schedule(text: str) -> tuple[Fault, ...]:
    """A schedule such as ``20:kill:prefill,25:start:prefill``.

    Raises:
        ConfigurationError: It is none, goes back in time, or asks what cannot be: to start an
            engine that runs, say.
    """
    found: list[Fault] = []
    state = dict.fromkeys(ENGINES, "runs")
    for part in text.split(","):
        fields = part.split(":")
        try:
            at_s = float(fields[0])
            _, action, engine = fields
        except ValueError as error:
            raise ConfigurationError("fault_schedule", part, "SECONDS:ACTION:ENGINE") from error
        if action not in ACTIONS:
            raise ConfigurationError("fault_schedule", part, f"an action: {', '.join(ACTIONS)}")
        if engine not in ENGINES:
            raise ConfigurationError("fault_schedule", part, f"an engine: {', '.join(ENGINES)}")
        least = found[-1].at_s if found else 0.0
        if not least <= at_s < LONGEST_S:
            raise ConfigurationError("fault_schedule", part, f"{least:g} to {LONGEST_S:g} seconds")
        must, then = ACTIONS[action]
        if state[engine] != must:
            raise ConfigurationError(
                "fault_schedule", part, f"an engine that is {must}, not {state[engine]}"
            )
        state[engine] = then
        found.append(Fault(at_s, action, engine))
    return tuple(found)


def summarise(
    outcomes: Iterable[Outcome], first_s: float, last_s: float, end_s: float
) -> FaultResult:
    """What came of requests around actions that lasted from `first_s` to `last_s`."""
    found = sorted(outcomes, key=lambda each: each.at_s)

    def window(start: float, end: float) -> Window:
        inside = [each for each in found if start <= each.at_s < end]
        good = sum(each.good for each in inside)
        failed = sum(bool(each.failure) for each in inside)
        return Window(len(inside), good, failed, good / (end - start) if end > start else 0.0)

    later = [each for each in found if each.at_s >= last_s]
    recovered = next(
        (
            later[at].at_s - last_s
            for at in range(len(later) - SETTLED + 1)
            if all(each.good for each in later[at : at + SETTLED])
        ),
        None,
    )
    lost = [each for each in found if each.failure]
    return FaultResult(
        window(0.0, first_s),
        window(first_s, last_s),
        window(last_s, end_s),
        recovered,
        sum(each.blocks * (each.end_s - each.at_s) for each in lost),
        dict(Counter(each.failure for each in lost)),
    )


class _Engine:
    """A server that may be killed, and started again as it was."""

    def __init__(self, spec: ServerSpec, logs: Path) -> None:
        self.spec = spec
        self._logs = logs
        self._lives = 0
        self._stack = contextlib.ExitStack()
        self._child: Launched | None = None
        self._is_killed = False

    async def start(self) -> None:
        """Start, and return when it answers."""
        self._lives += 1
        logs = self._logs / f"life-{self._lives}"
        self._child = self._stack.enter_context(launched(self.spec, logs))
        await until_ready(self.spec, self._child, None)

    async def act(self, action: str) -> None:
        """One action of a schedule."""
        assert self._child is not None
        if action == "start":
            await self.start()
            self._is_killed = False
        elif action == "kill":
            self.require_alive()
            self._is_killed = True
            os.killpg(self._child.group, signal.SIGKILL)
            await self._child.end()
            self._stack.close()
        else:
            os.killpg(self._child.group, signal.SIGSTOP if action == "freeze" else signal.SIGCONT)

    def require_alive(self) -> None:
        """Nothing, unless it died of something else than the schedule: that is no result.

        Raises:
            ServerError: It did.
        """
        if self._child is not None and not self._is_killed and not self._child.alive():
            what = f"died, which the schedule did not ask for ({self._child.fate()})"
            raise ServerError(self.spec.name, what, self._child.log_path)

    def close(self) -> None:
        """Kill it."""
        self._stack.close()


def run_faults(
    settings: Settings, schedule: Sequence[Fault], tell: Callable[[str], None]
) -> dict[str, FaultResult]:
    """Every mode of `settings`, one pair of engines after the other, under `schedule`.

    The first of `settings.loads` is the traffic. Blocks for minutes; leaves no process behind.

    Raises:
        ServerError: An engine did not start, or died of something else than the schedule.
        ConfigurationError: A mode has no pair, or the load no rate.
    """
    for mode in settings.modes:
        if mode == "mono":
            raise ConfigurationError("modes", mode, ", ".join(MODES[1:]))
    cell = settings.loads[0].cell
    if not cell.qps:
        raise ConfigurationError("cell", cell.title, "a cell with arrivals, PROMPT@QPS")
    with tempfile.TemporaryDirectory(prefix="pushkv-bench-") as scratch:
        model = write_tiny_model(Path(scratch, "model"), shape=ENGINE_MODEL)
        found: dict[str, FaultResult] = {}
        for mode in settings.modes:
            directory = Path(settings.logs or scratch) / mode
            fleet = describe_fleet(
                [mode],
                model,
                directory,
                as_shipped=settings.as_shipped,
                kv_cache_gib=settings.kv_cache_gib,
            )
            tell(f"{mode}: starting")
            try:
                found[mode] = anyio.run(_run, settings, schedule, fleet, directory, tell)
            except ExceptionGroup as group:
                raise _first(group) from group
    return found


def _first(error: Exception) -> Exception:
    """What task groups have wrapped: an engine that did not start is told as such."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def _run(
    settings: Settings,
    schedule: Sequence[Fault],
    fleet: Fleet,
    logs: Path,
    tell: Callable[[str], None],
) -> FaultResult:
    (mode,) = fleet.pairs
    pair = fleet.pairs[mode]
    names = dict(zip(ENGINES, (pair.prefill, pair.decode), strict=True))
    specs = {spec.name: spec for spec in fleet.specs}
    engines = {each: _Engine(specs[name], logs) for each, name in names.items()}
    urls = {name: f"http://127.0.0.1:{specs[name].port}" for name in names.values()}
    limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S)
    try:
        async with httpx.AsyncClient(
            timeout=settings.timeout_s, limits=limits, trust_env=False
        ) as client:
            async with anyio.create_task_group() as starting:
                for engine in engines.values():
                    starting.start_soon(engine.start)
            router = Router(client, urls, pair, mode in CONCURRENT)
            return await _Traffic(settings, router, mode).under(schedule, engines, tell)
    finally:
        for engine in engines.values():
            engine.close()


class _Traffic:
    """Requests that arrive until they are told to end."""

    def __init__(self, settings: Settings, router: Router, mode: str) -> None:
        self._settings = settings
        self._router = router
        self._mode = mode
        self._outcomes: list[Outcome] = []
        self._over = False
        self._began = 0.0
        cell = settings.loads[0].cell
        rows = generate(cell, WARM_UPS + round(LONGEST_S * cell.qps), settings.seed)
        (self._requests,) = split(rows, 1, seed=settings.seed)

    def _now(self) -> float:
        return perf_counter() - self._began

    async def under(
        self, schedule: Sequence[Fault], engines: Mapping[str, _Engine], tell: Callable[[str], None]
    ) -> FaultResult:
        """Let requests arrive while the schedule is carried out."""
        for one in self._requests[-WARM_UPS:]:
            await self._ask(one, perf_counter())
        self._began = perf_counter()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._arrive)
            for fault in schedule:
                await anyio.sleep(max(0.0, fault.at_s - self._now()))
                tell(f"{self._mode}: {fault.action} {fault.engine}")
                await engines[fault.engine].act(fault.action)
            last_s = self._now()
            tell(f"{self._mode}: {AFTER_S:.0f} s more")
            await anyio.sleep(AFTER_S)
            end_s = self._now()
            self._over = True
            for engine in engines.values():
                engine.require_alive()
        return summarise(self._outcomes, schedule[0].at_s, last_s, end_s)

    async def _arrive(self) -> None:
        async with anyio.create_task_group() as tasks:
            for one in self._requests[:-WARM_UPS]:
                await anyio.sleep(max(0.0, one.arrival_s - self._now()))
                if self._over:
                    return
                tasks.start_soon(self._send, one)

    async def _send(self, one: Request) -> None:
        answer = await self._ask(one, self._began + one.arrival_s)
        if not answer.cancelled:
            blocks = blocks_of(one.prompt_tokens, BLOCK_TOKENS)
            good = self._is_good(answer)
            outcome = Outcome(one.arrival_s, self._now(), good, blocks, answer.failure)
            self._outcomes.append(outcome)

    async def _ask(self, one: Request, planned_at: float) -> Answer:
        prompt = one.token_ids(f"faults/{self._mode}", LOWEST_TOKEN, HIGHEST_TOKEN)
        return await self._router.ask(
            prompt, one.output_tokens, planned_at, timeout_s=self._settings.timeout_s
        )

    def _is_good(self, answer: Answer) -> bool:
        slow = answer.tpot_s is not None and answer.tpot_s > self._settings.slo_tpot_s
        return answer.completed and not slow and answer.ttft_s <= self._settings.slo_ttft_s
