"""Ed25519 signatures of bytes. The environment names the keys.

STREAMRL_SIGNING_KEY    a PEM file with the private key that this process signs with
STREAMRL_TRUSTED_KEYS   PEM files with public keys, separated by ':'; content that none of them has signed is
                        refused

Without a signing key nothing is signed; without trusted keys everything is believed.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from infra.errors import Explained

SIGNING, TRUSTED = "STREAMRL_SIGNING_KEY", "STREAMRL_TRUSTED_KEYS"


class KeysError(Explained):
    """A key can't be used, or content is not signed by a trusted key."""


class KeyRing:
    """The key to sign with, if there is one, and the keys that are trusted."""

    error: ClassVar[type[Explained]] = KeysError

    def __init__(self, signing: str | None = None, trusted: Sequence[str] = ()) -> None:
        self._own = self._loaded(signing, SIGNING, private=True) if signing else None
        self._trusted = [self._loaded(path, TRUSTED, private=False) for path in trusted]

    @property
    def trusts(self) -> bool:
        """Whether content has to be signed."""
        return bool(self._trusted)

    @property
    def signs(self) -> bool:
        """Whether there is a key to sign with."""
        return self._own is not None

    def sign(self, content: bytes, kind: str = "") -> str | None:
        """Return the signature of some bytes as text; None without a signing key.

        `kind`, such as `run` or `checkpoint`, is signed with the bytes, so that content signed as one kind of
        thing is not accepted as another.
        """
        if self._own is None:
            return None
        return base64.b64encode(self._own.sign(_of_kind(content, kind))).decode()

    def verify(self, content: bytes, signature: str | None, where: str, kind: str = "") -> None:
        """Raise unless a trusted key has signed these bytes. Without trusted keys, accept everything.

        `where` names the content in the error; `kind` is that of `sign`.
        """
        if not self._trusted:
            return
        if not signature:
            raise self.error(f"{where} is not signed; {TRUSTED} asks for signatures")
        from cryptography.exceptions import InvalidSignature

        try:
            raw = base64.b64decode(signature, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        for key in self._trusted:
            try:
                key.verify(raw, _of_kind(content, kind))
                return
            except InvalidSignature:
                continue
        raise self.error(f"{where} is signed by none of the keys in {TRUSTED}")

    def _loaded(self, path: str, variable: str, *, private: bool) -> Any:
        try:
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives import serialization
            from cryptography.hazmat.primitives.asymmetric import ed25519
        except ImportError as error:
            raise self.error(
                f"{variable} is set, which needs cryptography: pip install 'streamrl[security]'"
            ) from error
        kind = ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey
        try:
            data = Path(path).read_bytes()
            key = (
                serialization.load_pem_private_key(data, password=None)
                if private
                else serialization.load_pem_public_key(data)
            )
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise self.error(f"{variable}: {path} can't be read as a key: {error}") from error
        if not isinstance(key, kind):
            raise self.error(
                f"{variable}: {path} is no Ed25519 key; make one with `openssl genpkey -algorithm ed25519`"
            )
        return key


def ring_from_env() -> KeyRing:
    """Return the key ring that the environment names."""
    return KeyRing(*named_in_env())


def named_in_env() -> tuple[str | None, list[str]]:
    """Return the file of the signing key, None if there is none, and the files of the trusted keys."""
    trusted = os.environ.get(TRUSTED, "")
    return os.environ.get(SIGNING) or None, [path for path in trusted.split(os.pathsep) if path]


def _of_kind(content: bytes, kind: str) -> bytes:
    return f"streamrl {kind}\0".encode() + content if kind else content
