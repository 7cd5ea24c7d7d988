"""`pushkv doctor` says what works, and what does not it calls so."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from typer.testing import CliRunner

from pushkv.cli.app import app
from pushkv.core.ids import seconds
from pushkv.core.policy import Policy
from pushkv.doctor import Finding, Verdict, machine, worst
from pushkv.doctor.engine import options, times
from pushkv.doctor.transports import lanes_of, tried

LOGGED = """
[17.8] [vm:1:0]  parser.c:2587 UCX  INFO  UCX_* env variables: UCX_LOG_LEVEL=info
[17.8] [vm:1:0]  ucp_worker.c:1997 UCX  INFO    a self cfg#0 rma_am(tcp/lo)  am(cma/memory)
[17.8] [vm:1:0]  ucp_worker.c:1997 UCX  INFO    a inter-node cfg#1 rma(rc_mlx5/mlx5_0:1) ka(tcp/lo)
"""


def ran(tmp_path: Path, config: object) -> tuple[int, dict[str, Finding]]:
    """Exit code and findings of the command, over an engine's configuration."""
    given, out = tmp_path / "config.json", tmp_path / "findings.json"
    given.write_text(json.dumps(config))
    arguments = ["doctor", "--no-vllm", "--config", str(given), "--json", str(out)]
    code = CliRunner().invoke(app, arguments).exit_code
    found: dict[str, Any] = json.loads(out.read_text())
    listed = (
        evolve(Finding(**each), verdict=Verdict(each["verdict"])) for each in found["findings"]
    )
    findings = {each.subject: each for each in listed}
    assert found["verdict"] == worst(findings.values())
    return code, findings


@pytest.mark.nixl
def test_bytes_go_from_one_process_to_another_over_the_fabric_that_is_set(tmp_path: Path) -> None:
    extra = {"transport_options": {"backend": "UCX", "fabric": "tcp"}, "lease_s": 5}
    code, found = ran(tmp_path, {"kv_connector": "x", "kv_connector_extra_config": extra})
    assert found["nixl UCX"].verdict is Verdict.OK
    assert "tcp/" in found["nixl UCX"].seen
    assert "cma" not in found["nixl UCX"].seen
    assert "nixl UCX, shared memory" not in found
    assert found["options"].verdict is Verdict.OK
    assert code == int(worst(found.values()) in (Verdict.WARNING, Verdict.FAILURE))


@pytest.mark.nixl
def test_shared_memory_that_no_cut_network_stops_is_named() -> None:
    found = {each.subject: each for each in tried("x", "nixl", {"backend": "UCX"}, is_main=True)}
    assert found["x, shared memory"].verdict is Verdict.NOTE
    assert "no cut network" in found["x, shared memory"].seen


@pytest.mark.nixl
@pytest.mark.skipif(bool(machine.drivers()), reason="this host has RDMA devices")
def test_a_fabric_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    code, found = ran(tmp_path, {"transport_options": {"fabric": "rdma"}})
    assert found["nixl UCX"].verdict is Verdict.FAILURE
    assert found["nixl UCX"].remedy
    assert code == 1


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"transport": 1}'])
def test_a_configuration_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    given = tmp_path / "config.json"
    given.write_text(text)
    result = CliRunner().invoke(app, ["doctor", "--no-vllm", "--config", str(given)])
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_the_lanes_between_processes_are_read_from_the_log_of_ucx() -> None:
    assert lanes_of([LOGGED, LOGGED]) == "rc_mlx5/mlx5_0:1, tcp/lo"
    assert lanes_of([]) == ""


def test_a_wrong_option_is_a_failure_that_names_it() -> None:
    (found,) = options({"laese_s": 3})
    assert found.verdict is Verdict.FAILURE
    assert "laese_s" in found.seen
    assert "lease_s" in found.seen


def test_times_that_do_not_fit_into_each_other_are_warned_of() -> None:
    assert [each.verdict for each in times(Policy())] == [Verdict.OK]
    (found,) = times(evolve(Policy(), lease=seconds(40)))
    assert (found.subject, found.verdict) == ("lease_s", Verdict.WARNING)
    assert "40 s" in found.seen
    assert "waiting_s" in found.seen


def test_a_port_that_is_taken_is_warned_of() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = {each.subject: each for each in options({"port": port})}
    assert found["port"].verdict is Verdict.WARNING
    assert str(port) in found["port"].seen
    found = {each.subject: each for each in options({"port": port})}
    assert found["port"].verdict is Verdict.OK


def test_the_worst_finding_counts() -> None:
    found = [Finding("a", verdict, "") for verdict in (Verdict.NOTE, Verdict.WARNING, Verdict.OK)]
    assert worst(found) is Verdict.WARNING
    assert worst([]) is Verdict.SKIPPED
