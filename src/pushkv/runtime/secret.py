"""A certificate authority out of a shared secret, the same wherever the secret is known.

HKDF-SHA256 of the secret is the seed of an Ed25519 key; its certificate is the authority. Each
process makes itself a key and a certificate that the authority signs. Neither ends by itself: who
has the secret could make another one at any time, so what ends trust is another secret.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from pushkv.core.errors import ConfigurationError, MissingDependencyError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["SECRET_LENGTH_LEAST", "Issued", "issue", "read_secrets"]

SECRET_LENGTH_LEAST = 32
"""Characters: what is guessed offline is the secret itself."""
SECRETS_MOST = 8
CONTEXT = b"pushkv control channel authority 1"
FROM, UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""A wrong clock must not cut engines off."""


@frozen
class Issued:
    """What a process shows and accepts.

    Attributes:
        authorities: PEM of the authorities of all secrets.
        certificate: PEM of our certificate, signed by the first.
        key: PEM of its key, which exists in this process alone.
    """

    authorities: str
    certificate: bytes
    key: bytes

    @contextmanager
    def files(self) -> Iterator[tuple[Path, Path]]:
        """Paths of certificate and key, in memory: `ssl` reads keys from files alone."""
        made = [os.memfd_create("pushkv", os.MFD_CLOEXEC) for _ in range(2)]
        try:
            for number, content in zip(made, (self.certificate, self.key), strict=True):
                os.write(number, content)
            certificate, key = (Path(f"/proc/self/fd/{number}") for number in made)
            yield certificate, key
        finally:
            for number in made:
                os.close(number)


def read_secrets(path: Path) -> tuple[bytes, ...]:
    """The secrets of a file, one per line; empty lines and spaces around them do not count.

    Raises:
        ConfigurationError: The file cannot be read, has none, or one that is too short.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            "shared_secret_path", str(path), f"a readable file ({error})"
        ) from None
    found = [line.strip() for line in lines if line.strip()]
    if not 1 <= len(found) <= SECRETS_MOST:
        raise ConfigurationError(
            "shared_secret_path", str(path), f"1 to {SECRETS_MOST} secrets, one per line"
        )
    for number, secret in enumerate(found, 1):
        if len(secret) < SECRET_LENGTH_LEAST:
            raise ConfigurationError(
                "shared_secret_path",
                f"{path}: secret {number} of {len(secret)} characters",
                f"at least {SECRET_LENGTH_LEAST}, such as of `openssl rand -hex 32`",
            )
    return tuple(secret.encode() for secret in found)


def issue(secrets: Sequence[bytes]) -> Issued:
    """A fresh certificate under the authority of the first secret.

    Raises:
        MissingDependencyError: `cryptography` is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ImportError:
        raise MissingDependencyError(
            'a shared secret needs the package cryptography: pip install "pushkv[tls]"'
        ) from None
    signers = [_authority_key(secret) for secret in secrets]
    authorities = [_authority(signer) for signer in signers]
    key = Ed25519PrivateKey.generate()
    usage = x509.ExtendedKeyUsage(
        [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    )
    certificate = (
        x509.CertificateBuilder()
        .issuer_name(authorities[0].subject)
        .subject_name(x509.Name([]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(FROM)
        .not_valid_after(UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("pushkv")]), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signers[0].public_key()),
            critical=False,
        )
        .sign(signers[0], None)
    )
    pem = serialization.Encoding.PEM
    return Issued(
        "".join(each.public_bytes(pem).decode() for each in authorities),
        certificate.public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def _authority_key(secret: bytes) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    seed = HKDF(algorithm=SHA256(), length=32, salt=None, info=CONTEXT).derive(secret)
    return Ed25519PrivateKey.from_private_bytes(seed)


def _authority(key: Ed25519PrivateKey) -> x509.Certificate:
    """The same bytes from the same key; its name holds the key's digest, so that two differ."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"pushkv {identifier.digest.hex()}")])
    return (
        x509.CertificateBuilder()
        .issuer_name(name)
        .subject_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(FROM)
        .not_valid_after(UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(
            x509.KeyUsage(
                digital_signature=False,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=True,
                crl_sign=True,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .sign(key, None)
    )
