"""`pushkv bench --fault-schedule`: how it is shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from attrs import asdict
from rich.console import Console
from rich.table import Table

from pushkv.bench.faults import FaultResult, parse_schedule, run_faults
from pushkv.bench.replay import Settings

__all__ = ["bench_faults"]


def bench_faults(
    settings: Settings, schedule: str, json_path: Path | None, console: Console
) -> Mapping[str, FaultResult]:
    """Run, write and show goodput under faults. Blocks for minutes.

    Raises:
        ConfigurationError: The schedule, a mode or the load will not do.
        ServerError: An engine did not start.
    """
    parsed = parse_schedule(schedule)
    progress = Console(stderr=True)
    with progress.status("begins") as status:
        found = run_faults(settings, parsed, status.update)
    if json_path is not None:
        whole = {
            "fault_schedule": schedule,
            "cell": settings.loads[0].cell.title,
            "slo": {"ttft_s": settings.slo_ttft_s, "tpot_s": settings.slo_tpot_s},
            "modes": {mode: asdict(result) for mode, result in found.items()},
        }
        json_path.write_text(json.dumps(whole, indent=2) + "\n")
    table = Table(title=f"goodput under {schedule}, in good requests a second")
    for name in ("mode", "before", "during", "after", "recovery", "wasted block·s", "failed"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for mode, one in found.items():
        windows = (one.before, one.during, one.after)
        table.add_row(
            mode,
            *(f"{each.goodput_qps:.2f} ({each.good}/{each.n})" for each in windows),
            "never" if one.recovery_s is None else f"{one.recovery_s:.1f} s",
            f"{one.wasted_block_s:.0f}",
            str(sum(one.failures.values())),
        )
    console.print(table)
    return found
