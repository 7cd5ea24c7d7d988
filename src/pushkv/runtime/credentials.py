"""Who may speak on the control channel: certificates of the user's own, or a shared secret.

Both ends prove themselves, with TLS 1.3 and nothing older. A certificate may name the engines that
its holder may be, as URIs ``urn:pushkv:engine:NAME`` among its alternative names; where ours names
engines every peer's must, and a HELLO under another name is refused. Host names are not compared:
a peer is an engine, wherever it runs.

From a shared secret both ends derive one certificate authority, and each makes itself a certificate
that names no engine: every holder of the secret is trusted as much as any other.

Files are read again when they change, so that keys can be rotated without a restart: new
connections use what the files say then, those that stand are not ended.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path
from urllib.parse import unquote

from attrs import define, frozen

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import EngineId

from .secret import issue, read_secrets

__all__ = [
    "Certificates",
    "Credentials",
    "SharedSecret",
    "Tls",
    "client_context",
    "engines_named",
]

log: logging.Logger = logging.getLogger("pushkv.channel")

ENGINE = "urn:pushkv:engine:"


@frozen
class Certificates:
    """Certificates of the user's own, in PEM files.

    Attributes:
        authority: The certificates of whoever may sign peers' certificates; several while an
            authority is replaced. Use an authority for pushkv alone: whatever it signs may connect.
        certificate: Ours, and those between it and the authority, if any; good for a server and for
            a client (its extended key usage, where it has one, names both).
        key: The private key of `certificate`, not encrypted.
    """

    authority: Path
    certificate: Path
    key: Path


@frozen
class SharedSecret:
    """A secret that every engine of a deployment knows.

    Attributes:
        path: A file with a secret per line, each at least 32 characters (`openssl rand -hex 32`).
            We show ourselves with the first, and accept peers with any of them. Needs the package
            `cryptography` (`pip install "pushkv[tls]"`).
    """

    path: Path


Credentials = Certificates | SharedSecret


@define
class _Contexts:
    server: ssl.SSLContext
    client: ssl.SSLContext
    own: frozenset[EngineId]


class Tls:
    """The contexts of one engine. Belongs to the runtime's thread.

    Args:
        credentials: Where the keys are.
        engine: Our name.

    Raises:
        ConfigurationError: A file cannot be used, our certificate would not be accepted by our own
            authority, or it does not allow our name.
        MissingDependencyError: A shared secret needs `cryptography`.
    """

    def __init__(self, credentials: Credentials, engine: EngineId) -> None:
        self._credentials = credentials
        self._engine = engine
        self._seen = self._stamp()
        self._contexts = self._load()

    def server(self) -> ssl.SSLContext:
        """The context for who connects to us, from the files as they are."""
        return self._current().server

    def client(self) -> ssl.SSLContext:
        """The context for whom we connect to, from the files as they are."""
        return self._current().client

    def may_be(self, engine: EngineId, named: frozenset[EngineId]) -> bool:
        """Whether a peer may call itself `engine`, whose certificate names the engines `named`."""
        if named or self._contexts.own:
            return engine in named
        return True

    # -- inside

    def _current(self) -> _Contexts:
        """What the files say; while they cannot be used, what they said."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            try:
                self._contexts = self._load()
            except ConfigurationError as error:
                log.error("the control channel keeps its old keys: %s", error)
            else:
                log.info("the control channel of %s has new keys", self._engine)
        return self._contexts

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for path in self._paths():
            try:
                status = os.stat(path)
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((status.st_mtime_ns, status.st_ino, status.st_size))
        return tuple(found)

    def _paths(self) -> tuple[Path, ...]:
        credentials = self._credentials
        if isinstance(credentials, SharedSecret):
            return (credentials.path,)
        return (credentials.authority, credentials.certificate, credentials.key)

    def _load(self) -> _Contexts:
        server, client = _contexts(self._credentials)
        own = _shake(server, client)
        if own and self._engine not in own:
            raise ConfigurationError(
                "engine", self._engine, f"a name that its certificate has: {sorted(own)}"
            )
        return _Contexts(server, client, own)


def client_context(credentials: Credentials) -> ssl.SSLContext:
    """What an operator's tool connects with: the credentials of any engine of the deployment.

    Raises:
        ConfigurationError: A file cannot be used, or no engine would accept the certificate.
        MissingDependencyError: A shared secret needs `cryptography`.
    """
    server, client = _contexts(credentials)
    _shake(server, client)
    return client


SIDES = (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)


def _contexts(credentials: Credentials) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For a server, and for a client."""
    if isinstance(credentials, Certificates):
        authority = _read("authority_path", credentials.authority)
        pair = (credentials.certificate, credentials.key)
        server, client = (_context(side, authority, *pair) for side in SIDES)
        return server, client
    issued = issue(read_secrets(credentials.path))
    with issued.files() as pair:
        server, client = (_context(side, issued.authorities, *pair) for side in SIDES)
        return server, client


def _read(name: str, path: Path) -> str:
    try:
        return path.read_text("ascii")
    except (OSError, ValueError) as error:
        raise ConfigurationError(name, str(path), f"a readable PEM file ({error})") from None


def _context(side: int, authority: str, certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no resumption: every connection proves itself anew
    try:
        context.load_verify_locations(cadata=authority)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(
            "authority_path", "(its content)", f"certificates in PEM ({error})"
        ) from None
    _read("key_path", key)
    try:
        # An encrypted key would ask for its password on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigurationError(
            "certificate_path", str(certificate), f"a certificate and its key, in PEM ({error})"
        ) from None
    return context


def _shake(server: ssl.SSLContext, client: ssl.SSLContext) -> frozenset[EngineId]:
    """Connect to ourselves in memory; returns the engines that our own certificate names.

    So a certificate that no peer would accept is found at start, by us.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                raise ConfigurationError(
                    "certificate_path",
                    "(its content)",
                    f"one that its authority signed, for servers and for clients ({error})",
                ) from None
    return engines_named(ends[1].getpeercert())


def engines_named(certificate: object) -> frozenset[EngineId]:
    """The engines that a peer's certificate names, as `ssl.SSLObject.getpeercert` gives it."""
    if not isinstance(certificate, dict):
        return frozenset()
    names = certificate.get("subjectAltName", ())
    return frozenset(
        EngineId(unquote(value.removeprefix(ENGINE)))
        for kind, value in names
        if kind == "URI" and value.startswith(ENGINE)
    )
