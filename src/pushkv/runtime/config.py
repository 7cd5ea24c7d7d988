"""What a runtime needs to know before it starts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import Factory, field, frozen

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import EngineId, Incarnation
from pushkv.core.policy import Policy
from pushkv.layout import CacheLayout

from .channel import is_loopback

__all__ = ["RuntimeConfig", "new_incarnation"]

EVERY_ADDRESS = ("", "0.0.0.0", "::")  # noqa: S104 - recognized, not listened on


def new_incarnation() -> Incarnation:
    """A random unsigned 64-bit number, for one life of one engine's process."""
    return Incarnation(secrets.randbits(64))


@frozen
class RuntimeConfig:
    """One worker rank's identity, cache and control address.

    Attributes:
        engine: The engine's stable name.
        layout: This rank's KV cache, with addresses.
        model: What must be equal at both ends beside the layout: weights, dtype, rope, epoch.
        incarnation: New for each process life, the same for all ranks of it.
        rank: This worker's rank.
        listen_host: Where to accept control connections. The channel is plaintext in this version,
            so an address that others can reach needs `plaintext`.
        listen_port: 0 takes any free one.
        advertise_host: The name under which peers reach `listen_host`; the same by default, which
            will not do where that is every address.
        plaintext: Accept an unauthenticated channel beyond loopback. Whoever reaches it can
            overwrite the KV cache.
        policy: Durations and bounds.
        cores: CPU cores for the runtime's threads and its transport's, where these must not be
            those of the thread that starts it; empty for those. Linux only.
        trace_path: Where to write a line of JSON per step; None for nowhere.
        clock: Monotonic nanoseconds.

    Raises:
        ConfigurationError: A value is wrong; names it.
    """

    engine: EngineId
    layout: CacheLayout
    model: Mapping[str, str] = field(factory=dict)
    incarnation: Incarnation = Factory(new_incarnation)
    rank: int = 0
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    advertise_host: str = ""
    plaintext: bool = False
    policy: Policy = field(factory=Policy)
    cores: frozenset[int] = frozenset()
    trace_path: Path | None = None
    clock: Callable[[], int] = time.monotonic_ns

    def __attrs_post_init__(self) -> None:
        if not self.engine:
            raise ConfigurationError("engine", self.engine, "a name")
        if not 0 <= self.listen_port <= 65535:
            raise ConfigurationError("listen_port", self.listen_port, "0 to 65535")
        if not is_loopback(self.listen_host) and not self.plaintext:
            raise ConfigurationError(
                "listen_host",
                self.listen_host,
                "a loopback address, or plaintext=True on a network where every host may be "
                "trusted with the KV cache",
            )
        if self.listen_host in EVERY_ADDRESS and not self.advertise_host:
            raise ConfigurationError(
                "advertise_host", "", f"this host's name: peers cannot dial {self.listen_host!r}"
            )
