"""`pushkv bench`: one traffic mix over pushkv, vLLM's own connectors and one engine alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from pushkv.core.errors import ConfigurationError

if TYPE_CHECKING:
    from pushkv.bench.replay import Load
    from pushkv.demo.supervise import Progress

__all__ = ["bench_command"]

CELLS = ["128", "512", "2048", "128@1.5", "512@0.8", "1024@0.6+768", "2048@0.25"]
MODES = "mono,pull,push,push_sequential,pushkv"


Cells = Annotated[
    list[str] | None,
    typer.Option(
        help="A point of load, PROMPT or PROMPT@QPS, either with +SHARED; may be repeated. PROMPT: "
        "tokens, or a mix such as 128x3,2048. QPS: Poisson arrivals per second; without, one at a "
        "time. SHARED: "
        f"tokens that all prompts begin with. By default: {' '.join(CELLS)}."
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        help="Replay this file in place of cells: JSON lines as in the Mooncake traces, with "
        "timestamp (ms), input_length, output_length, hash_ids.",
        dir_okay=False,
    ),
]
AsShipped = Annotated[
    bool,
    typer.Option(
        help="Leave the progress threads of vLLM's connectors spinning, a core per engine."
    ),
]
Cancel = Annotated[float, typer.Option(help="The share of clients that leave early.", min=0, max=1)]
Price = Annotated[
    float | None, typer.Option(help="Of an engine-hour, for the cost of a request.", min=0)
]
Json = Annotated[Path | None, typer.Option(help="Write all of it there.", dir_okay=False)]
Html = Annotated[Path | None, typer.Option(help="Write a page with plots there.", dir_okay=False)]
Again = Annotated[
    Path | None,
    typer.Option("--from", help="Run nothing: show what a --json holds.", dir_okay=False),
]
Logs = Annotated[
    Path | None, typer.Option(help="Keep the engines' logs and traces there.", file_okay=False)
]
Faults = Annotated[
    str | None,
    typer.Option(
        "--fault-schedule",
        help="Goodput under faults instead: SECONDS:ACTION:ENGINE,... with kill, start, freeze, "
        "thaw and prefill, decode, such as 20:kill:prefill,25:start:prefill. The first --cell, "
        "system after system.",
    ),
]


def bench_command(
    cell: Cells = None,
    trace: Trace = None,
    trace_block_tokens: Annotated[int, typer.Option(help="Tokens per hash id.", min=1)] = 512,
    mode: Annotated[str, typer.Option(help="Which systems, of these.")] = MODES,
    output: Annotated[str, typer.Option(help="Output tokens, or a mix.")] = "32",
    rounds: Annotated[int, typer.Option(help="Turns of all systems in each cell.", min=1)] = 3,
    round_s: Annotated[float, typer.Option(help="Seconds of arrivals in one turn.")] = 15.0,
    requests: Annotated[int, typer.Option(help="At least so many in one turn.", min=1)] = 4,
    cancel: Cancel = 0.0,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths, prompts, leavers.")] = 0,
    as_shipped: AsShipped = False,
    slo_ttft_s: Annotated[float, typer.Option(help="A request is good up to this TTFT,")] = 2.0,
    slo_tpot_s: Annotated[float, typer.Option(help="and this time per output token.")] = 0.2,
    price: Price = None,
    kv_cache_gib: Annotated[int, typer.Option(help="KV cache of each engine.", min=1)] = 1,
    json: Json = None,
    html: Html = None,
    again: Again = None,
    logs: Logs = None,
    fault_schedule: Faults = None,
) -> None:
    """Replay one traffic mix over several systems, in turns, and compare them.

    Starts real vLLM on CPU cores: one engine alone (mono), and pairs of a prefill and a decode
    engine with vLLM's NixlConnector (pull), its NixlPushConnector dispatched to both engines at
    once (push) or to prefill first (push_sequential), and pushkv. Up to seven engines, 2 GB each,
    live side by side; each cell is replayed over one system after the other, round by round, so
    that what else the machine does hits all alike. An idle system costs nothing, unless
    --as-shipped.

    TTFT here is mostly prefill, the same for all. So the figure to compare is TTFT less the time of
    prefill alone, which is measured in the same rounds. A failed transfer is a failed request:
    nothing is computed again behind your back.

    Example: pushkv bench --cell 512@0.8 --rounds 1 --round-s 8

    Exit code 1 if a request failed, 2 if an engine did not start or an option is wrong.
    """
    from pushkv.bench.results import read_results, write_results
    from pushkv.bench.table import show

    console = Console()
    if again is not None:
        results = read_results(again)
    else:
        from pushkv.bench.replay import Settings, run_bench

        settings = Settings(
            loads=_loads(cell, trace, trace_block_tokens, output, cancel),
            modes=tuple(mode.split(",")),
            rounds=rounds,
            round_s=round_s,
            requests_min=requests,
            seed=seed,
            as_shipped=as_shipped,
            slo_ttft_s=slo_ttft_s,
            slo_tpot_s=slo_tpot_s,
            price_per_engine_hour=price,
            kv_cache_gib=kv_cache_gib,
            logs=logs,
        )
        if fault_schedule is not None:
            from .bench_faults import bench_faults

            bench_faults(settings, fault_schedule, json, console)
            return
        with _bars() as progress:
            teller = Teller(progress)
            results = run_bench(settings, teller.tell, teller.starting)
    if json is not None:
        write_results(results, json)
    if html is not None:
        from pushkv.bench.page import page

        html.write_text(page(results), encoding="utf-8")
    show(results, console)
    if any(one.failed for each in results.cells for one in each.modes.values()):
        raise typer.Exit(1)


def _loads(
    cells: list[str] | None,
    trace: Path | None,
    trace_block_tokens: int,
    output: str,
    cancel: float,
) -> list[Load]:
    from pushkv.bench.replay import Load
    from pushkv.bench.trace_file import read_trace
    from pushkv.bench.workload import Cell, Lengths, parse_cell, parse_lengths

    if trace is None:
        mix = parse_lengths(output)
        return [Load(parse_cell(each, mix, cancel)) for each in cells or CELLS]
    if cells:
        raise ConfigurationError("cell", cells, "none together with a trace")
    rows = read_trace(trace, trace_block_tokens)
    span_s = rows[-1].timestamp_ms / 1_000
    described = Cell(
        Lengths(tuple(row.input_length for row in rows), (1.0,) * len(rows)),
        Lengths(tuple(row.output_length for row in rows), (1.0,) * len(rows)),
        qps=len(rows) / span_s if span_s else 0.0,
        cancel_share=cancel,
        name=trace.name,
    )
    return [Load(described, rows, trace_block_tokens)]


def _bars() -> Bars:
    return Bars(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


class Teller:
    """A bar for each engine that starts, then for each cell; lines, where it is no terminal."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._said: set[str] = set()

    def starting(self, news: Progress) -> None:
        """An engine is starting, or ready."""
        self.tell(f"starting: {news.name}", int(news.ready), 1)

    def tell(self, what: str, done: int, total: int) -> None:
        """`what` is "cell: now"; bars are by cell."""
        key = what.partition(": ")[0] if not what.startswith("starting") else what
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(what)
        whole = what == key and done == total
        line = f"{what} {done}/{total}"
        if not self._bars.console.is_terminal and line not in self._said:
            typer.echo(line, err=True)
            self._said.add(line)
        self._bars.update(
            self._tasks[key],
            description=what,
            total=1 if whole else total,
            completed=1 if whole else done,
        )
