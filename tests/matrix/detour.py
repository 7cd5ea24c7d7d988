"""A proxy before an engine's control channel, run by a thread, for faults told step by step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

from pushkv.core.effects import ProducerAddress
from pushkv.testing.channel_faults import ChannelFaults, Toward

__all__ = ["Detour"]


class Detour:
    """`ChannelFaults` for those who have no event loop; a context that leaves nothing behind."""

    def __init__(self, target: ProducerAddress, buffer_bytes: int = 0) -> None:
        self.faults = ChannelFaults(target, buffer_bytes)
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None

    def __enter__(self) -> Self:
        portal = self._portal = self._stack.enter_context(start_blocking_portal())
        self._stack.enter_context(portal.wrap_async_context_manager(self.faults))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def address(self) -> ProducerAddress:
        """Where to dial instead."""
        return self.faults.address

    def stop(self, *towards: Toward) -> None:
        """Pass nothing on in these directions, and read nothing."""
        for each in towards:
            self._call(self.faults.stop, each)

    def cut(self, toward: Toward | None = None) -> None:
        """Cut every connection, at one end or at both."""
        self._call(self.faults.cut, toward)

    def heal(self) -> None:
        """Everything passes again."""
        self.faults.refuses = self.faults.deaf = False
        for each in Toward:
            self._call(self.faults.go_on, each)
            self.faults.bytes_per_s[each] = float("inf")

    def _call(self, step: Callable[..., Any], *arguments: object) -> None:
        assert self._portal is not None, "enter it first"
        self._portal.call(step, *arguments)
