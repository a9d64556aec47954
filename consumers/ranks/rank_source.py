"""The digest of StreamRL's own code, as far as a rank computes with it: versions don't tell commits apart."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from blake3 import blake3

_ROOMS = ("consumers", "infra", "schemas")
_BYTES = 6  # of the digest: people compare it, too


@cache
def source_digest() -> str:
    """Return the digest of the code that this process began with: of files of a checkout, or of the wheel."""
    return digest_of_source(Path(__file__).resolve().parents[2])


def digest_of_source(folder: Path) -> str:
    """Return the digest of the code in the folder of all rooms."""
    digest = blake3()
    for room in _ROOMS:
        for file in sorted((folder / room).rglob("*.py")):
            code = file.read_bytes().replace(b"from streamrl.", b"from ")  # the wheel imports by longer names
            digest.update(f"{file.relative_to(folder)}\0{len(code)}\0".encode())
            digest.update(code)
    return digest.hexdigest(_BYTES)
