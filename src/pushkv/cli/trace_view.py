"""`pushkv trace view` and `export`: one request's life over all engines whose traces are given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pushkv.core.errors import ConfigurationError
from pushkv.observe.chrome import chrome_trace
from pushkv.observe.story import Phase, Stories, Story, find_transfer, read_stories
from pushkv.observe.words import is_quiet, what, why

__all__ = ["export_command", "view_command"]

PHASES = ("registration", "prefill", "write", "notify")
STYLES = {
    "registration": "cyan",
    "prefill": "blue",
    "write": "green",
    "notify": "yellow",
    "admission": "magenta",
    "release": "dim",
}
BAR_COLUMNS = 40
MILLISECOND = 1e6

Traces = Annotated[
    list[Path], typer.Argument(help="Traces of the engines: the producer's and the consumer's.")
]


def view_command(
    traces: Traces,
    transfer: Annotated[
        str | None,
        typer.Option(
            help="Show this one: its id, a beginning of it that no other has, or the client's "
            "request id that it contains."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write it there.", dir_okay=False)] = None,
) -> None:
    """List the transfers of some traces, or show one's life over all engines.

    Of one transfer: its phases as bars, then every event with milliseconds since the first, whose
    it was, and why the protocol has it so. Traces of one host share a clock; those of several are
    aligned by the messages between them, and the greatest error of that is told. A trace may be
    looked at while its engine runs. Exit code 2 if a trace cannot be read or aligned.

    Example: pushkv trace view P.ndjson D.ndjson --transfer cmpl-42
    """
    stories = _read(traces)
    story = None if transfer is None else find_transfer(stories, transfer)
    console = Console()
    if story is None:
        console.print(_list(stories), highlight=False)
    else:
        _show(console, stories, story)
    if json is not None:
        shown = list(stories.transfers.values()) if story is None else [story]
        every = [_plain(stories, each, scenes=story is not None) for each in shown]
        _write(json, {"transfers": every})


def export_command(
    traces: Traces,
    chrome: Annotated[
        Path, typer.Option(help="Write Chrome's trace-event JSON there.", dir_okay=False)
    ],
) -> None:
    """Write traces as a timeline that ui.perfetto.dev and chrome://tracing open.

    One process per engine, one track per transfer, an arrow per control message, and a counter of
    the blocks that are exposed. Exit code 2 if a trace cannot be read or aligned.

    Example: pushkv trace export P.ndjson D.ndjson --chrome timeline.json
    """
    stories = _read(traces)
    found = chrome_trace(stories)
    _write(chrome, found)
    told = f"{chrome}: {len(stories.transfers)} transfers, {len(found['traceEvents'])} events"
    Console(soft_wrap=True).print(told, highlight=False, markup=False)


def _read(traces: list[Path]) -> Stories:
    bar = Progress(
        SpinnerColumn(),
        TextColumn("reading traces"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        bar.add_task("")
        return read_stories(traces)


def _write(path: Path, found: object) -> None:
    try:
        path.write_bytes(msgspec.json.encode(found))
    except OSError as error:
        raise ConfigurationError("path", str(path), f"a file to write ({error})") from error


def _list(stories: Stories) -> Table:
    table = Table("transfer", "outcome", box=None, pad_edge=False)
    table.add_column("attempts", justify="right")
    for name in (*PHASES, "all"):
        table.add_column(f"{name}\nms", justify="right")
    for story in stories.transfers.values():
        lasted = [story.lasted(name) for name in PHASES]
        table.add_row(
            Text(story.transfer),
            Text(story.outcome, style=_style(story)),
            str(len(story.attempts)),
            *("–" if each is None else _ms(each) for each in (*lasted, story.end - story.begin)),
        )
    return table


def _style(story: Story) -> str:
    return {"delivered": "green", "open": "yellow"}.get(story.outcome, "red")


def _show(console: Console, stories: Stories, story: Story) -> None:
    head = Text.assemble((story.transfer, "bold"), ": ", (story.outcome, _style(story)))
    head.append(f", {len(story.attempts)} attempts, {_ms(story.end - story.begin)} ms")
    console.print(head, highlight=False)
    if story.error:
        told = f"clocks aligned by messages; times of different engines ± {_ms(story.error)} ms"
        console.print(told, highlight=False)
    console.print()
    console.print(_bars(story), highlight=False)
    console.print()
    table = Table("ms", "engine", "what", "why", box=None, pad_edge=False)
    table.columns[0].justify = "right"
    permitted = set()
    for scene in story.scenes:
        moment = scene.moment
        first_permit = moment.event.type == "Permitted" and moment.track not in permitted
        if first_permit:
            permitted.add(moment.track)
        if first_permit or not is_quiet(moment):
            reason = Text(why(moment), style="dim")
            name = Text(stories.engines[scene.engine].name)
            table.add_row(_ms(scene.at - story.begin), name, Text(what(moment)), reason)
    console.print(table, highlight=False)


def _bars(story: Story) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for phase in story.phases:
        named = phase.name if phase.attempt is None else f"{phase.name}, attempt {phase.attempt}"
        lasted = "open" if phase.end is None else f"{_ms(phase.end - phase.begin)} ms"
        bar = Text(_bar(story, phase), style=STYLES[phase.name])
        table.add_row(named, f"+{_ms(phase.begin - story.begin)}", lasted, bar)
    return table


def _bar(story: Story, phase: Phase) -> str:
    whole = max(story.end - story.begin, 1)
    end = story.end if phase.end is None else phase.end
    first = min((phase.begin - story.begin) * BAR_COLUMNS // whole, BAR_COLUMNS - 1)
    last = max(first + 1, -((story.begin - end) * BAR_COLUMNS // whole))
    return " " * first + "━" * (last - first)


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / MILLISECOND:.3f}"


def _plain(stories: Stories, story: Story, *, scenes: bool) -> dict[str, Any]:
    """A story as JSON has it; times in nanoseconds since its first event."""
    found: dict[str, Any] = {
        "transfer": story.transfer,
        "outcome": story.outcome,
        "attempts": story.attempts,
        "lasted_ns": story.end - story.begin,
        "clock_error_ns": story.error,
        "phases": [
            {
                "name": each.name,
                "attempt": each.attempt,
                "begin_ns": each.begin - story.begin,
                "end_ns": None if each.end is None else each.end - story.begin,
            }
            for each in story.phases
        ],
    }
    if scenes:
        found["events"] = [
            {
                "at_ns": each.at - story.begin,
                "engine": stories.engines[each.engine].name,
                "machine": each.moment.machine,
                "attempt": each.moment.attempt,
                "row": each.moment.row,
                "what": what(each.moment),
                "why": why(each.moment),
            }
            for each in story.scenes
        ]
    return found
