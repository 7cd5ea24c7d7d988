"""The options of `kv_connector_extra_config`, validated; unknown ones are named."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import field, fields, frozen

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import Duration, seconds
from pushkv.core.policy import Policy
from pushkv.runtime import AskWhetherGone, Certificates, SharedSecret
from pushkv.runtime.credentials import Credentials

from .prefills import Streaming
from .stepping import WhileWaiting

__all__ = ["Options", "read_options"]

_POLICY = {each.name: each.type in ("Duration", Duration) for each in fields(Policy)}
for _each in ("exposed_blocks", "pinned_blocks", "part_tokens"):
    _POLICY.pop(_each)  # shares of the pool, and bytes, since users do not count blocks
POLICY_OPTIONS = {f"{name}_s" if timed else name: name for name, timed in _POLICY.items()}
"""Option name → field of `Policy`; durations are in seconds and end in ``_s``."""


@frozen
class Options:
    """What a user may set for an engine's connector.

    Attributes:
        transport: Name of a transport in the entry point group ``pushkv.transports``.
        transport_options: Handed to the transport as keyword arguments.
        listen_host: Where the control channel accepts connections.
        advertise_host: The name by which peers reach it; None for `listen_host`, or for vLLM's own
            address (``VLLM_HOST_IP``, else the machine's) where that is every address.
        port: The control channel's port; 0 for any. A router that dispatches both legs at once must
            know the prefill engine's. Engine i of a data-parallel group adds i.
        shared_secret_path: A file with the secret that every engine of the deployment knows; both
            ends of a control connection prove that they do.
        authority_path: Certificates, in PEM, of who signed those of the peers; with
            `certificate_path` and `key_path` in place of a shared secret.
        certificate_path: Our own certificate.
        key_path: Its private key.
        plaintext: Go beyond loopback although the channel is not authenticated: whoever reaches it
            can overwrite the KV cache.
        model: The model's name compared with the peer's; None for the one the engine was started
            with. Set it where both engines load the same weights from different places.
        weights_epoch: The version of weights that change at run time; compared with the peer's.
        advertise_push: Whether a prefill response says ``transfer_mode: "push"``, which makes
            routers that know the word dispatch both legs at once.
        exposed_share: The share of the block pool that may be registered or quarantined at once.
        pinned_share: The share of it that finished prefills may pin; beyond, the oldest that no
            decode engine has registered for is given up.
        is_gone: The orchestrator's word on lost prefill engines, as "module:function"; see
            `pushkv.runtime.AskWhetherGone`. None for the kernel's alone.
        metrics_port: Where the runtime serves Prometheus metrics; 0 for nowhere. Engine i of a
            data-parallel group adds i.
        admin_socket: A Unix socket of this user's, at which `pushkv top` and `pushkv admin` reach
            the runtime; None for nowhere. Each of several ranks has its own, as with `trace_path`.
        admin_port: The same over TCP at `listen_host`, for who has the credentials of the control
            channel; 0 for nowhere. Rank r adds r, as `port` does.
        trace_path: Where the runtime writes its trace; None for nowhere.
        otel_endpoint: The OTLP collector that gets spans of transfers, as http://HOST:PORT; None
            for no spans.
        write_budget_bytes: WRITEs to a decode rank are posted while less than so many bytes are
            under way to it; the others wait, and transfers take turns.
        streaming: When blocks are written: while the prefill that fills them runs, or after.
        while_waiting: What the engine does while its requests only wait for their KV cache.
        stop_timeout_s: How long shutting down may wait for WRITEs that are under way.
        policy: Every duration and bound of the protocol.
    """

    transport: str = "nixl"
    transport_options: Mapping[str, object] = field(factory=dict)
    listen_host: str = "127.0.0.1"
    advertise_host: str | None = None
    port: int = 0
    shared_secret_path: Path | None = None
    authority_path: Path | None = None
    certificate_path: Path | None = None
    key_path: Path | None = None
    plaintext: bool = False
    model: str | None = None
    weights_epoch: str = "0"
    advertise_push: bool = True
    exposed_share: float = 0.5
    pinned_share: float = 0.5
    is_gone: AskWhetherGone | None = None
    metrics_port: int = 0
    admin_socket: Path | None = None
    admin_port: int = 0
    trace_path: Path | None = None
    otel_endpoint: str | None = None
    write_budget_bytes: int = 256 * 1024 * 1024
    streaming: Streaming = Streaming.CHUNKS
    while_waiting: WhileWaiting = WhileWaiting.SLEEP
    stop_timeout_s: float = 5.0
    policy: Policy = field(factory=Policy)

    @property
    def credentials(self) -> Credentials | None:
        """How the control channel proves itself; None for plaintext.

        Raises:
            ConfigurationError: Some of the three files of a certificate are missing, or there is a
                shared secret as well.
        """
        files = {
            name: getattr(self, name) for name in ("authority_path", "certificate_path", "key_path")
        }
        given = {name: path for name, path in files.items() if path is not None}
        secret = self.shared_secret_path
        if not given:
            return None if secret is None else SharedSecret(secret)
        if secret is not None:
            raise ConfigurationError("shared_secret_path", str(secret), f"none beside {min(given)}")
        if len(given) < len(files):
            missing = min(set(files) - set(given))
            raise ConfigurationError(missing, None, f"a file, where {min(given)} is given")
        return Certificates(*files.values())

    def exposed_blocks(self, block_count: int) -> int:
        """The most blocks of a pool of `block_count` that may be registered or quarantined."""
        return max(1, int(block_count * self.exposed_share))

    def pinned_blocks(self, block_count: int) -> int:
        """The most blocks of a pool of `block_count` that finished prefills may pin."""
        return max(1, int(block_count * self.pinned_share))


def read_options(extra: Mapping[str, object]) -> Options:
    """`kv_connector_extra_config` as `Options`.

    Raises:
        ConfigurationError: An option is unknown or wrong. Names it, and the closest valid ones.
    """
    own = {each.name for each in fields(Options)} - {"policy"}
    valid = sorted(own | set(POLICY_OPTIONS))
    policy: dict[str, int] = {}
    values: dict[str, object] = {}
    for name, value in extra.items():
        if name in POLICY_OPTIONS:
            policy[POLICY_OPTIONS[name]] = _policy_value(name, value)
        elif name in own:
            values[name] = _READERS[name](name, value)
        else:
            close = difflib.get_close_matches(str(name), valid, n=3, cutoff=0.5) or valid
            raise ConfigurationError(
                f"kv_connector_extra_config.{name}", value, "one of: " + ", ".join(close)
            )
    options = Options(**values, policy=Policy(**policy))  # type: ignore[arg-type]
    if options.credentials is not None and options.plaintext:
        raise ConfigurationError("plaintext", True, "false where there are credentials")
    return options


def _policy_value(name: str, value: object) -> int:
    if name.endswith("_s"):
        return seconds(_number(name, value, least=0.001, most=86_400.0))
    return _integer(name, value, most=1 << 40)


def _text(name: str, value: object) -> str:
    if isinstance(value, str) and value and value.isprintable():
        return value
    raise ConfigurationError(name, value, "a string")


def _path(name: str, value: object) -> Path:
    return Path(_text(name, value))


def _epoch(name: str, value: object) -> str:
    """An epoch may be counted: 3 and "3" are the same one."""
    return str(value) if type(value) is int else _text(name, value)


def _function(name: str, value: object) -> AskWhetherGone:
    try:
        found: object = pkgutil.resolve_name(_text(name, value))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(name, value, f'"module:function" ({error})') from error
    if not callable(found):
        raise ConfigurationError(name, value, "a function")
    return found


def _while_waiting(name: str, value: object) -> WhileWaiting:
    try:
        return WhileWaiting(value)  # type: ignore[arg-type]
    except ValueError:
        raise ConfigurationError(name, value, "one of: " + ", ".join(WhileWaiting)) from None


def _streaming(name: str, value: object) -> Streaming:
    if isinstance(value, bool):
        return Streaming.CHUNKS if value else Streaming.WHOLE
    if value == Streaming.LAYERS:
        return Streaming.LAYERS
    raise ConfigurationError(name, value, f"true, false or {Streaming.LAYERS.value}")


def _boolean(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigurationError(name, value, "true or false")


def _integer(name: str, value: object, most: int, least: int = 0) -> int:
    if type(value) is int and least <= value <= most:
        return value
    raise ConfigurationError(name, value, f"an integer from {least} to {most}")


def _number(name: str, value: object, least: float, most: float) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
        return float(value)
    raise ConfigurationError(name, value, f"a number from {least:g} to {most:g}")


def _mapping(name: str, value: object) -> Mapping[str, object]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    raise ConfigurationError(name, value, "an object of named options")


_READERS: dict[str, Callable[[str, object], object]] = {
    "transport": _text,
    "transport_options": _mapping,
    "listen_host": _text,
    "advertise_host": _text,
    "shared_secret_path": _path,
    "authority_path": _path,
    "certificate_path": _path,
    "key_path": _path,
    "plaintext": _boolean,
    "port": lambda name, value: _integer(name, value, most=65_535),
    "metrics_port": lambda name, value: _integer(name, value, most=65_535),
    "model": _text,
    "weights_epoch": _epoch,
    "advertise_push": _boolean,
    "exposed_share": lambda name, value: _number(name, value, least=0.01, most=1.0),
    "pinned_share": lambda name, value: _number(name, value, least=0.01, most=1.0),
    "is_gone": _function,
    "admin_socket": _path,
    "admin_port": lambda name, value: _integer(name, value, most=65_535),
    "trace_path": _path,
    "otel_endpoint": _text,
    "write_budget_bytes": lambda name, value: _integer(name, value, most=1 << 40, least=1),
    "streaming": _streaming,
    "while_waiting": _while_waiting,
    "stop_timeout_s": lambda name, value: _number(name, value, least=0.0, most=3_600.0),
}
