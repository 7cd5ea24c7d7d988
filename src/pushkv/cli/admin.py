"""`pushkv admin`: commands to running engines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pushkv.core.errors import ConfigurationError
from pushkv.runtime.admin.state import DrainState

from .conventions import App
from .engine_tables import overview
from .engines import (
    AuthorityOption,
    CertificateOption,
    Engine,
    KeyOption,
    SecretOption,
    TargetArgument,
    TargetsArgument,
    engine_at,
)
from .top import look, write_states

__all__ = ["admin_app"]

LISTED = 1_000
LOOK_EVERY_S = 0.2
JsonOption = Annotated[
    Path | None, typer.Option(help="Write what was answered there.", dir_okay=False)
]

admin_app: App = App(
    help="Ask running engines (`admin_socket`, `admin_port`), and tell them what to do.",
    no_args_is_help=True,
)


@admin_app.callback()
def root() -> None:
    """Ask running engines (`admin_socket`, `admin_port`), and tell them what to do."""


@admin_app.command("list")
def list_command(
    targets: TargetsArgument,
    json: JsonOption = None,
    secret: SecretOption = None,
    authority: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """List links, transfers under way, and quarantined blocks with what would free them.

    Exit code 1 if some engine is gone.

    Example: pushkv admin list /run/pushkv/decode.sock
    """
    engines = [engine_at(each, secret, authority, certificate, key) for each in targets]
    seen = look(engines, LISTED)
    Console().print(overview(seen, LISTED), highlight=False)
    if json is not None:
        write_states(json, seen)
    if any(each.state is None for each in seen):
        raise typer.Exit(1)


@admin_app.command()
def drain(
    targets: TargetsArgument,
    wait_s: Annotated[
        float, typer.Option(help="Wait so many seconds until nothing is under way.", min=0)
    ] = 0.0,
    json: JsonOption = None,
    secret: SecretOption = None,
    authority: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Take no new transfers, and finish those that are under way. Every rank is drained by itself.

    A decode engine computes new prompts itself, or fails them if that is its
    kv_load_failure_policy; a prefill engine tells who registers for a new request at once. Take
    the engine out of the router first, so that neither happens. `undrain` takes it back.

    Exit code 1 if something was still under way after --wait-s: `pushkv admin list` says what. A
    quarantine lasts until a proof ends it: see `pushkv admin release`.

    Example: pushkv admin drain /run/pushkv/decode.sock --wait-s 60
    """
    engines = [engine_at(each, secret, authority, certificate, key) for each in targets]
    found = {each.target: each.drain(on=True) for each in engines}
    if wait_s:
        _wait(engines, found, wait_s)
    _say_drains(found, json)
    if wait_s and not all(each.is_empty for each in found.values()):
        raise typer.Exit(1)


@admin_app.command()
def undrain(
    targets: TargetsArgument,
    json: JsonOption = None,
    secret: SecretOption = None,
    authority: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Take new transfers again.

    Example: pushkv admin undrain /run/pushkv/decode.sock
    """
    engines = [engine_at(each, secret, authority, certificate, key) for each in targets]
    _say_drains({each.target: each.drain(on=False) for each in engines}, json)


@admin_app.command()
def release(
    target: TargetArgument,
    transfer: Annotated[
        str | None, typer.Option(help="Release what is quarantined of this transfer.")
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            help="Or what is quarantined for this dead peer: ENGINE/INCARNATION/RANK, as `list` "
            "shows it."
        ),
    ] = None,
    nothing_can_reach_them: Annotated[
        bool,
        typer.Option(
            "--nothing-can-reach-them",
            help="Your word that no WRITE can reach these blocks any more.",
        ),
    ] = False,
    json: JsonOption = None,
    secret: SecretOption = None,
    authority: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Give quarantined blocks back on your word that nothing can reach them any more.

    If that is wrong, a WRITE that lands late lands in blocks of another request, whose answer is
    then wrong without anybody's noticing. So see first that the peer's process has ended on its
    host, or that the host is off; a lost link, a time-out or a successor proves nothing.

    Without --nothing-can-reach-them nothing is released. Exit code 2 if the engine refuses.

    Example: pushkv admin release /run/pushkv/decode.sock --transfer cmpl-42
    --nothing-can-reach-them
    """
    order: dict[str, object] = {"nothing_can_reach_them": nothing_can_reach_them}
    if transfer is not None:
        order["transfer"] = transfer
    if peer is not None:
        order["peer"] = _peer(peer)
    released = engine_at(target, secret, authority, certificate, key).release(order).released
    for each in released:
        blocks = "block" if each.blocks == 1 else "blocks"
        typer.echo(f"released {each.blocks} {blocks} of {each.transfer}, peer {each.peer}")
    if json is not None:
        json.write_bytes(msgspec.json.encode({"released": released}) + b"\n")


def _peer(text: str) -> dict[str, object]:
    engine, *rest = text.rsplit("/", 2)
    if len(rest) == 2 and rest[1].isascii() and rest[1].isdigit():
        return {"engine": engine, "incarnation": rest[0], "rank": int(rest[1])}
    raise ConfigurationError("--peer", text, "ENGINE/INCARNATION/RANK, as `list` shows it")


def _wait(engines: list[Engine], found: dict[str, DrainState], wait_s: float) -> None:
    """Until all are empty, or the time is over; `found` is what they said last."""
    until = time.monotonic() + wait_s
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        while not all(each.is_empty for each in found.values()) and time.monotonic() < until:
            left = sum(each.left for each in found.values())
            bar.update(task, description=f"{left} under way")
            time.sleep(LOOK_EVERY_S)
            found.update({each.target: each.state(0).drain for each in engines})


def _say_drains(found: dict[str, DrainState], json: Path | None) -> None:
    for target, each in found.items():
        if not each.is_on:
            typer.echo(f"{target}: takes new transfers")
        elif each.is_empty:
            typer.echo(f"{target}: drained and empty: it may be stopped")
        else:
            typer.echo(f"{target}: drained, {each.left} under way")
    if json is not None:
        json.write_bytes(msgspec.json.encode(found) + b"\n")
