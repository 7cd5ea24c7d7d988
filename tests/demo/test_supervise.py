"""Servers as real child processes: they start, die, hang, and never outlive their parent."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import httpx
import pytest

from pushkv.core.errors import ConfigurationError
from pushkv.demo.engines import vllm_server
from pushkv.demo.supervise import (
    LOWEST_PORT,
    Progress,
    ServerError,
    ServerSpec,
    free_ports,
    run_servers,
)

WAIT_S = 20.0

SERVER = """
import http.server, subprocess, sys, time
port, mode = int(sys.argv[1]), sys.argv[2]
print("loading", flush=True)
if mode == "fails":
    sys.exit("no such model\\nsecond line")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if mode == "hangs":
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            print("out of memory", flush=True)
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *arguments):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

PARENT = """
import sys, anyio
from pathlib import Path
from pushkv.demo.supervise import run_servers
from tests.demo.test_supervise import fake
async def main():
    specs = [fake("a"), fake("b", sys.argv[2])]
    print(" ".join(str(spec.port) for spec in specs), flush=True)
    async with run_servers(specs, Path(sys.argv[1])):
        print("ready", flush=True)
        await anyio.sleep(600)
anyio.run(main)
"""


def fake(name: str, mode: str = "serves", start_timeout_s: float = 60.0) -> ServerSpec:
    port = free_ports(1)[0]
    command = [sys.executable, "-c", SERVER, str(port), mode]
    return ServerSpec(name=name, command=command, port=port, start_timeout_s=start_timeout_s)


def processes_with(argument: str) -> list[int]:
    """Ids of living processes with this argument; a zombie has none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def members(group: int) -> list[int]:
    """Ids of the processes of a group, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(process_group) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.asyncio
async def test_servers_run_in_the_body_and_are_gone_after_it(tmp_path: Path) -> None:
    news: list[Progress] = []
    async with run_servers([fake("a"), fake("b")], tmp_path, news.append) as servers:
        assert list(servers) == ["a", "b"]
        async with httpx.AsyncClient() as client:
            for server in servers.values():
                assert (await client.get(server.url)).status_code == 200
        groups = [server.group for server in servers.values()]
        assert [len(members(group)) for group in groups] == [2, 2]  # itself and its child
    assert [members(group) for group in groups] == [[], []]
    assert sorted(each.name for each in news if each.ready) == ["a", "b"]
    assert any(each.last_line == "loading" for each in news)
    assert (tmp_path / "a.log").read_text() == "loading\n"


@pytest.mark.asyncio
async def test_a_server_that_fails_to_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ServerError) as caught:
        async with run_servers([fake("a"), fake("b", "fails")], tmp_path):
            pytest.fail("the body ran")
    assert "b died while starting (exit status 1)" in str(caught.value)
    assert "no such model\n    second line" in str(caught.value)
    assert str(tmp_path / "b.log") in str(caught.value)


@pytest.mark.asyncio
async def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    spec = fake("slow", "hangs", start_timeout_s=0.5)
    with pytest.raises(ServerError, match=r"slow did not answer .* within 0.5 s"):
        async with run_servers([spec], tmp_path):
            pytest.fail("the body ran")
    assert processes_with(str(spec.port)) == []


@pytest.mark.asyncio
async def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    spec = ServerSpec("none", ["/no/such/program"], free_ports(1)[0])
    with pytest.raises(ServerError, match=r"none could not be started: /no/such/program"):
        async with run_servers([spec], tmp_path):
            pytest.fail("the body ran")


@pytest.mark.asyncio
async def test_the_death_of_a_server_cancels_the_body(tmp_path: Path) -> None:
    groups: list[int] = []

    async def body() -> None:
        async with run_servers([fake("a"), fake("b")], tmp_path) as servers:
            groups.extend(server.group for server in servers.values())
            os.kill(servers["b"].group, signal.SIGKILL)
            await anyio.sleep_forever()

    with pytest.raises(ServerError, match=r"b died \(killed by SIGKILL\)"):
        await asyncio.wait_for(body(), WAIT_S)
    assert [members(group) for group in groups] == [[], []]


@pytest.mark.asyncio
async def test_an_error_of_the_body_comes_out_as_it_is(tmp_path: Path) -> None:
    error = ValueError("mine")
    groups: list[int] = []

    async def body() -> None:
        async with run_servers([fake("a")], tmp_path) as servers:
            groups.append(servers["a"].group)
            raise error

    with pytest.raises(ValueError, match="mine") as caught:
        await body()
    assert caught.value is error
    assert members(groups[0]) == []


