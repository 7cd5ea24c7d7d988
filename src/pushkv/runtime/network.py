"""Where control connections come from: TCP, or whatever else carries bytes in order."""

from __future__ import annotations

from typing import Protocol

import anyio
import anyio.abc

__all__ = ["Network", "TcpNetwork"]


class Network(Protocol):
    """Makes and accepts ordered byte streams, in the event loop of whoever calls it.

    A stream tells its `SocketAttribute.remote_address`: peers are counted by it, and in plaintext
    only those on this machine are spoken to, unless the configuration says otherwise.
    """

    async def listen(
        self, host: str, port: int
    ) -> tuple[anyio.abc.Listener[anyio.abc.ByteStream], int]:
        """Listen at an address; returns the listener and its port, `port` itself unless that is 0.

        Raises:
            OSError: The address cannot be listened on.
            ValueError: It is no address at all.
        """

    async def connect(self, host: str, port: int) -> anyio.abc.ByteStream:
        """Connect to an address. The caller bounds the time.

        Raises:
            OSError: Nobody answers there. Any other error is taken for the same.
        """


class TcpNetwork:
    """The host's own TCP."""

    async def listen(
        self, host: str, port: int
    ) -> tuple[anyio.abc.Listener[anyio.abc.ByteStream], int]:
        """Listen at the first address that `host` stands for."""
        multi = await anyio.create_tcp_listener(local_host=host, local_port=port)
        listener, *others = multi.listeners
        for other in others:
            await other.aclose()
        bound = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 (not Django)
        return listener, int(bound)

    async def connect(self, host: str, port: int) -> anyio.abc.ByteStream:
        """Connect to the first address of `host` that answers."""
        return await anyio.connect_tcp(host, port)
