"""How runtimes in workers' processes wake an engine that sleeps in another.

Reports travel with steps, and an engine that sleeps makes none. Each worker hangs a `Bell`, a Unix
socket without a file, and tells the engine where; the engine's `Bells` listen to all of them. A
bell says nothing but that there are reports. Workers on other hosts cannot be heard, and then the
engine does not sleep.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Sequence

__all__ = ["Bell", "Bells"]


class Bell:
    """A worker's bell.

    Attributes:
        address: Where the engine listens.
    """

    def __init__(self) -> None:
        self.address: str = f"\0pushkv-bell-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(self.address)
        self._listener.listen()
        self._engine: socket.socket | None = None

    def ring(self) -> None:
        """Ring, if anybody listens. Any thread; never blocks."""
        with contextlib.suppress(OSError):  # nobody came yet, or it rings so loud already
            if self._engine is None:
                self._engine = self._accept()
            self._engine.send(b"\0")

    def _accept(self) -> socket.socket:
        """The first who is of our user; whoever else came is sent away."""
        while True:
            engine, _ = self._listener.accept()
            engine.setblocking(False)
            if _user(engine) == os.getuid():
                return engine
            engine.close()

    def close(self) -> None:
        """Whoever listens hears that it is over."""
        for each in (self._listener, self._engine):
            if each is not None:
                each.close()


class Bells:
    """The bells of all workers, in the engine's process.

    Attributes:
        rung: Whether any has rung since this was last set to False.
    """

    def __init__(self, workers: Sequence[socket.socket]) -> None:
        self.rung: bool = False
        self._workers = workers

    @classmethod
    def at(cls, addresses: Sequence[str]) -> Bells | None:
        """The bells at `addresses`; None if one of them cannot be heard from here."""
        with contextlib.ExitStack() as stack:
            workers = []
            for address in addresses:
                worker = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                try:
                    worker.connect(address)
                except OSError:
                    return None
                workers.append(worker)
            stack.pop_all()
        return cls(workers)

    def listen(self, heard: Callable[[], None]) -> None:
        """Call `heard` after each ring, in a thread of its own that ends with the workers."""
        threading.Thread(
            target=self._listen, args=(heard,), name="pushkv-bells", daemon=True
        ).start()

    def _listen(self, heard: Callable[[], None]) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    if not _hear(key.fileobj):
                        selector.unregister(key.fileobj)
                        key.fileobj.close()
                self.rung = True
                heard()


def _user(peer: socket.socket) -> int:
    """The user whose process is at the other end."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)


def _hear(worker: socket.socket) -> bool:
    """Take all rings; whether there may be more."""
    try:
        return bool(worker.recv(4096))
    except OSError:
        return False
