"""What was measured is folded, compared, written, read and drawn as it is."""

from __future__ import annotations

import array
import io
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress as Bars
from typer.testing import CliRunner

from pushkv.bench.bars import bars
from pushkv.bench.fleet import describe_fleet, require_memory
from pushkv.bench.meters import (
    Reading,
    available_gib,
    group_cpu_s,
    parse_metrics,
    read_hooks,
    summarise_transfers,
)
from pushkv.bench.page import page
from pushkv.bench.replay import Load, Settings
from pushkv.bench.results import (
    MODES,
    CellResult,
    Hooks,
    ModeResult,
    Percentiles,
    Results,
    percentiles,
    read_results,
    write_results,
)
from pushkv.bench.table import show
from pushkv.bench.workload import parse_cell, parse_lengths
from pushkv.cli.app import app
from pushkv.cli.bench import Teller
from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import TransferId
from pushkv.demo.engine_site.sitecustomize import DELAY, HOOKS
from pushkv.demo.supervise import Progress
from pushkv.observe.timeline import Timeline

METRICS = """# HELP vllm:request_queue_time_seconds Histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="tiny"} 4.0
vllm:request_queue_time_seconds_count{engine="0",model_name="tiny"} 4.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="tiny"} 0.5
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 12.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 900.0
vllm:nixl_xfer_time_seconds_count{engine="0"} 2.0
vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.25
"""


def mode(ttft_s: float, excess_s: float, *, hooks_s: float | None = 0.1) -> ModeResult:
    three = Percentiles(ttft_s, 2 * ttft_s, 3 * ttft_s, ttft_s)
    return ModeResult(
        n=4,
        failed=0,
        cancelled=1,
        failures={},
        ttft_s=three,
        tpot_s=Percentiles(0.01, 0.02, 0.03, 0.01),
        itl_s=three,
        excess_s=excess_s,
        ttft_each_s=[ttft_s, 2 * ttft_s, 3 * ttft_s],
        goodput_qps=0.5,
        good_share=1.0,
        duration_s=6.0,
        cpu_s=3.0,
        engines=2,
        cost_per_request=0.001,
        queue_s={"prefill": 0.01, "decode": 0.2},
        hooks=None if hooks_s is None else Hooks(10, hooks_s, hooks_s),
    )


def run(*, as_shipped: bool = False, pushkv: ModeResult | None = None, cells: int = 1) -> Results:
    modes = {
        "mono": mode(0.3, 0.0, hooks_s=None),
        "pull": mode(0.4, 0.1),
        "push": mode(0.5, 0.2),
        "push_sequential": mode(0.36, 0.06),
        "pushkv": pushkv or mode(0.35, 0.05, hooks_s=0.02),
    }
    cell = CellResult("1024 @ 0.6/s <&>, 768 shared", 1024, 0.8, 0, 32, 0.3, [0.3, 0.3], modes)
    configuration: dict[str, str | bool | list[str] | None] = {
        "as_shipped": as_shipped,
        "cells": ["512"],
        "price_per_engine_hour": None,
    }
    idle = {"mono": 0.01, "pull": 2.0, "push": 2.0, "push_sequential": 2.0, "pushkv": 0.05}
    return Results(configuration, {"cores": 2}, idle, [cell] * cells)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_lie_in_order_among_the_values(values: list[float]) -> None:
    found = percentiles(values)
    assert found is not None
    assert min(values) <= found.p50 <= found.p95 <= found.p99 <= max(values)
    assert percentiles(values[::-1]) == found


def test_percentiles_are_between_ranks() -> None:
    assert percentiles([4.0, 1.0, 2.0, 3.0, 5.0]) == Percentiles(3.0, 4.8, 4.96, 3.0)
    assert percentiles([]) is None


def test_what_is_written_has_the_schema_and_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write_results(run(), file)
    assert read_results(file) == run()
    (cell,) = json.loads(file.read_text())["cells"]
    assert {"prompt", "qps", "shared", "prefill_only_s", "modes"} <= set(cell)
    assert tuple(cell["modes"]) == MODES
    for each in cell["modes"].values():
        assert {"ttft_s", "tpot_s", "failed", "n"} <= set(each)
        assert {"p50", "p95", "p99"} <= set(each["ttft_s"]) & set(each["tpot_s"])


