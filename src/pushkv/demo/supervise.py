"""Starts servers as child processes, waits until they answer, and leaves none behind.

Every server runs under a guard (`guard.py`) that kills its whole process group when this process
ends, by whatever means. While the servers run they are watched: if one dies, the body of
`run_servers` is cancelled and `ServerError` says which and why, with the end of its log.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic

import anyio
import anyio.to_thread
import httpx
from attrs import Factory, frozen

from pushkv.core.errors import ConfigurationError, PushKVError

from . import guard

__all__ = [
    "Launched",
    "Progress",
    "Server",
    "ServerError",
    "ServerSpec",
    "free_ports",
    "launched",
    "run_servers",
    "until_ready",
]

LOG_TAIL_LINES = 20
POLL_S = 0.1
HEALTH_TIMEOUT_S = 5.0
BETTER_ERROR_S = 2.0
LOWEST_PORT, HIGHEST_PORT = 10_000, 32_768
"""Of servers: Linux gives outgoing connections 32,768 and up, unless told otherwise."""


class ServerError(PushKVError):
    """A server did not start, or died. The message ends with the last lines of its log."""

    def __init__(self, name: str, what: str, log_path: Path) -> None:
        tail = "\n".join(f"    {line}" for line in _last_lines(log_path, LOG_TAIL_LINES))
        super().__init__(f"{name} {what}; the end of {log_path}:\n{tail or '    (empty)'}")
        self.name = name
        self.log_path = log_path


@frozen
class ServerSpec:
    """How to start one server.

    Attributes:
        name: Short and unique; names the log file.
        command: Program and arguments.
        port: Where it will listen, on 127.0.0.1.
        environment: Added to this process's own.
        health_path: Answers with 200 once the server is ready.
        start_timeout_s: How long it may take until then, in seconds.
    """

    name: str
    command: Sequence[str]
    port: int
    environment: Mapping[str, str] = Factory(dict)
    health_path: str = "/health"
    start_timeout_s: float = 300.0


@frozen
class Server:
    """A running server.

    Attributes:
        name: As in its specification.
        url: Where it listens, without a trailing slash.
        group: Its process group, which is the process id of the command.
        log_path: Both of its output streams.
        started_s: How long it took to become ready, in seconds.
    """

    name: str
    url: str
    group: int
    log_path: Path
    started_s: float


@frozen
class Progress:
    """News of a server that is starting.

    Attributes:
        name: As in its specification.
        elapsed_s: Since it was launched, in seconds.
        ready: Whether it now answers.
        last_line: The last line of its log.
    """

    name: str
    elapsed_s: float
    ready: bool
    last_line: str


_given: deque[int] = deque(maxlen=1_024)


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports of 127.0.0.1 that were free a moment ago.

    All are held until all are known, so they differ, also from those given last: a server may not
    have taken its port yet when the next one's are looked for. They lie below those that the kernel
    gives to outgoing connections, or a server that takes a minute to start would find its port
    taken by one. Another process may still take one before it is used; whoever binds it then fails
    with "address in use".
    """
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = LOWEST_PORT + secrets.randbelow(HIGHEST_PORT - LOWEST_PORT)
            if port in _given:
                continue
            candidate = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                candidate.bind(("127.0.0.1", port))
                found.append(port)
        _given.extend(found)
        return found