@pytest.mark.asyncio
async def test_an_error_that_a_servers_death_caused_gives_way_to_it(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="out of memory") as caught:
        async with run_servers([fake("a")], tmp_path) as servers, httpx.AsyncClient() as client:
            await client.get(servers["a"].url + "/die")
    # Whoever noticed first: the client, or whoever watches the server.
    assert isinstance(caught.value.__cause__, httpx.TransportError | None)


@pytest.mark.parametrize("mode", ["serves", "hangs"], ids=["running", "starting"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_parent(tmp_path: Path, how: signal.Signals, mode: str) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        text=True,
    ) as parent:
        try:
            assert parent.stdout is not None
            ports = parent.stdout.readline().split()
            if mode == "serves":
                assert parent.stdout.readline() == "ready\n"
            started = wait_for_servers(ports)
            if how in (signal.SIGINT, signal.SIGHUP):
                os.killpg(parent.pid, how)  # as a terminal does
            else:
                parent.send_signal(how)
            parent.wait(WAIT_S)
        finally:
            parent.kill()  # one that heard nothing would hold up this test, and fail a later one
    deadline = time.monotonic() + WAIT_S
    while left := [pid for group in started for pid in members(group)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    assert [processes_with(port) for port in ports] == [[], []]


@pytest.mark.asyncio
async def test_a_polite_signal_to_the_guard_leaves_it_on_guard(tmp_path: Path) -> None:
    async with run_servers([fake("a")], tmp_path) as servers:
        group = servers["a"].group
        status = Path(f"/proc/{group}/status").read_text()
        guard = int(status.partition("PPid:")[2].split()[0])
        os.kill(guard, signal.SIGTERM)
        async with httpx.AsyncClient() as client:
            assert (await client.get(servers["a"].url)).status_code == 200
    assert members(group) == []


def wait_for_servers(ports: Sequence[str]) -> list[int]:
    """The process groups of two servers, once each has its child."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        groups = {
            os.getpgid(pid) for port in ports for pid in processes_with(port) if is_server(pid)
        }
        if len(groups) == 2 and all(len(members(group)) == 2 for group in groups):
            return list(groups)
        time.sleep(0.01)
    pytest.fail("the servers did not start")


def is_server(pid: int) -> bool:
    """Whether it is a server, not the guard, which has the server's arguments among its own."""
    try:
        return b"guard.py" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.asyncio
@pytest.mark.parametrize("field", ["name", "port"])
async def test_servers_must_differ(tmp_path: Path, field: str) -> None:
    first = ServerSpec("a", ["true"], 1)
    second = ServerSpec("a", ["true"], 2) if field == "name" else ServerSpec("b", ["true"], 1)
    with pytest.raises(ConfigurationError) as caught:
        async with run_servers([first, second], tmp_path):
            pytest.fail("the body ran")
    assert caught.value.field == field


def test_free_ports_differ_and_no_outgoing_connection_gets_one() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert max(ports) < max(first, 32_768)


def test_a_port_that_was_given_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server may take a while to bind it, and then another would wait at its door."""
    (first,) = free_ports(1)
    draw = secrets.randbelow
    same = iter([first - LOWEST_PORT] * 3)
    monkeypatch.setattr(secrets, "randbelow", lambda most: next(same, None) or draw(most))
    assert free_ports(1) != [first]


def test_a_vllm_server_takes_its_core_and_its_transfer_configuration(tmp_path: Path) -> None:
    spec = vllm_server(
        "decode",
        tmp_path,
        1,
        {"kv_connector": "PushKVConnector", "kv_role": "kv_consumer"},
        port=8123,
        kv_cache_gib=2,
        arguments=["--num-gpu-blocks-override", "64"],
        environment={"VLLM_HOST_IP": "127.0.0.2"},
    )
    options = dict(zip(spec.command, spec.command[1:], strict=False))
    assert spec.port == 8123
    assert options["--port"] == "8123"
    assert options["--model"] == str(tmp_path)
    assert options["--num-gpu-blocks-override"] == "64"
    assert options["--kv-transfer-config"] == (
        '{"kv_connector": "PushKVConnector", "kv_role": "kv_consumer"}'
    )
    assert spec.environment["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert spec.environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert spec.environment["VLLM_HOST_IP"] == "127.0.0.2"


def test_a_monolithic_vllm_server_has_no_transfer_configuration(tmp_path: Path) -> None:
    assert "--kv-transfer-config" not in vllm_server("monolithic", tmp_path, 0).command


def test_wrong_settings_of_a_vllm_server_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="core = -1"):
        vllm_server("a", tmp_path, -1)
    with pytest.raises(ConfigurationError, match="kv_transfer_config"):
        vllm_server("a", tmp_path, 0, {"kv_role": object()})
