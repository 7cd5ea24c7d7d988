"""`pushkv doctor`: what is installed and whether it works, tried for real."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer
from attrs import asdict
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from pushkv.core.errors import ConfigurationError
from pushkv.doctor import Finding, Patient, Verdict, examine, worst

__all__ = ["doctor_command"]

STYLES = {
    Verdict.OK: "green",
    Verdict.NOTE: "cyan",
    Verdict.WARNING: "yellow",
    Verdict.FAILURE: "bold red",
    Verdict.SKIPPED: "dim",
}


def doctor_command(
    config: Annotated[
        Path | None,
        typer.Option(
            help="A JSON file with an engine's kv_transfer_config, or its "
            "kv_connector_extra_config: its transport is tried and its options are checked.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    vllm: Annotated[
        bool, typer.Option(help="Look at vLLM, which takes as long as importing it.")
    ] = True,
    json: Annotated[
        Path | None, typer.Option(help="Write the findings there.", dir_okay=False)
    ] = None,
) -> None:
    """Look at what is installed, and try it: bytes are written from one process to another.

    Each finding that is not fine says what to do. A note is how things are on this machine; a
    warning works, but hardly as it was meant. Exit code 1 if anything fails, or with a warning
    where --config was given; 0 otherwise.

    Example: pushkv doctor --config prefill.json, with the JSON that vLLM gets as
    --kv-transfer-config.
    """
    patient = _patient(config, vllm)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("")
        findings = examine(patient, lambda what: bar.update(task, description=what))
    verdict = worst(findings)
    _show(findings)
    if json is not None:
        found = {"verdict": verdict, "findings": [asdict(each) for each in findings]}
        json.write_text(json_module.dumps(found, indent=2) + "\n")
    if verdict is Verdict.FAILURE or (config is not None and verdict is Verdict.WARNING):
        raise typer.Exit(1)


def _patient(config: Path | None, vllm: bool) -> Patient:
    if config is None:
        return Patient(engine=vllm)
    try:
        given = json_module.loads(config.read_text())
    except (ValueError, OSError) as error:
        raise ConfigurationError("config", str(config), f"a file of JSON ({error})") from error
    extra = given.get("kv_connector_extra_config", given) if isinstance(given, dict) else given
    if not isinstance(extra, dict):
        raise ConfigurationError("kv_connector_extra_config", extra, "an object of named options")
    if "kv_connector" in extra:  # a kv_transfer_config that sets none of ours
        extra = {}
    transport, options = extra.get("transport", "nixl"), extra.get("transport_options", {})
    if not isinstance(transport, str) or not isinstance(options, dict):
        raise ConfigurationError("transport", transport, "a name, and transport_options an object")
    name = str(options.get("backend", "UCX")) if transport == "nixl" else "as configured"
    return Patient(transport, {name: options}, extra, engine=vllm)


def _show(findings: list[Finding]) -> None:
    table = Table("", "", "", show_header=False, box=None, pad_edge=False)
    for each in findings:
        said = each.seen if not each.remedy else f"{each.seen}\n→ {each.remedy}"
        style = STYLES[each.verdict]
        table.add_row(f"[{style}]{each.verdict}[/]", each.subject, said)
    Console().print(table, highlight=False)
