"""Several configurations at once, one process for each core, with news of how far they are."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from multiprocessing.queues import Queue
from pathlib import Path

from attrs import frozen

from .configurations import Configuration
from .moves import Move
from .pool import CONTEXT, workers
from .script import script_of
from .search import NO_LIMITS, Found, Limits, Progress, Violation, search
from .story import mermaid, story

__all__ = ["Limits", "News", "Report", "check", "check_one"]

News = Callable[[str, Progress], None]


@frozen
class Told:
    """A violation, told: see `story`; `scenario` is a script that makes it again."""

    broken: tuple[tuple[str, str], ...]
    story: str
    mermaid: str
    moves: tuple[Move, ...]
    scenario: str


@frozen
class Report:
    """What the search of one configuration came to.

    Attributes:
        complete: Everything within its bounds was seen; a limit that was reached is no success.
        rows: Rows that fired, as (table, row).
        fingerprint: A digest of the set of states, where it was asked for.
    """

    name: str
    states: int
    edges: int
    depth: int
    complete: bool
    seconds: float
    violations: tuple[Told, ...]
    rows: frozenset[tuple[str, str]]
    fingerprint: int = 0

    @property
    def passed(self) -> bool:
        """Whether everything was seen and nothing is broken."""
        return self.complete and not self.violations


def check_one(
    configuration: Configuration,
    limits: Limits = NO_LIMITS,
    progress: Callable[[Progress], None] | None = None,
    *,
    fingerprint: bool = False,
    checkpoint: Path | None = None,
) -> Report:
    """Search one configuration in this process."""
    found = search(
        configuration,
        limits=limits,
        progress=progress,
        fingerprint=fingerprint,
        checkpoint=checkpoint,
    )
    return _report(configuration, found)


def _report(configuration: Configuration, found: Found) -> Report:
    def told(violation: Violation) -> Told:
        return Told(
            violation.broken,
            story(configuration, violation),
            mermaid(configuration, violation),
            violation.moves,
            script_of(configuration, violation),
        )

    return Report(
        name=found.name,
        states=found.states,
        edges=found.edges,
        depth=found.depth,
        complete=found.complete,
        seconds=found.seconds,
        violations=tuple(told(each) for each in found.violations),
        rows=found.rows,
        fingerprint=found.fingerprint,
    )


_news: Queue[tuple[str, Progress]] | None = None


def _begin(news: Queue[tuple[str, Progress]]) -> None:
    global _news  # noqa: PLW0603 - how a pool hands something to its workers
    _news = news


def _work(configuration: Configuration, limits: Limits, checkpoints: Path | None) -> Report:
    def progress(now: Progress) -> None:
        assert _news is not None, "workers are begun with a queue"
        _news.put((configuration.name, now))

    checkpoint = None if checkpoints is None else checkpoints / f"{configuration.name}.search"
    return check_one(configuration, limits, progress, checkpoint=checkpoint)


def check(
    configurations: Sequence[Configuration],
    *,
    jobs: int = 2,
    limits: Limits = NO_LIMITS,
    checkpoints: Path | None = None,
    news: News | None = None,
    done: Callable[[Report], None] | None = None,
) -> list[Report]:
    """Search `configurations`, the first ones first, `jobs` at a time.

    Searches that reach a limit are put down in the directory `checkpoints`, and taken up from
    there. Blocks until all are searched. `news` is called a few times per second for each, `done`
    once. Returns the reports in the order of `configurations`.
    """
    channel: Queue[tuple[str, Progress]] = CONTEXT.Queue()
    with workers(jobs, _begin, (channel,)) as pool:
        futures = [pool.submit(_work, each, limits, checkpoints) for each in configurations]
        left: set[Future[Report]] = set(futures)
        while left:
            ended, left = wait(left, timeout=0.2, return_when=FIRST_COMPLETED)
            _pass_on(channel, news)
            for future in ended:
                if done is not None:
                    done(future.result())
        return [future.result() for future in futures]


def _pass_on(channel: Queue[tuple[str, Progress]], news: News | None) -> None:
    while True:
        try:
            name, progress = channel.get_nowait()
        except queue.Empty:
            return
        if news is not None:
            news(name, progress)
