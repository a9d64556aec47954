"""Certificates for tests: an authority, a broker's for localhost, a client's with a locked key."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

KEY_PASSWORD = "opens the key"


@dataclass(frozen=True)
class Authority:
    """Signs certificates, and writes PEM files into a folder."""

    folder: Path
    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def new(cls, folder: Path, name: str) -> Authority:
        """With its certificate in NAME.pem."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = _begun(name, key, _named(name)).add_extension(x509.BasicConstraints(True, None), True)
        certificate = made.sign(key, hashes.SHA256())
        (folder / f"{name}.pem").write_bytes(_pem(certificate))
        return cls(folder, name, key, certificate)

    @property
    def file(self) -> Path:
        """Its certificate."""
        return self.folder / f"{self.name}.pem"

    def issue(self, name: str, *, hosts: tuple[str, ...] = (), days: int = 30, password: str = "") -> Path:
        """NAME.pem and NAME.key; the key is locked if there is a password. Also both in NAME.both.pem."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = _begun(name, key, self.certificate.subject, days)
        if hosts:
            names = [x509.DNSName(host) for host in hosts if not host[0].isdigit()]
            addresses = [x509.IPAddress(ipaddress.ip_address(host)) for host in hosts if host[0].isdigit()]
            made = made.add_extension(x509.SubjectAlternativeName([*names, *addresses]), False)
        certificate = _pem(made.sign(self.key, hashes.SHA256()))
        lock = (
            serialization.BestAvailableEncryption(password.encode())
            if password
            else serialization.NoEncryption()
        )
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
        (self.folder / f"{name}.pem").write_bytes(certificate)
        (self.folder / f"{name}.key").write_bytes(private)
        (self.folder / f"{name}.both.pem").write_bytes(private + certificate)
        return self.folder / f"{name}.pem"


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _begun(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name, days: int = 30
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=60))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