@pytest.mark.parametrize("text", ["", "{}", '{"cells": 3}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"other\.json"):
        read_results(file)


def test_the_bars_compare_excess_and_not_ttft() -> None:
    found = {(one.figure, one.other): one for one in bars(run())}
    excess = found["TTFT less prefill", "push"]
    assert excess.value == pytest.approx(0.25)
    assert excess.met
    assert found["TTFT less prefill", "push_sequential"].value == pytest.approx(5 / 6)
    pull = found["TTFT less prefill", "pull"]
    assert pull.value == pytest.approx(0.5)
    assert found["CPU in hooks per request", "pull"].value == pytest.approx(0.2)
    assert found["TPOT", "push"].value == 1.0
    assert not any(one.cell == "idle" for one in found.values())


def test_a_bar_that_is_missed_is_said_to_be() -> None:
    found = {(one.figure, one.other): one for one in bars(run(pushkv=mode(0.5, 0.2)))}
    assert not found["TTFT less prefill", "push"].met
    assert not found["CPU in hooks per request", "push"].met


def test_a_negative_excess_is_noise_and_no_success() -> None:
    found = {(one.figure, one.other): one for one in bars(run(pushkv=mode(0.2, -0.1)))}
    excess = found["TTFT less prefill", "push"]
    assert (excess.verdict, excess.met) == ("noise", False)
    assert found["TPOT", "push"].verdict == "met"


def test_idle_cpu_is_compared_where_others_are_as_shipped() -> None:
    idle = [one for one in bars(run(as_shipped=True)) if one.cell == "idle"]
    assert [(one.other, one.met) for one in idle] == [("push", True), ("pull", True)]
    assert idle[0].value == pytest.approx(0.025)


def test_a_mode_that_completed_nothing_is_shown_and_not_compared() -> None:
    broken = evolve(
        mode(1, 1), failed=4, cancelled=0, ttft_s=None, tpot_s=None, itl_s=None, excess_s=None,
        ttft_each_s=[], failures={"prefill answered 500": 4},
    )  # fmt: skip
    results = run(pushkv=broken)
    assert {one.figure for one in bars(results)} == {"CPU in hooks per request"}
    parse(page(results))
    console = Console(width=200, record=True, file=io.StringIO())
    show(results, console)
    assert "pushkv" in console.export_text()


def parse(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text.partition("\n")[2])


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    text = page(run())
    root = parse(text)
    assert text.startswith("<!DOCTYPE html>")
    tags = {each.tag.rpartition("}")[2] for each in root.iter()}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    plots = [each for each in root.iter() if each.tag.endswith("}svg")]
    assert len(plots) == 3
    assert "1024 @ 0.6/s <&>" in {each.text for each in root.iter()}


def test_everything_drawn_is_inside_its_plot() -> None:
    root = parse(page(run(pushkv=mode(0.2, -0.1))))
    rectangles = 0
    for plot in (each for each in root.iter() if each.tag.endswith("}svg")):
        _, _, width, height = map(float, plot.attrib["viewBox"].split())
        for each in plot.iter():
            if each.tag.endswith("}rect"):
                left, top = float(each.attrib["x"]), float(each.attrib["y"])
                assert 0 <= left <= left + float(each.attrib["width"]) <= width
                assert 0 <= top <= top + float(each.attrib["height"]) <= height
                rectangles += 1
            for point in each.attrib.get("points", "").split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= width
                assert 0 <= y <= height
    assert rectangles == 4 + 4 + 5 + 5 + 5  # bars and keys of two plots, keys of the third


def test_labels_do_not_run_into_each_other() -> None:
    plot = next(each for each in parse(page(run(cells=7))).iter() if each.tag.endswith("}svg"))
    by_line: dict[str, list[tuple[float, float]]] = {}
    for each in plot.iter():
        if each.tag.endswith("}text") and each.attrib.get("text-anchor") != "end":
            left, width = float(each.attrib["x"]), 6.0 * len(each.text or "")
            if each.attrib.get("text-anchor") == "middle":
                left -= width / 2
            by_line.setdefault(each.attrib["y"], []).append((left, left + width))
    assert len(by_line) > 2
    for spans in by_line.values():
        for (_, right), (left, _) in pairwise(sorted(spans)):
            assert right < left


def test_a_run_is_shown_again(tmp_path: Path) -> None:
    write_results(run(), tmp_path / "run.json")
    asked = ["bench", "--from", str(tmp_path / "run.json"), "--html", str(tmp_path / "run.html")]
    ran = CliRunner().invoke(app, asked, env={"NO_COLOR": "1", "COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    assert "met" in ran.output
    assert "\x1b[3" not in ran.output
    assert (tmp_path / "run.html").read_text() == page(run())


def test_failed_requests_are_an_exit_code(tmp_path: Path) -> None:
    write_results(run(pushkv=evolve(mode(1, 1), failed=1)), tmp_path / "run.json")
    assert CliRunner().invoke(app, ["bench", "--from", str(tmp_path / "run.json")]).exit_code == 1


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--cell", "x"], "lengths = 'x'"),
        (["--cell", "5@x"], "cell = '5@x': expected PROMPT[@QPS][+SHARED]"),
        (["--mode", "mono,shove"], "modes = 'shove'"),
        (["--trace", "nowhere"], "nowhere"),
        (["--round-s", "0"], "round_s = 0"),
    ],
)
def test_a_wrong_option_is_refused_by_name(option: list[str], said: str) -> None:
    ran = CliRunner().invoke(app, ["bench", *option], env={"COLUMNS": "200"})
    assert ran.exit_code == 2
    assert said in ran.output


def test_progress_that_nobody_watches_is_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Bars(console=Console(file=io.StringIO())) as shown:
        teller = Teller(shown)
        for ready in (False, False, True):
            for name in ("one", "two"):
                teller.starting(Progress(name, 1.0, ready, ""))
        teller.tell("128: push", 0, 2)
        teller.tell("128: pushkv", 1, 2)
    assert capsys.readouterr().err.splitlines() == [
        "starting: one 0/1",
        "starting: two 0/1",
        "starting: one 1/1",
        "starting: two 1/1",
        "128: push 0/2",
        "128: pushkv 1/2",
    ]


# -- meters


def test_totals_are_read_from_metrics() -> None:
    assert parse_metrics(METRICS) == {
        "queued": 4.0,
        "queued_s": 0.5,
        "moved": 2.0,
        "moved_s": 0.25,
        "computed": 12.0,
    }


def test_readings_subtract_and_add() -> None:
    one = Reading(3.0, Hooks(5, 2.0, 1.0), {"queued": 4.0})
    two = Reading(4.5, Hooks(9, 2.5, 1.25), {"queued": 7.0})
    assert two.since(one) == Reading(1.5, Hooks(4, 0.5, 0.25), {"queued": 3.0})
    assert two.since(one).plus(one) == two


def test_hook_times_are_read(tmp_path: Path) -> None:
    file = tmp_path / "hooks"
    assert read_hooks(file) == read_hooks(None) == Hooks(0, 0.0, 0.0)
    totals = array.array("Q", [0] * 3 * len(HOOKS))
    totals[0:3] = array.array("Q", [2, 3_000_000_000, 1_000_000_000])
    totals[-3:] = array.array("Q", [1, 500_000_000, 0])
    file.write_bytes(totals.tobytes())
    assert read_hooks(file) == Hooks(3, 3.5, 1.0)


def test_cpu_of_a_process_group_is_that_of_its_processes() -> None:
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 0.25 < group_cpu_s(child.pid) < 30
        child.kill()
    assert group_cpu_s(child.pid) == 0


def test_transfers_are_summarised_from_traces() -> None:
    def line(
        registered: int, prefilled: int, began: int, written: int, delivered: int | None
    ) -> Timeline:
        ns = 1_000_000_000
        done = None if delivered is None else delivered * ns
        return Timeline(registered * ns, prefilled * ns, began * ns, written * ns, done)

    found = summarise_transfers(
        {
            TransferId("early"): line(1, 4, 2, 6, 7),
            TransferId("late"): line(5, 4, 5, 6, 9),
            TransferId("lost"): line(1, 2, 3, 4, None),
            TransferId("warm-up"): line(1, 2, 3, 4, 90),
        },
        ["early", "late", "lost"],
    )
    assert found is not None
    assert (found.n, found.early_share) == (2, 0.5)
    assert found.write_s.mean == 2.5
    assert found.exposed_s.mean == 4.0
    assert found.hidden_s.mean == 1.0
    assert summarise_transfers({}, ["x"]) is None


# -- what is started


def test_a_pair_serves_both_ways_of_pushing(tmp_path: Path) -> None:
    fleet = describe_fleet(MODES, tmp_path, tmp_path)
    assert len(fleet.specs) == 7
    assert fleet.pairs["push"] is not fleet.pairs["pull"]
    assert fleet.pairs["push"] == fleet.pairs["push_sequential"]
    assert len({spec.port for spec in fleet.specs}) == 7
    slowed = [spec.name for spec in fleet.specs if DELAY in spec.environment]
    assert slowed == [
        f"{role}-{name}"
        for name in ("NixlConnector", "NixlPushConnector")
        for role in ("prefill", "decode")
    ]
    shipped = describe_fleet(MODES, tmp_path, tmp_path, as_shipped=True)
    assert not any(DELAY in spec.environment for spec in shipped.specs)


def test_modes_that_are_not_asked_for_are_not_started(tmp_path: Path) -> None:
    names = [spec.name for spec in describe_fleet(["pushkv"], tmp_path, tmp_path).specs]
    assert names == ["mono", "prefill-pushkv", "decode-pushkv"]


def test_more_engines_than_memory_are_refused() -> None:
    require_memory(7, 1, 13.4)
    with pytest.raises(ConfigurationError, match=r"7 engines.*need 13\.3 GiB, and 13\.2 GiB"):
        require_memory(7, 1, 13.2)
    with pytest.raises(ConfigurationError, match=r"need 20\.3 GiB"):
        require_memory(7, 2, 13.4)
    assert 0.01 < available_gib() < 100_000


def test_all_modes_of_a_cell_get_the_same_requests() -> None:
    settings = Settings([Load(parse_cell("512@2", parse_lengths("8"), 0.5))], rounds=3, round_s=10)
    rounds = settings.rounds_of(0)
    assert [len(each) for each in rounds] == [20, 20, 20]
    assert rounds == settings.rounds_of(0)
    assert rounds != evolve(settings, seed=9).rounds_of(0)
    left = sum(each.leaves_after is not None for part in rounds for each in part)
    assert 15 < left < 45
