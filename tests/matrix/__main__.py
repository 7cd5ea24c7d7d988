"""The fault matrix: ``python -m tests.matrix --help``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import anyio
from rich.console import Console
from tests.lanes import LANES, OVER_UCX

from pushkv.demo.supervise import ServerError
from pushkv.demo.systems import PULL, PUSH, SYSTEMS, System, new_name
from pushkv.demo.tiny_model import write_tiny_model

from .causes import Telling
from .fleet import Answer, Fleet, fleet
from .moments import MOMENT_FAULTS
from .network import NETWORK_FAULTS, impossible
from .patience import patient
from .reference import REFERENCE_FAULTS, Stage, one_run
from .rows import Row, Rows, show
from .scene import Scene
from .vllm_faults import FAULTS

BACK_WITHIN_S = 30.0
"""Within which every block must be back: the hold time, the death bound, a lease and a margin."""

FLEETS = 3
"""How often in a row a fleet may fail to start before the whole run ends."""


async def one_vllm_run(fleet: Fleet, fault: str, seed: int) -> Row:
    """One run of one fault; the fleet is healthy before, and need not be after."""
    scene = Scene(fleet, Telling(fleet), seed)
    notes: list[str] = []
    await scene.telling.begin()
    try:
        await FAULTS[fault].happens(scene)
    except* ServerError:
        raise  # an engine that the fault killed could not be started again
    except* Exception as errors:  # noqa: BLE001 - whatever a fault does to a fleet is a result
        notes.append(f"the run ended early: {errors.exceptions[0]!r}"[:200])
        scene.asked.append(("", Answer()))
    right = wrong = answered = 0
    for prompt, answer in scene.asked:
        answered += answer.came
        fits = bool(answer.tokens) and set(answer.tokens) == {scene.expected.get(prompt)}
        excused = bool(answer.error) and (scene.may_fail or prompt in scene.broken)
        right += fits or excused
        wrong += bool(answer.tokens) and not fits
        if answer.error and not excused:
            notes.append(answer.error)
    await scene.revive()
    leaked = await fleet.leaked_blocks(BACK_WITHIN_S)
    untold = await scene.telling.end() if fleet.system.says_why else []
    return Row(
        fault,
        fleet.system.name,
        runs=1,
        clients=len(scene.asked),
        answered=answered,
        right=right,
        wrong=wrong,
        leaked_blocks=leaked,
        recovered=int(await _is_healthy(scene)),
        untold=len(untold),
        slowest_s=round(max((each.after_s for _, each in scene.asked), default=0.0), 1),
        notes=tuple(dict.fromkeys([*untold, *notes])),
    )


async def _is_healthy(scene: Scene) -> bool:
    """Whether another request is right, with both engines as they are."""
    if not all(scene.fleet.alive(name) for name in scene.fleet.plan.engines):
        return False
    with anyio.move_on_after(BACK_WITHIN_S):
        try:
            prompt = await scene.prompt(200)
        except RuntimeError:
            return False
        for prefill, decode in scene.fleet.plan.ways:
            answer = await scene.fleet.dispatch(prompt, new_name(), prefill=prefill, decode=decode)
            if answer.tokens != (scene.expected[prompt],):
                return False
        return True
    return False


async def run_system(
    system: System, faults: list[str], runs: int, rows: Rows, model: Path, logs: Path
) -> None:
    """Each fault as often as is still due; a fleet that does not recover is replaced."""
    due = [
        (fault, number) for fault in faults for number in range(rows.runs(fault, system.name), runs)
    ]
    fleets = lost = 0
    while due:
        fleets += 1
        plan = FAULTS[due[0][0]].plan
        try:
            async with fleet(system, plan, model, logs / system.name / f"fleet-{fleets}") as found:
                while due and FAULTS[due[0][0]].plan is plan:
                    fault, number = due[0]
                    row = await one_vllm_run(found, fault, seed=1_000 * (1 + number) + len(due))
                    rows.add(row)
                    due.pop(0)
                    lost = 0
                    print(f"{system.name}: {fault}, run {number + 1}: {row}", file=sys.stderr)
                    if not row.recovered or row.leaked_blocks:
                        break
        except* ServerError as errors:
            # An engine could not be started, at first or again: a port was taken meanwhile, or the
            # machine is too busy. The run of the fault does not count.
            lost += 1
            why = errors.exceptions[0]
            print(f"{system.name}: {due[0][0]}: no fleet ({lost}): {why}", file=sys.stderr)
            if lost == FLEETS:
                raise


ALL_REFERENCE_FAULTS = {**REFERENCE_FAULTS, **MOMENT_FAULTS, **NETWORK_FAULTS}


def run_reference(lanes: list[str], faults: list[str], runs: int, rows: Rows) -> None:
    """Each fault as often as is still due, with engines that stay warm."""
    for lane in lanes:
        with Stage(lane) as stage:
            for fault in faults:
                why = impossible(fault)
                if why:
                    print(f"reference, {lane}: no {fault}: {why}", file=sys.stderr)
                    continue
                for number in range(rows.runs(fault, f"reference, {lane}"), runs):
                    row = one_run(stage, fault, number, ALL_REFERENCE_FAULTS)
                    rows.add(row)
                    print(f"{row.system}: {fault}, run {number + 1}: {row}", file=sys.stderr)


def main() -> int:
    """Run what is asked for; the status is 1 if any row of pushkv is not green."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix",
        description="Faults of engines, and what their clients get. Rows are kept in the file "
        "after every run, so a run can be taken up again.",
    )
    parser.add_argument(
        "engine",
        choices=["vllm", "reference"],
        help="real vLLM engines over pushkv and over vLLM's own connectors, or pushkv's reference "
        "engines over NIXL",
    )
    parser.add_argument(
        "--system", action="append", help="or lane of NIXL; all by default, but for libfabric"
    )
    parser.add_argument("--fault", action="append", help="all by default")
    parser.add_argument("--runs", type=int, help="of each fault (default: 3 or 20)")
    parser.add_argument("--json", type=Path, default=Path("faults.json"), help="where rows are")
    parser.add_argument(
        "--as-shipped",
        action="store_true",
        help="leave the peers' NIXL agents spinning, a core for each engine; by default they wait "
        "for events (tests.matrix.patience)",
    )
    parser.add_argument("--logs", type=Path, help="keep the logs of vLLM in this directory")
    options = parser.parse_args()
    is_vllm = options.engine == "vllm"
    known: list[str] = [*SYSTEMS] if is_vllm else [*LANES]
    faults: list[str] = [*FAULTS] if is_vllm else [*ALL_REFERENCE_FAULTS]
    for what, asked, there in (
        ("--system", options.system or known, known),
        ("--fault", options.fault or faults, faults),
    ):
        for each in asked:
            if each not in there:
                parser.error(f"{what} {each!r}: expected one of: " + "; ".join(there))
    rows = Rows(options.json)
    usual = [*SYSTEMS] if is_vllm else [*OVER_UCX]
    systems, faults = options.system or usual, options.fault or faults
    if is_vllm:
        found = [SYSTEMS[each] for each in systems]
        found = found if options.as_shipped else [patient(each) for each in found]
        run_vllm(found, faults, options.runs or 3, rows, options.logs)
    else:
        run_reference(systems, faults, options.runs or 20, rows)
        systems = [f"reference, {lane}" for lane in systems]
    show(rows.rows.values(), systems, Console())
    ours = [row for row in rows.rows.values() if row.system not in (PULL.name, PUSH.name)]
    return int(not all(row.is_green for row in ours))


def run_vllm(
    systems: list[System], faults: list[str], runs: int, rows: Rows, logs: Path | None
) -> None:
    """One system after the other, on the same tiny model."""
    with tempfile.TemporaryDirectory(prefix="pushkv-faults-") as scratch:
        model = write_tiny_model(Path(scratch, "model"))
        for system in systems:
            anyio.run(run_system, system, faults, runs, rows, model, logs or Path(scratch, "logs"))


if __name__ == "__main__":
    sys.exit(main())
