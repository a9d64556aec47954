"""Who may publish: manifests signed with Ed25519. What keys there are, the environment says.

STREAMRL_SIGNING_KEY    a PEM file with the private key that this publisher signs with
STREAMRL_TRUSTED_KEYS   PEM files with public keys, separated by ':': what none of them has signed is refused
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.weights.errors import WeightsError
from infra.weights.manifest import Of, Signed

SIGNING, TRUSTED = "STREAMRL_SIGNING_KEY", "STREAMRL_TRUSTED_KEYS"


class Keys:
    """One to sign with, and those that are believed; without them nothing is signed, and all is believed."""

    def __init__(self, signing: str | None = None, trusted: Sequence[str] = ()) -> None:
        self._own = _loaded(signing, SIGNING, private=True) if signing else None
        self._trusted = [_loaded(path, TRUSTED, private=False) for path in trusted]

    @classmethod
    def from_env(cls) -> Keys:
        """As the environment says."""
        trusted = os.environ.get(TRUSTED, "")
        return cls(os.environ.get(SIGNING) or None, [path for path in trusted.split(os.pathsep) if path])

    def signed(self, manifest: Of) -> Of:
        """A manifest, or a keyframe, with this publisher's signature."""
        if self._own is None:
            return manifest
        signature = base64.b64encode(self._own.sign(manifest.content())).decode()
        return manifest.model_copy(update={"signature": signature})

    def check(self, manifest: Signed, where: str) -> None:
        """Raise unless somebody who is trusted has signed it, if there is anybody."""
        if not self._trusted:
            return
        if manifest.signature is None:
            raise WeightsError(f"{where} is not signed; {TRUSTED} asks for signatures")
        from cryptography.exceptions import InvalidSignature

        try:
            signature = base64.b64decode(manifest.signature, validate=True)
        except binascii.Error:
            signature = b""
        for key in self._trusted:
            try:
                key.verify(signature, manifest.content())
                return
            except InvalidSignature:
                continue
        raise WeightsError(f"{where} is signed by none of the keys in {TRUSTED}")


def _loaded(path: str, variable: str, *, private: bool) -> Any:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise WeightsError(
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
        raise WeightsError(f"{variable}: {path} can't be read as a key: {error}") from error
    if not isinstance(key, kind):
        raise WeightsError(
            f"{variable}: {path} is no Ed25519 key; make one with `openssl genpkey -algorithm ed25519`"
        )
    return key
