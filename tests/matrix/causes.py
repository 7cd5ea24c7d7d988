"""Whether each failure was told: one structured line of the log, and one counter, with its cause.

The lines are read from the logs of the engines, the counters from pushkv's own metrics. A request
that got no KV by transfer has one line more at its decode engine, which bears the request's name.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from attrs import define, field, frozen
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from .fleet import Fleet

__all__ = ["Telling", "logging_config", "read_lines", "untold"]

STRUCTURED = re.compile(
    r"pushkv\.transfers cause=(?P<cause>\S+) phase=(?P<phase>\S+) transfer=(?P<transfer>\S+) "
    r"attempt=(?P<attempt>\S+) peer=\S+: .* not (?P<verb>delivered|served): (?P=cause) in phase"
)
FINAL = re.compile(
    r"pushkv: request (?P<request>\S+): "
    r"(?:transfer failed|prefilled here|bad kv_transfer_params) \("
)


def logging_config(directory: Path) -> Path:
    """The file that makes an engine write every field of pushkv's structured lines."""
    fields = "cause=%(cause)s phase=%(phase)s transfer=%(transfer)s attempt=%(attempt)s"
    path = directory / "logging.json"
    directory.mkdir(parents=True, exist_ok=True)
    handlers = {
        "fields": {"class": "logging.StreamHandler", "formatter": "fields"},
        "plain": {"class": "logging.StreamHandler", "formatter": "plain"},
    }
    formatters = {
        "fields": {"format": f"%(name)s {fields} peer=%(peer_engine)s: %(message)s"},
        "plain": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"},
    }
    loggers = {
        "pushkv.transfers": {"level": "INFO", "handlers": ["fields"], "propagate": False},
        "pushkv": {"level": "INFO", "handlers": ["plain"], "propagate": False},
        "vllm": {"level": "INFO", "handlers": ["plain"], "propagate": False},
    }
    config = {"version": 1, "disable_existing_loggers": False}
    path.write_text(
        json.dumps({**config, "formatters": formatters, "handlers": handlers, "loggers": loggers})
    )
    return path


@frozen
class Lines:
    """What a piece of an engine's log says of failures.

    Attributes:
        attempts: Verb, transfer and attempt of each structured line.
        causes: How often each cause was named, with the name of its counter.
        requests: vLLM's name of each request that went on without a transfer.
    """

    attempts: tuple[tuple[str, str, str], ...]
    causes: Counter[tuple[str, str]]
    requests: tuple[str, ...]


def read_lines(text: str) -> Lines:
    """The failures of a piece of a log."""
    found = list(STRUCTURED.finditer(text))
    return Lines(
        tuple((each["verb"], each["transfer"], each["attempt"]) for each in found),
        Counter((f"not_{each['verb']}", each["cause"]) for each in found),
        tuple(each["request"] for each in FINAL.finditer(text)),
    )


def read_counters(text: str) -> Counter[tuple[str, str]]:
    """How many transfers ended, by outcome and cause, by an engine's metrics."""
    found: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "pushkv_transfers_total":
                labels = sample.labels
                found[labels["outcome"], labels["cause"]] += int(sample.value)
    return found


def untold(name: str, lines: Lines, counted: Counter[tuple[str, str]]) -> list[str]:
    """What is wrong between the lines and the counters of one engine."""
    failed = Counter({each: n for each, n in counted.items() if n and each[1]})
    notes = [
        f"{name}: {each[0]} {each[1]}: {lines.causes[each]} lines, counted {failed[each]}"
        for each in sorted(lines.causes | failed)
        if lines.causes[each] != failed[each]
    ]
    # Without an attempt there is but the transfer's name, which clients may give to two prompts.
    numbered = [each for each in lines.attempts if each[2] != "None"]
    for what, names in (("attempt", numbered), ("request", lines.requests)):
        twice = [each for each, n in Counter[object](names).items() if n > 1]
        notes += [f"{name}: {what} {each} has several lines" for each in twice]
    return notes


@define
class Telling:
    """Compares what a run's failures left behind, engine by engine.

    Attributes:
        legs: Name and samples of each decode leg that was answered with tokens, by the log of the
            life of the engine that answered.
    """

    fleet: Fleet
    legs: list[tuple[Path, str, int]] = field(factory=list)
    _read: dict[Path, int] = field(factory=dict)
    _counted: dict[Path, Counter[tuple[str, str]]] = field(factory=dict)

    async def begin(self) -> None:
        """Everything before now was of another run."""
        for name in self.fleet.plan.engines:
            log = self.fleet.log(name)
            self._read[log] = log.stat().st_size
            self._counted[log] = read_counters(await self.fleet.metrics(name))

    async def end(self) -> list[str]:
        """What was not told as it must be, for engines that run."""
        notes: list[str] = []
        for name in self.fleet.plan.engines:
            log = self.fleet.log(name)
            # Counters first: a failure in between has a line more, not less, and is found out.
            try:
                counted = read_counters(await self.fleet.metrics(name))
            except httpx.HTTPError as error:
                notes.append(f"{name}: its metrics do not answer: {error!r}")
                continue
            counted.subtract(self._counted.get(log, Counter()))
            with log.open(errors="replace") as file:
                file.seek(self._read.get(log, 0))
                lines = read_lines(file.read())
            notes += untold(name, lines, counted)
            notes += silent(name, lines, counted, [each for each in self.legs if each[0] == log])
        return notes


def silent(
    name: str,
    lines: Lines,
    counted: Counter[tuple[str, str]],
    legs: Iterable[tuple[Path, str, int]],
) -> list[str]:
    """Answers of one engine that had neither a transfer nor a line that says why not."""
    samples = sum(count for _, _, count in legs)
    names = {request for _, request, _ in legs}
    told = sum(any(each in request for each in names) for request in lines.requests)
    without = samples - told - counted["delivered", ""]
    return [f"{name}: {without} answers without a transfer and without a line"] * (without > 0)
