"""What all unit tests do without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_disks() -> None:
    """No unit test cuts the power: what a process has written stays, also when it is killed."""
    os.fsync = lambda fd: None


@pytest.fixture
def key_files(tmp_path: Path) -> dict[str, str]:
    """Files of two pairs of keys: `own`, `own.pub`, `other` and `other.pub`."""
    files = {}
    for name in ("own", "other"):
        key = ed25519.Ed25519PrivateKey.generate()
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        public.write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        files |= {name: str(private), f"{name}.pub": str(public)}
    return files
