"""One transfer's life over all of its engines: what happened, in which phases, and how it ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from attrs import frozen

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import TransferId

from .clocks import Alignment, align
from .lives import EngineLife, Moment, read_engines

__all__ = ["Phase", "Scene", "Stories", "Story", "find_transfer", "read_stories"]

VERDICTS = ("Complete", "Failed", "Revoked", "Unproven")


@frozen
class Scene:
    """A moment, on the clock that all engines of the story share, and whose it is.

    Attributes:
        at: Nanoseconds of that clock.
        engine: Which one of `Stories.engines`.
    """

    at: int
    engine: int
    moment: Moment


@frozen
class Phase:
    """What a transfer was about for a while.

    Attributes:
        name: registration, prefill, write, notify, admission or release.
        attempt: None for what belongs to all of them.
        begin: Nanoseconds of the shared clock.
        end: The same; None where the traces end before it.
    """

    name: str
    attempt: int | None
    begin: int
    end: int | None


@frozen
class Story:
    """One transfer's life.

    Attributes:
        scenes: In order of time.
        phases: In order of their beginnings.
        attempts: Their numbers, in order.
        outcome: "delivered", "not delivered: REASON", or "open" where no trace has one.
        error: Nanoseconds by which times of different engines may be off, at most.
    """

    transfer: TransferId
    scenes: tuple[Scene, ...]
    phases: tuple[Phase, ...]
    attempts: tuple[int, ...]
    outcome: str
    error: int

    @property
    def begin(self) -> int:
        """The first event."""
        return self.scenes[0].at

    @property
    def end(self) -> int:
        """The last event."""
        return self.scenes[-1].at

    def lasted(self, name: str) -> int | None:
        """Nanoseconds of all phases of this name together; None if none has ended."""
        ended = [each.end - each.begin for each in self.phases_of(name) if each.end is not None]
        return sum(ended) if ended else None

    def phases_of(self, name: str) -> list[Phase]:
        """The phases of this name."""
        return [each for each in self.phases if each.name == name]


@frozen
class Stories:
    """All that some traces tell.

    Attributes:
        engines: Lives of engines, as they stand in the files.
        clocks: One for each of `engines`.
        transfers: In order of their first events.
    """

    engines: tuple[EngineLife, ...]
    clocks: tuple[Alignment, ...]
    transfers: dict[TransferId, Story]


def read_stories(paths: list[Path]) -> Stories:
    """The transfers that these traces know. Blocks on the disk.

    Raises:
        ConfigurationError: A file is no trace, or a transfer is in traces of hosts whose clocks
            cannot be aligned, because no messages between them went both ways.
    """
    engines = read_engines(paths)
    clocks = align(engines)
    scenes: dict[TransferId, list[Scene]] = defaultdict(list)
    for index, (engine, clock) in enumerate(zip(engines, clocks, strict=True)):
        for moment in engine.moments:
            scenes[moment.transfer].append(Scene(moment.at - clock.ahead, index, moment))
    stories = [_told(each, found, engines, clocks) for each, found in scenes.items()]
    stories.sort(key=lambda each: each.begin)
    return Stories(tuple(engines), tuple(clocks), {each.transfer: each for each in stories})


def find_transfer(stories: Stories, name: str) -> Story:
    """The transfer of this id, or the only one whose id begins with it, or contains it.

    The last finds a client's request id, which engines and routers put more around.

    Raises:
        ConfigurationError: There is none, or more than one.
    """
    every = list(stories.transfers)
    for fits in (
        [each for each in every if each == name],
        [each for each in every if each.startswith(name)],
        [each for each in every if name in each],
    ):
        if len(fits) == 1:
            return stories.transfers[fits[0]]
        if fits:
            raise ConfigurationError("transfer", name, f"one of {_some(fits)}")
    raise ConfigurationError("transfer", name, f"one of {_some(every)}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(map(repr, names[:5])) or "none, as the traces have no transfer") + more


def _told(
    transfer: TransferId,
    scenes: list[Scene],
    engines: Sequence[EngineLife],
    clocks: Sequence[Alignment],
) -> Story:
    there = {each.engine for each in scenes}
    if len({clocks[each].group for each in there}) > 1:
        names = ", ".join(sorted({str(engines[each].path) for each in there}))
        raise ConfigurationError(
            "trace",
            names,
            f"engines of one host, or with messages both ways to align their clocks by, as "
            f"{transfer!r} is in all of them. View each file alone",
        )
    scenes.sort(key=lambda each: each.at)
    attempts = sorted({each.moment.attempt for each in scenes if each.moment.attempt is not None})
    phases = sorted(
        [*_prefill(scenes), *(phase for each in attempts for phase in _phases(scenes, each))],
        key=lambda each: each.begin,
    )
    error = max(clocks[each].error for each in there) if len(there) > 1 else 0
    return Story(transfer, tuple(scenes), tuple(phases), tuple(attempts), _outcome(scenes), error)


def _outcome(scenes: Iterable[Scene]) -> str:
    outcome = "open"
    for scene in scenes:
        for effect in scene.moment.effects:
            if effect.type == "Delivered":
                outcome = "delivered"
            elif effect.type == "NotDelivered":
                outcome = f"not delivered: {effect.reason}"
    return outcome


def _prefill(scenes: Sequence[Scene]) -> Iterator[Phase]:
    begin = _when(scenes, None, "Arrived")
    if begin:
        end = _when(scenes, None, "Computed", final=True) + _when(scenes, None, "PrefillAborted")
        yield Phase("prefill", None, begin[0], max(end) if end else None)


def _phases(scenes: Sequence[Scene], attempt: int) -> Iterator[Phase]:
    """Those of one attempt. A phase whose beginning no trace has is left out."""
    offered = _when(scenes, attempt, "Offered")
    registered = _when(scenes, attempt, "RegistrationReceived")
    ordered = _did(scenes, attempt, "PostWrite")
    written = _when(scenes, attempt, "WriteEnded")
    sent = [
        each.at
        for each in scenes
        if each.moment.attempt == attempt
        for name, _ in each.moment.sent
        if name in VERDICTS
    ]
    heard = [at for verdict in VERDICTS for at in _when(scenes, attempt, verdict)]
    told = _did(scenes, attempt, "Delivered", "NotDelivered")
    released = _did(scenes, attempt, "BlocksReleased")
    yield from _phase("registration", attempt, offered[:1], registered[:1] or told)
    yield from _phase("write", attempt, ordered[:1], written[-1:])
    yield from _phase("notify", attempt, sent[:1], heard[-1:])
    yield from _phase("admission", attempt, heard[:1], told[:1])
    yield from _phase("release", attempt, told[:1], released[-1:])


def _phase(name: str, attempt: int, begin: list[int], end: list[int]) -> Iterator[Phase]:
    if begin and not (end and end[0] < begin[0]):
        yield Phase(name, attempt, begin[0], end[0] if end else None)


def _when(
    scenes: Iterable[Scene], attempt: int | None, event: str, final: bool = False
) -> list[int]:
    """When an event of this type came; an attempt of None is any."""
    return [
        each.at
        for each in scenes
        if each.moment.event.type == event
        and attempt in (None, each.moment.attempt)
        and (each.moment.event.final or not final)
    ]


def _did(scenes: Iterable[Scene], attempt: int, *effects: str) -> list[int]:
    return [
        each.at
        for each in scenes
        if each.moment.attempt == attempt
        and any(effect.type in effects for effect in each.moment.effects)
    ]
