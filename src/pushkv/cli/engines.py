"""Speaks to the admin endpoints of running engines."""

from __future__ import annotations

import socket
import ssl
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from attrs import frozen

from pushkv.core.errors import ConfigurationError, PushKVError
from pushkv.runtime import Certificates, SharedSecret
from pushkv.runtime.admin.state import DrainState, EngineState, Released
from pushkv.runtime.credentials import client_context

__all__ = [
    "AuthorityOption",
    "CertificateOption",
    "Engine",
    "KeyOption",
    "SecretOption",
    "TargetArgument",
    "TargetsArgument",
    "UnreachableError",
    "engine_at",
]

ANSWER_S = 5.0
T = TypeVar("T")

_TARGET = typer.Argument(
    help="The engine's admin_socket, or HOST:PORT of its admin_port, which needs credentials.",
    show_default=False,
)
TargetArgument = Annotated[str, _TARGET]
TargetsArgument = Annotated[list[str], _TARGET]
SecretOption = Annotated[
    Path | None,
    typer.Option("--shared-secret", help="For HOST:PORT: the file that all engines share."),
]
AuthorityOption = Annotated[
    Path | None, typer.Option("--authority", help="Or: who signed the engines' certificates.")
]
CertificateOption = Annotated[
    Path | None, typer.Option("--certificate", help="A certificate that it signed.")
]
KeyOption = Annotated[Path | None, typer.Option("--key", help="Its private key.")]


class UnreachableError(PushKVError):
    """Nobody answers at an admin endpoint."""


@frozen
class Engine:
    """One admin endpoint. Any thread; each call is one connection, and may take five seconds.

    Attributes:
        target: As the user named it.
        path: Its Unix socket; "" for TCP.
        tls: What to connect with over TCP.
    """

    target: str
    path: str
    tls: ssl.SSLContext | None

    def state(self, most: int = 1_000) -> EngineState:
        """What it tells of itself, with up to `most` entries in each list.

        Raises:
            UnreachableError: Nobody answers.
            PushKVError: What answers is no engine, or another version of one.
        """
        return self._ask("GET", f"/v1/state?most={most}", EngineState)

    def drain(self, *, on: bool) -> DrainState:
        """Drain it, or take that back. Raises as `state` does."""
        return self._ask("POST", "/v1/drain" if on else "/v1/undrain", DrainState)

    def release(self, order: dict[str, object]) -> Released:
        """Give it the operator's word. Raises as `state` does, and where it refuses."""
        return self._ask("POST", "/v1/release", Released, order)

    def _ask(self, method: str, where: str, kind: type[T], body: object = None) -> T:
        content = None if body is None else msgspec.json.encode(body)
        connection = HTTPConnection("engine")
        try:
            connection.sock = self._socket()
            connection.request(method, where, content)
            answer = connection.getresponse()
            return self._read(answer.status, answer.read(), kind)
        except (OSError, HTTPException) as error:
            raise UnreachableError(f"{self.target}: {self._hint(error)}") from error
        finally:
            connection.close()

    def _socket(self) -> socket.socket:
        if self.tls is None:
            plain = socket.socket(socket.AF_UNIX)
            plain.settimeout(ANSWER_S)
            try:
                plain.connect(self.path)
            except BaseException:
                plain.close()
                raise
            return plain
        host, _, port = self.target.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_S) as remote:
            return self.tls.wrap_socket(remote)

    def _read(self, status: int, body: bytes, kind: type[T]) -> T:
        try:
            if status == 200:
                return msgspec.json.decode(body, type=kind)
            told: Any = msgspec.json.decode(body)
            error = str(told["error"])
        except (msgspec.MsgspecError, KeyError, TypeError) as wrong:
            raise PushKVError(
                f"{self.target}: what answers is not an engine of this version ({wrong})"
            ) from wrong
        raise PushKVError(f"{self.target}: {error}")

    def _hint(self, error: Exception) -> str:
        if not self.path:
            return (
                f"no engine answers ({error}): is it running, with admin_port, and are the "
                "credentials its own?"
            )
        if not Path(self.path).exists():
            return "no engine is there: is it running, with admin_socket?"
        return f"no engine answers ({error}): it is gone, or the socket is another user's"


def engine_at(
    target: str,
    secret: Path | None,
    authority: Path | None,
    certificate: Path | None,
    key: Path | None,
) -> Engine:
    """The endpoint that a user means.

    Raises:
        ConfigurationError: `target` is neither a path nor HOST:PORT, or that has no credentials.
    """
    host, _, port = target.rpartition(":")
    if "/" in target or not host:
        return Engine(target, target, None)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise ConfigurationError("TARGET", target, "the path of a socket, or HOST:PORT")
    if secret is not None:
        return Engine(target, "", client_context(SharedSecret(secret)))
    if authority is None or certificate is None or key is None:
        raise ConfigurationError(
            "TARGET",
            target,
            "--shared-secret, or --authority, --certificate and --key, beside HOST:PORT",
        )
    return Engine(target, "", client_context(Certificates(authority, certificate, key)))
