"""Certificates for tests: an authority in a folder, and whatever it signs."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pushkv.runtime import Certificates

PEM = serialization.Encoding.PEM
BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


class Authority:
    """Signs certificates, each in files of its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.path = folder / f"{name}.pem"
        basic = x509.BasicConstraints(ca=True, path_length=None)
        signed = self._builder(self._name, self._key).add_extension(basic, critical=True)
        self.path.write_bytes(signed.sign(self._key, hashes.SHA256()).public_bytes(PEM))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 1
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .issuer_name(self._name)
            .subject_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + timedelta(days=days))
        )

    def sign(
        self,
        name: str,
        engines: tuple[str, ...] = (),
        usages: tuple[x509.ObjectIdentifier, ...] = BOTH,
        days: int = 1,
        password: bytes | None = None,
    ) -> Certificates:
        """A certificate that names `engines`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = [x509.DNSName("host.example")]
        names += [x509.UniformResourceIdentifier(f"urn:pushkv:engine:{each}") for each in engines]
        builder = self._builder(subject, key, days).add_extension(
            x509.SubjectAlternativeName(names), critical=False
        )
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        certificate = self.folder / f"{name}.pem"
        certificate.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(PEM))
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password is not None:
            encryption = serialization.BestAvailableEncryption(password)
        private = self.folder / f"{name}.key"
        form = serialization.PrivateFormat.PKCS8
        private.write_bytes(key.private_bytes(PEM, form, encryption))
        return Certificates(self.path, certificate, private)


def own_address() -> str | None:
    """An IPv4 address of this machine that is not loopback; None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address
