"""Each end in a process of its own."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from pickle import PicklingError
from traceback import format_exc
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from pushkv.core.errors import ConfigurationError, TransportError
from pushkv.core.ids import Worker
from pushkv.transport import Transport

from .end import LARGE_BYTES, Bytes, End, memory_bytes
from .ends import EndHandle

__all__ = ["ProcessEnds"]

P = ParamSpec("P")
R = TypeVar("R")

_FIRST_ADDRESS = 0x2000_0000_0000
_ADDRESS_STEP = 1 << 32
_ANSWER_S = 60.0
_END_S = 10.0


class RemoteError(TransportError):
    """What was raised in the other process; the message holds its name and text."""


def _map(descriptor: int, wanted: int, size: int) -> int:
    """Map shared memory, at `wanted` if that is free; returns the address."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_size_t
    library.mmap.argtypes = [
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = int(library.mmap(wanted, size, access, mmap.MAP_SHARED, descriptor, 0))
    if address == ctypes.c_size_t(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address


def _serve(
    connection: Connection,
    worker: Worker,
    wanted: int,
    large_bytes: int,
    environment: Mapping[str, str],
) -> None:
    """The process of one end."""
    os.environ.update(environment)
    factory: Callable[[], Transport] = connection.recv()  # only now: it may load libraries
    descriptor = recv_handle(connection)
    size = memory_bytes(large_bytes)
    address = _map(descriptor, wanted, size)
    os.close(descriptor)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    try:
        end = End(factory, worker, memory, address, large_bytes)
    except Exception as error:  # noqa: BLE001 - told to the checks
        connection.send((False, (repr(error), format_exc())))
        return
    connection.send((True, address))
    while True:
        try:
            function, args, kwargs = connection.recv()
        except (EOFError, ConnectionResetError):
            end.close()
            return
        try:
            answer: tuple[bool, object] = True, function(end, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - told to the checks
            answer = False, (repr(error), format_exc())
        connection.send(answer)


class ProcessHandle:
    """An end in another process, reached through a pipe. Its memory is shared with this one."""

    def __init__(
        self,
        factory: Callable[[], Transport],
        worker: Worker,
        wanted: int,
        large_bytes: int,
        environment: Mapping[str, str],
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.worker = worker
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, worker, wanted, large_bytes, environment), daemon=True
        )
        self._process.start()
        theirs.close()
        descriptor = os.memfd_create("pushkv-conformance")
        try:
            size = memory_bytes(large_bytes)
            os.ftruncate(descriptor, size)
            self._connection.send(factory)
            send_handle(self._connection, descriptor, self._process.pid)
            self.memory: Bytes = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        finally:
            os.close(descriptor)
        self._address: int | None = None

    @property
    def address(self) -> int:
        """Where the memory begins there; waits for the process to begin."""
        if self._address is None:
            address = self._answer("start")
            assert isinstance(address, int)
            self._address = address
        return self._address

    def begin(
        self, function: Callable[Concatenate[End, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], R]:
        """Call `function` in the process."""
        assert self.address
        self._connection.send((function, args, kwargs))
        return lambda: self._answer(function.__name__)  # type: ignore[return-value]

    def run(
        self, function: Callable[Concatenate[End, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call `function` in the process and wait."""
        return self.begin(function, *args, **kwargs)()

    def crash(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join(_END_S)

    def pause(self) -> None:
        """Stop the process."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process in good order, or else kill it."""
        self._connection.close()
        if self._process.is_alive():
            self.resume()
        self._process.join(_END_S)
        if self._process.is_alive():
            self.crash()
        self._process.close()

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _answer(self, name: str) -> object:
        try:
            if not self._connection.poll(_ANSWER_S):
                raise RemoteError(f"{name} of {self.worker} did not return in {_ANSWER_S} s")
            fine, answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_END_S)
            raise RemoteError(
                f"the process of {self.worker} ended during {name}, exit code "
                f"{self._process.exitcode}"
            ) from None
        if not fine:
            what, trace = answer
            error = RemoteError(f"{name} of {self.worker} raised {what}")
            error.add_note(trace)
            raise error
        return answer


class ProcessEnds:
    """Ends in processes of their own, started by spawning; on Linux.

    Args:
        factory: Makes a transport that is not started. It must be something that other processes
            can import by name: a class, a function of a module, a `functools.partial` of either.
        environment: Set there before anything of the transport is loaded.
        large_bytes: Length of the larger region of each end's memory, at least 2 MiB.

    Raises:
        ConfigurationError: The factory cannot be imported by name.
    """

    can_crash = True
    can_pause = True

    def __init__(
        self,
        factory: Callable[[], Transport],
        environment: Mapping[str, str] | None = None,
        large_bytes: int = LARGE_BYTES,
    ) -> None:
        try:
            ForkingPickler.dumps(factory)
        except (AttributeError, PicklingError, TypeError) as error:
            raise ConfigurationError(
                "factory", factory, "something that can be imported by name, not a lambda"
            ) from error
        self.large_bytes = large_bytes
        self._factory = factory
        self._environment = dict(environment or {})
        self._handles: list[ProcessHandle] = []

    def open(self, worker: Worker, predecessor: EndHandle | None = None) -> EndHandle:
        """Begin a process. Does not wait for it; the first call of the handle does."""
        wanted = _FIRST_ADDRESS + _ADDRESS_STEP * len(self._handles)
        if predecessor is not None:
            wanted = predecessor.address
        handle = ProcessHandle(self._factory, worker, wanted, self.large_bytes, self._environment)
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        """End every process, the last one first."""
        while self._handles:
            self._handles.pop().close()
