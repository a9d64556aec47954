"""The beginning of a safetensors file: eight bytes with the header's length, then the header as JSON."""

from __future__ import annotations

from mmap import mmap
from pathlib import Path

LARGEST_HEADER = 100 << 20  # bytes: the limit of safetensors itself
_LENGTH = 8  # bytes that say how long the header is


class NoHeader(ValueError):
    """The bytes can't hold the header whose length they begin with."""


def header_in(
    data: bytes | bytearray | mmap | memoryview, largest: int = LARGEST_HEADER
) -> tuple[bytes, int]:
    """Return a file's header, unparsed, and the position behind it. Raises NoHeader before it is copied."""
    length = _checked(bytes(data[:_LENGTH]), len(data), largest)
    return bytes(data[_LENGTH : _LENGTH + length]), _LENGTH + length


def header_of(file: Path, largest: int = LARGEST_HEADER) -> tuple[bytes, int]:
    """Like `header_in` for a file on disk, of which nothing else is read."""
    with file.open("rb") as opened:
        length = _checked(opened.read(_LENGTH), file.stat().st_size, largest)
        return opened.read(length), _LENGTH + length


def _checked(start: bytes, size: int, largest: int) -> int:
    length = int.from_bytes(start, "little")
    if size < _LENGTH or length > min(largest, size - _LENGTH):
        raise NoHeader(f"its {size:,} bytes can't hold the header that its first {_LENGTH} bytes describe")
    return length
