"""Sealed JSON objects: canonical bytes, with a digest of all they say, and a signature if there is a key.

The signature is made first, and the digest covers it too.
"""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3

from infra.keys import KeyRing


def canonical_json(said: object) -> bytes:
    """Return the one way to write a JSON value."""
    return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()


def sealed(said: dict[str, Any], ring: KeyRing, kind: str) -> bytes:
    """Return the bytes of an object with its seal. `kind`: of the content that is signed."""
    if (signature := ring.sign(canonical_json(said), kind)) is not None:
        said = said | {"signature": signature}
    return canonical_json(said | {"digest": json_digest(said)})


def unseal(said: dict[str, Any], ring: KeyRing, where: str, kind: str) -> None:
    """Check the seal of an object, and take it off. Raises ValueError, or KeysError without a signature."""
    if said.pop("digest", None) != json_digest(said):
        raise ValueError("it is damaged: its digest is not that of its content")
    signature = said.pop("signature", None)
    ring.verify(canonical_json(said), signature if isinstance(signature, str) else None, where, kind)


def json_digest(said: dict[str, Any]) -> str:
    """Return the digest of an object without its seal, but with its signature."""
    return str(blake3(canonical_json(said)).hexdigest())
