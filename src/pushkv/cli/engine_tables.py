"""What engines tell of themselves, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from attrs import frozen
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pushkv.runtime.admin.state import EngineState, LinkState, QuarantineState, TransferState

__all__ = ["Seen", "overview"]

UNBOUNDED = 1 << 40
"""Blocks that no budget of so many bounds: what a policy says by default."""


@frozen
class Seen:
    """One engine at one look.

    Attributes:
        target: As the user named it.
        state: What it told; None where nobody answered.
        error: Why not.
    """

    target: str
    state: EngineState | None
    error: str = ""

    @property
    def name(self) -> str:
        """The engine's, with its rank."""
        return self.target if self.state is None else f"{self.state.engine}/{self.state.rank}"


def overview(seen: Sequence[Seen], rows: int) -> RenderableType:
    """Engines, then their links, transfers and quarantines; up to `rows` of each, oldest first."""
    there = [(each.name, each.state) for each in seen if each.state is not None]
    links = [(name, each) for name, state in there for each in state.links]
    links.sort(key=lambda each: -each[1].status_s)
    moving = [(name, each) for name, state in there for each in state.transfers]
    moving.sort(key=lambda each: -each[1].age_s)
    held = [(name, each) for name, state in there for each in state.quarantined]
    held.sort(key=lambda each: -each[1].since_s)
    parts: list[RenderableType] = [_engines(seen)]
    if links:
        parts += _cut(_links(islice(links, rows)), sum(s.links_in_all for _, s in there) - rows)
    if moving:
        parts += _cut(
            _transfers(islice(moving, rows)), sum(s.transfers_in_all for _, s in there) - rows
        )
    if held:
        parts += _cut(
            _quarantines(islice(held, rows)), sum(s.quarantined_in_all for _, s in there) - rows
        )
    return Group(*parts)


def _cut(table: Table, more: int) -> Iterator[RenderableType]:
    yield Text("")
    yield table
    if more > 0:
        yield Text(f"and {more} more", style="dim")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in columns:
        numeric = name in ("lease", "for", "age", "blocks", "attempt", "attempts")
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    return table


def _engines(seen: Sequence[Seen]) -> Table:
    table = _table("engines", "engine", "incarnation", "state", "exposed", "quarantined", "pinned")
    for each in seen:
        state = each.state
        if state is None:
            table.add_row(each.target, "", Text(f"gone: {each.error}", style="red"))
            continue
        health = state.health
        table.add_row(
            each.name,
            state.incarnation,
            _standing(state),
            _budget(health.exposed_blocks, health.exposed_blocks_most),
            str(health.quarantined_blocks),
            _budget(health.pinned_blocks, health.pinned_blocks_most),
        )
    return table


def _budget(blocks: int, most: int) -> str:
    return str(blocks) if most >= UNBOUNDED else f"{blocks} of {most}"


def _standing(state: EngineState) -> Text:
    if state.drain.is_empty:
        return Text("drained and empty", style="green")
    if state.drain.is_on:
        return Text(f"drained, {state.drain.left} under way", style="yellow")
    return Text("serving")


def _links(links: Iterator[tuple[str, LinkState]]) -> Table:
    table = _table("links", "engine", "as", "peer", "at", "status", "for", "lease")
    for name, each in links:
        lease = "" if each.lease_left_s is None else _time(each.lease_left_s)
        peer = "" if each.peer is None else str(each.peer)
        table.add_row(
            name, each.role, peer, each.address, _short(each.status), _time(each.status_s), lease
        )
    return table


def _transfers(moving: Iterator[tuple[str, TransferState]]) -> Table:
    table = _table(
        "transfers",
        *("engine", "as", "transfer", "attempt", "peer", "status"),
        *("for", "age", "blocks", "attempts"),
    )
    for name, each in moving:
        table.add_row(
            name,
            each.role,
            each.transfer,
            "" if each.attempt is None else str(each.attempt),
            "" if each.peer is None else str(each.peer),
            _short(each.status),
            _time(each.status_s),
            _time(each.age_s),
            str(each.blocks),
            str(each.attempts),
        )
    return table


def _quarantines(held: Iterator[tuple[str, QuarantineState]]) -> Table:
    table = _table(
        "quarantined", "engine", "as", "transfer", "peer", "for", "blocks", "freed by any of"
    )
    for name, each in held:
        proofs = (
            each.kind if each.due_s is None else f"{each.kind} in {_time(each.due_s)}"
            for each in each.proofs
        )
        table.add_row(
            name,
            each.role,
            each.transfer,
            "" if each.peer is None else str(each.peer),
            _time(each.since_s),
            str(each.blocks),
            ", ".join(proofs),
        )
    return table


def _short(status: str) -> str:
    return status.rpartition(".")[2]


def _time(duration_s: float) -> str:
    if duration_s < 100:
        return f"{duration_s:.1f} s"
    minutes, left_s = divmod(round(duration_s), 60)
    if minutes < 100:
        return f"{minutes}:{left_s:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"
