"""What becomes of bytes on a bad disk or a bad line."""

from __future__ import annotations

from collections.abc import Iterator


def cuts_and_flips(raw: bytes) -> Iterator[bytes]:
    """All beginnings, and all with one other bit."""
    yield from (raw[:cut] for cut in range(len(raw)))
    for place in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[place // 8] ^= 1 << place % 8
        yield bytes(flipped)
