"""What a runtime needs to know before it starts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import Factory, field, frozen

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import EngineId, Incarnation
from pushkv.core.machines import LifeObserver, Observer
from pushkv.core.policy import Policy
from pushkv.layout import CacheLayout

from .addresses import is_loopback
from .admission import Limits
from .credentials import Credentials
from .deaths import AskWhetherGone
from .network import Network, TcpNetwork

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
        listen_host: Where to accept control connections. An address that others can reach needs
            `credentials`.
        listen_port: 0 takes any free one.
        advertise_host: The name under which peers reach `listen_host`; the same by default, which
            will not do where that is every address.
        credentials: How both ends of a control connection prove themselves (mutual TLS 1.3); None
            for plaintext, which neither listens nor dials beyond loopback.
        plaintext: Let a channel without credentials reach beyond loopback. Whoever reaches it can
            overwrite the KV cache.
        limits: Bounds of the control channel.
        policy: Durations and bounds.
        write_budget_bytes: WRITEs to a consumer rank are posted while less than so many bytes are
            under way to it; the others wait, and transfers take turns. Long ones are cut into
            parts of a quarter of it.
        cores: CPU cores for the runtime's threads and its transport's, where these must not be
            those of the thread that starts it; empty for those. Linux only.
        is_gone: An orchestrator's word on producers on other hosts; see `AskWhetherGone`.
        admin_socket: Where operators ask and command this rank: a Unix socket that only this user
            may open; None for nowhere. Needs the package `h11` (`pip install "pushkv[admin]"`).
        admin_port: The same over TCP at `listen_host`, for who has the credentials of the control
            channel; 0 for nowhere.
        trace_path: Where to write a line of JSON per step; None for nowhere.
        clock: Monotonic nanoseconds.
        random_bytes: So many random bytes, for nonces and arrival tokens; peers must not be able
            to guess them.
        network: Makes the control connections; TCP by default.
        observer: Called with every step of every machine, in the runtime's thread; must not block.
        lives: Called when a machine begins and when it is forgotten, likewise.

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
    credentials: Credentials | None = None
    plaintext: bool = False
    limits: Limits = field(factory=Limits)
    policy: Policy = field(factory=Policy)
    write_budget_bytes: int = 256 * 1024 * 1024
    cores: frozenset[int] = frozenset()
    is_gone: AskWhetherGone | None = None
    admin_socket: Path | None = None
    admin_port: int = 0
    trace_path: Path | None = None
    clock: Callable[[], int] = time.monotonic_ns
    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    network: Network = field(factory=TcpNetwork)
    observer: Observer | None = None
    lives: LifeObserver | None = None

    def __attrs_post_init__(self) -> None:
        if not self.engine:
            raise ConfigurationError("engine", self.engine, "a name")
        if self.layout.ranks.count > 1 and self.rank != self.layout.rank:
            raise ConfigurationError("rank", self.rank, f"{self.layout.rank}, as in the layout")
        for name in ("listen_port", "admin_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigurationError(name, getattr(self, name), "0 to 65535")
        if self.admin_port and self.credentials is None:
            raise ConfigurationError(
                "admin_port",
                self.admin_port,
                "0 without credentials: whoever reached it could command the engine. "
                "`admin_socket` needs none",
            )
        if type(self.write_budget_bytes) is not int or self.write_budget_bytes < 1:
            raise ConfigurationError(
                "write_budget_bytes", self.write_budget_bytes, "an integer of at least 1"
            )
        if self.plaintext and self.credentials is not None:
            raise ConfigurationError("plaintext", True, "false where there are credentials")
        if not (self.plaintext or self.credentials or is_loopback(self.listen_host)):
            raise ConfigurationError(
                "listen_host",
                self.listen_host,
                "a loopback address, or credentials, or plaintext=True on a network where every "
                "host may be trusted with the KV cache",
            )
        if self.listen_host in EVERY_ADDRESS and not self.advertise_host:
            raise ConfigurationError(
                "advertise_host", "", f"this host's name: peers cannot dial {self.listen_host!r}"
            )
