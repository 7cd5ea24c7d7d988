"""Traces in the Trace Event Format of Chrome, which Perfetto reads as well.

One process per life of an engine, and in it one track per transfer: its machine's statuses as
slices that follow one another, each event as an instant, each control message as an arrow from one
engine's track to the other's. A consumer's process has a counter of its exposed blocks. A transfer
with more machines, for its ranks or its later attempts, has a track for each of them, because their
statuses overlap and slices of one track must not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from pushkv.core.ids import TransferId

from .lives import MessageName
from .story import Scene, Stories, Story
from .words import is_quiet, what, why

__all__ = ["chrome_trace"]

Event = dict[str, Any]
Track = tuple[int, TransferId, tuple[str, str]]
SHOWN = ("consumer", "producer", "transport")
"""A request only folds the members of its attempt."""
COUNTER = "blocks exposed"


def chrome_trace(stories: Stories) -> dict[str, Any]:
    """The JSON object of the format, as data: microseconds since the first event of all."""
    begin = min((each.begin for each in stories.transfers.values()), default=0)
    tracks = _tracks(stories)
    numbers = {track: index for index, track in enumerate(tracks, start=1)}
    events = list(_names(stories, numbers))
    for track, scenes in tracks.items():
        last = stories.engines[track[0]].last_at - stories.clocks[track[0]].ahead
        events += _slices(track, scenes, numbers[track], begin, last)
        events += _instants(track, scenes, numbers[track], begin)
    events += _arrows(stories, numbers, begin)
    events += _counters(stories, begin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _tracks(stories: Stories) -> dict[Track, list[Scene]]:
    tracks: dict[Track, list[Scene]] = defaultdict(list)
    for story in stories.transfers.values():
        for scene in story.scenes:
            if scene.moment.machine in SHOWN:
                tracks[_track(story, scene)].append(scene)
    return tracks


def _track(story: Story, scene: Scene) -> Track:
    return scene.engine, story.transfer, scene.moment.track


def _names(stories: Stories, numbers: dict[Track, int]) -> Iterator[Event]:
    for index, engine in enumerate(stories.engines):
        args = {"name": f"{engine.name} incarnation {engine.worker.incarnation:016x}"}
        yield {"ph": "M", "name": "process_name", "pid": index + 1, "tid": 0, "args": args}
    seen: dict[tuple[int, TransferId], int] = defaultdict(int)
    for (engine_index, transfer, _), number in numbers.items():
        seen[engine_index, transfer] += 1
        again = seen[engine_index, transfer]
        named = transfer if again == 1 else f"{transfer} ({again})"
        where = {"pid": engine_index + 1, "tid": number}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": named}}
        yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": number}}


def _slices(
    track: Track, scenes: list[Scene], number: int, begin: int, last: int
) -> Iterator[Event]:
    """One slice from each change of status to the next."""
    changes = [
        each for at, each in enumerate(scenes) if at == 0 or each.moment.before != each.moment.after
    ]
    ends = [following.at for _, following in pairwise(changes)]
    for each, end in zip(changes, [*ends, max(last, scenes[-1].at)], strict=False):
        yield {
            "ph": "X",
            "cat": "status",
            "name": each.moment.after.partition(".")[2],
            "pid": track[0] + 1,
            "tid": number,
            "ts": (each.at - begin) / 1000,
            "dur": (end - each.at) / 1000,
            "args": {"transfer": track[1], "attempt": each.moment.attempt, "why": why(each.moment)},
        }


def _instants(track: Track, scenes: list[Scene], number: int, begin: int) -> Iterator[Event]:
    for each in scenes:
        if not is_quiet(each.moment):
            yield {
                "ph": "i",
                "s": "t",
                "cat": "event",
                "name": what(each.moment),
                "pid": track[0] + 1,
                "tid": number,
                "ts": (each.at - begin) / 1000,
                "args": {"attempt": each.moment.attempt, "why": why(each.moment)},
            }


def _arrows(stories: Stories, numbers: dict[Track, int], begin: int) -> Iterator[Event]:
    """From each message that came to its last sending before that."""
    number = 0
    for story in stories.transfers.values():
        sent: dict[MessageName, list[Scene]] = defaultdict(list)
        for scene in story.scenes:
            for message in scene.moment.sent:
                sent[message].append(scene)
        for scene in story.scenes:
            name = scene.moment.received
            before = [each for each in sent[name] if each.at <= scene.at] if name else []
            if name is None or not before:
                continue
            number += 1
            sent[name].remove(before[-1])
            for phase, at in (("s", before[-1]), ("f", scene)):
                yield {
                    "ph": phase,
                    "cat": "message",
                    "name": name[0].upper(),
                    "id": number,
                    **({"bp": "e"} if phase == "f" else {}),
                    "pid": at.engine + 1,
                    "tid": numbers[_track(story, at)],
                    "ts": (at.at - begin) / 1000,
                }


def _counters(stories: Stories, begin: int) -> Iterator[Event]:
    for index, (engine, clock) in enumerate(zip(stories.engines, stories.clocks, strict=True)):
        exposed = 0
        for at, change in sorted(engine.exposed, key=lambda each: each[0]):
            exposed += change
            yield {
                "ph": "C",
                "name": COUNTER,
                "pid": index + 1,
                "tid": 0,
                "ts": (at - clock.ahead - begin) / 1000,
                "args": {"blocks": exposed},
            }
