"""NIXL's Python bindings: which of them to load, and the few calls a push transport needs.

NIXL comes as two packages, built for CUDA 12 and for CUDA 13, that cannot both be loaded into one
process. The package's own `_api` module is not used: it fixes the progress thread's delay at zero
(the thread then spins a whole core), and its handles release themselves when garbage is collected.
Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from threading import Lock
from types import ModuleType

from attrs import frozen

from pushkv.core.errors import MissingDependencyError, TransportError

from ._guard import Guard, keep_for_ever
from ._pieces import Piece
from ._regions import RegionTable

__all__ = ["Agent", "Library", "NixlError", "load_library"]

_PACKAGES = ("nixl_cu13", "nixl_cu12")
_CREATION = Lock()
"""Agents are created one at a time: several at once have been seen to hang in UCX."""


class NixlError(Exception):
    """An error of NIXL. Its own exceptions share no base and differ between the two packages.

    Attributes:
        kind: The class name of NIXL's exception, the same in both.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@contextmanager
def _calling(guard: Guard, call: str) -> Iterator[None]:
    with guard.calling(call):
        try:
            yield
        except Exception as error:
            raise NixlError(type(error).__name__, str(error)) from error


@frozen
class Library:
    """A loaded NIXL: its bindings module and its version, the same for either CUDA variant."""

    bindings: ModuleType
    version: str


def _candidates() -> tuple[str, ...]:
    loaded = tuple(name for name in _PACKAGES if sys.modules.get(name) is not None)
    if loaded:
        return loaded[:1]
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    if isinstance(cuda, str) and cuda.startswith("12."):
        return _PACKAGES[::-1]
    return _PACKAGES


def load_library() -> Library:
    """The NIXL of this process: the variant already loaded, else the one installed.

    Where both are installed, the one that fits the CUDA version of a loaded torch.

    Raises:
        MissingDependencyError: Neither variant is installed, or the installed one does not load.
    """
    for name in _candidates():
        try:
            importlib.import_module(name)
            bindings = importlib.import_module(f"{name}._bindings")
            return Library(bindings, distribution_version(name.replace("_", "-")))
        except ModuleNotFoundError as error:
            if error.name != name:
                raise MissingDependencyError(f"{name} does not load: {error}") from error
        except (ImportError, PackageNotFoundError) as error:
            # The other variant must not be tried now: parts of this one may be loaded.
            raise MissingDependencyError(f"{name} does not load: {error}") from error
    raise MissingDependencyError(
        "NIXL is not installed: install nixl-cu13 or nixl-cu12 (for example "
        "`pip install 'pushkv[nixl]'`); both work without a GPU"
    )


@contextmanager
def _lanes_logged(backend: str) -> Iterator[None]:
    """Let UCX log the lanes it chooses, a line per kind of connection; NIXL does not tell them.

    UCX reads these settings once, when the backend loads it; it would print to standard output.
    What is set already stays.
    """
    settings = {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": "stderr"} if backend == "UCX" else {}
    new = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in new})
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)  # the environment is everybody's: perhaps it was restored


_CREATION_S = 30.0
"""How long to wait for the creation of others; one takes up to a second."""