@asynccontextmanager
async def run_servers(
    specs: Sequence[ServerSpec],
    log_directory: Path,
    on_progress: Callable[[Progress], None] | None = None,
) -> AsyncIterator[dict[str, Server]]:
    """Start all of `specs` at once, yield them by name when all answer, kill them at the end.

    At once, because that is the quickest even where there are fewer cores than servers: three vLLM
    servers on two cores took 46 s together, 53 s with two starting at a time, 58 s in turn.

    Args:
        specs: What to start.
        log_directory: Gets one ``NAME.log`` each; created if missing.
        on_progress: Called in the event loop about ten times a second for each starting server, and
            once when it is ready.

    Raises:
        ServerError: One did not start in time or died, before or during the body. The body is
            cancelled then.
        ConfigurationError: Two servers share a name or a port.
    """
    _require_different("name", [spec.name for spec in specs])
    _require_different("port", [spec.port for spec in specs])
    error: Exception | None = None
    servers: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:
        # Errors leave through a variable: a task group would wrap even the body's own in a group.
        async with anyio.create_task_group() as tasks:
            all_ready = anyio.Event()

            async def supervise(spec: ServerSpec) -> None:
                nonlocal error
                try:
                    child = stack.enter_context(launched(spec, log_directory))
                    servers[spec.name] = await until_ready(spec, child, on_progress)
                    if len(servers) == len(specs):
                        all_ready.set()
                    await child.end()
                    raise ServerError(spec.name, f"died ({child.fate()})", child.log_path)
                except (ServerError, OSError) as reason:
                    reason.__cause__ = reason.__cause__ or error
                    error = reason
                    tasks.cancel_scope.cancel()

            for spec in specs:
                tasks.start_soon(supervise, spec)
            try:
                if specs:
                    await all_ready.wait()
                yield {spec.name: servers[spec.name] for spec in specs}
            except Exception as reason:  # noqa: BLE001 - raised again below, outside the group
                error = reason
                if isinstance(reason, httpx.HTTPError | OSError):
                    # Often the first sign of a server's death; the better error cancels this wait.
                    await anyio.sleep(BETTER_ERROR_S)
            tasks.cancel_scope.cancel()
    if error is not None:
        raise error


class Launched:
    """The guard of one server, seen from here; `group` is the server's process group."""

    def __init__(self, process: subprocess.Popen[bytes], group: int, log_path: Path) -> None:
        self.process = process
        self.group = group
        self.log_path = log_path

    def alive(self) -> bool:
        """Whether the server has not ended."""
        return self.process.poll() is None

    async def end(self) -> None:
        """Wait until it is dead. The thread of a cancelled call ends with the process."""
        await anyio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)

    def fate(self) -> str:
        """How it ended, in words."""
        status = self.process.poll()
        if status is not None and status > 128:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(status - 128).name}"
        return f"exit status {status}"


@contextmanager
def launched(spec: ServerSpec, log_directory: Path) -> Iterator[Launched]:
    """The server of `spec` as a guarded child, killed on exit with everything it started."""
    log_directory.mkdir(parents=True, exist_ok=True)
    log_path = log_directory / f"{spec.name}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, *spec.command],
            env={**os.environ, **spec.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # what a terminal sends its group stays away from the guard
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        group = process.stdout.readline().strip()
        if not group:
            process.wait()
            raise ServerError(spec.name, f"could not be started: {spec.command[0]}", log_path)
        yield Launched(process, int(group), log_path)
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


async def until_ready(
    spec: ServerSpec, launched: Launched, on_progress: Callable[[Progress], None] | None
) -> Server:
    """The server once it answers.

    Raises:
        ServerError: It did not in time, or died.
    """
    url = f"http://127.0.0.1:{spec.port}"
    start = monotonic()
    async with httpx.AsyncClient(timeout=HEALTH_TIMEOUT_S, trust_env=False) as client:
        while True:
            elapsed_s = monotonic() - start
            if not launched.alive():
                what = f"died while starting ({launched.fate()})"
                raise ServerError(spec.name, what, launched.log_path)
            if elapsed_s > spec.start_timeout_s:
                what = f"did not answer {url}{spec.health_path} within {spec.start_timeout_s:g} s"
                raise ServerError(spec.name, what, launched.log_path)
            try:
                ready = (await client.get(url + spec.health_path)).status_code == 200
            except httpx.TransportError:
                ready = False
            if on_progress is not None:
                last = _last_lines(launched.log_path, 1)
                on_progress(Progress(spec.name, elapsed_s, ready, last[0] if last else ""))
            if ready:
                return Server(spec.name, url, launched.group, launched.log_path, elapsed_s)
            await anyio.sleep(POLL_S)


def _last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of `path` that are not blank; looks at its last 16 KiB only."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16_384))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def _require_different(what: str, values: Sequence[object]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ConfigurationError(what, value, "a different one for each server")