class Agent:
    """One NIXL agent with one backend; used by one thread alone.

    Every call may raise NixlError, or Abandoned once the guard was told to give the thread up.
    """

    def __init__(
        self,
        library: Library,
        name: str,
        backend: str,
        options: Mapping[str, str],
        progress_delay_us: int,
        guard: Guard,
    ) -> None:
        """Create the agent and its backend; takes up to a second.

        Raises:
            TransportError: NIXL has no such backend here, or it did not start.
        """
        bindings = self._bindings = library.bindings
        self._guard = guard
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        # NONE, the default, leaves NIXL's own maps unlocked against its progress thread.
        config.syncMode = bindings.NIXL_THREAD_SYNC_RW
        # 0 makes the progress thread spin; anything above makes UCX wait for events.
        config.pthrDelay = progress_delay_us
        if not _CREATION.acquire(timeout=_CREATION_S):
            raise TransportError("another agent of this process hangs while it is made")
        try:
            self._create(library, name, config, backend, options)
        finally:
            _CREATION.release()
        self._registered: list[object] = []

    def _create(
        self,
        library: Library,
        name: str,
        config: object,
        backend: str,
        options: Mapping[str, str],
    ) -> None:
        guard = self._guard
        with _calling(guard, "create the agent"):
            self._agent = self._bindings.nixlAgent(name, config)
            plugins = list(self._agent.getAvailPlugins())
        if backend not in plugins:
            raise TransportError(
                f"NIXL {library.version} has no backend {backend!r} here, only {plugins}; "
                "is NIXL_PLUGIN_DIR set to another installation?"
            )
        try:
            with _calling(guard, f"start {backend}"), _lanes_logged(backend):
                self._backends = [self._agent.createBackend(backend, dict(options))]
        except NixlError as error:
            raise TransportError(
                f"NIXL's backend {backend} did not start with options {dict(options)}: "
                f"{error}; check its environment (UCX_*, FI_*) and what the log says above"
            ) from error

    def _memory_type(self, device_memory: bool) -> object:
        return self._bindings.VRAM_SEG if device_memory else self._bindings.DRAM_SEG

    def register(self, table: RegionTable) -> None:
        """Make all regions of `table` readable and writable by peers."""
        for device_memory in (False, True):
            rows = table.descriptors(device_memory)
            if len(rows):
                listed = self._bindings.nixlRegDList(self._memory_type(device_memory), rows)
                with _calling(self._guard, "register memory"):
                    self._agent.registerMem(listed, self._backends)
                self._registered.append(listed)

    def metadata(self) -> bytes:
        """What a peer's agent loads to WRITE here."""
        with _calling(self._guard, "describe memory"):
            return bytes(self._agent.getLocalMD())

    def load(self, metadata: bytes) -> str:
        """Learn a peer from its metadata; returns its agent's name.

        Blocks on no peer over UCX. Over LIBFABRIC it greets the peer, and never returns if that is
        dead.
        """
        with _calling(self._guard, "load a peer"):
            return bytes(self._agent.loadRemoteMD(metadata)).decode()

    def forget(self, name: str) -> None:
        """Disconnect from a peer and drop what was loaded of it."""
        with _calling(self._guard, "forget a peer"):
            self._agent.invalidateRemoteMD(name)

    def prepare(self, peer: str, piece: Piece, notice: bytes) -> int:
        """A handle of one WRITE that sends `notice` when its bytes are in place. Posts nothing.

        `createXferReq` on arrays of 1024 descriptors took 17 µs, preparing two lists and indexing
        them 74 µs: lists prepared per transfer do not pay.
        """
        bindings = self._bindings
        with _calling(self._guard, "prepare a WRITE"):
            local = bindings.nixlXferDList(self._memory_type(piece.from_device), piece.source)
            remote = bindings.nixlXferDList(self._memory_type(piece.to_device), piece.destination)
            return int(
                self._agent.createXferReq(
                    bindings.NIXL_WRITE, local, remote, peer, notice, self._backends
                )
            )

    def post(self, handle: int) -> bool:
        """Post a WRITE; whether it is DONE already. May block for the whole copy (UCX over cma)."""
        with _calling(self._guard, "post a WRITE"):
            return bool(self._agent.postXferReq(handle) == self._bindings.NIXL_SUCCESS)

    def check(self, handle: int) -> bool:
        """Whether a posted WRITE is DONE. Over UCX this is also what sends its notification."""
        with _calling(self._guard, "look after a WRITE"):
            return bool(self._agent.getXferStatus(handle) == self._bindings.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Free a handle that is not posted or has ended. On an open one this stops nothing."""
        with _calling(self._guard, "release a WRITE"):
            self._agent.releaseXferReq(handle)

    def notifications(self) -> Mapping[str, list[bytes]]:
        """The notifications that came since the last call, by the name of the sending agent."""
        with _calling(self._guard, "fetch notifications"):
            found: Mapping[str, list[bytes]] = self._agent.getNotifs({}, self._backends)
            return found

    def destroy(self) -> None:
        """Withdraw the memory; end the agent and its progress thread. All handles must be over."""
        for listed in self._registered:
            with _calling(self._guard, "withdraw memory"):
                self._agent.deregisterMem(listed, self._backends)
        self._registered.clear()
        with _calling(self._guard, "end the agent"):
            del self._agent

    def keep_for_ever(self) -> None:
        """Called from another thread when the owner hangs: ending this agent would hang, too."""
        keep_for_ever(getattr(self, "_agent", None))
