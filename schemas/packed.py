"""Packs records that are kept for ever: one zstd frame, with a dictionary that a record names by its hash.

    0   magic       b"SRL\\0"
    4   u16         2, the format of this envelope
    6   u16         reserved, zero
    8   u32         the dictionary's hash: its file is schemas/dictionaries/<hash>.bin
    12  zstd frame  a record of format 1 (`schemas.wire`)

A dictionary is text that nearly all records have: names of fields and metrics, tolerances. Its file never
changes, since old records need it; another one is another file.

Nothing is unpacked before its size is known. A record may become at most 32 times as large, and 4 KiB more:
so whoever holds many records knows how much memory they may take.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from functools import cache
from pathlib import Path

import zstandard

PACKED_FORMAT = 2
LARGEST_PLAIN = 8 << 20  # bytes that a record may become: as many as a record on a bus may have
_MOST_TIMES = 32
_WORDS = 4 << 10
_ENVELOPE = struct.Struct("<4sHHI")
_LEVEL = 3  # 6 saves another 3 % of a step's record, and takes three times as long
_FOLDER = Path(__file__).parent / "dictionaries"
_own = threading.local()  # neither a compressor nor a decompressor may be used by two threads at once


class NotUnpacked(ValueError):
    """A packed record can't be unpacked; the message says why."""


def packed_record(plain: bytes, dictionary: str) -> bytes:
    """Return a record packed with a dictionary; or as it is, if it would become larger than readers take."""
    frame = _compressor(dictionary).compress(plain)
    if len(plain) > _most(len(frame)):
        return plain
    return _ENVELOPE.pack(plain[:4], PACKED_FORMAT, 0, int(dictionary, 16)) + frame


def _most(size: int) -> int:
    """Return how large a record may be whose frame has this size."""
    return min(LARGEST_PLAIN, _MOST_TIMES * size + _WORDS)


def is_packed(raw: bytes | memoryview, magic: bytes) -> bool:
    """Whether a record begins as a packed one."""
    return len(raw) >= _ENVELOPE.size and _ENVELOPE.unpack_from(raw)[:2] == (magic, PACKED_FORMAT)


def unpacked_record(raw: bytes | memoryview) -> bytes:
    """Return the record in a packed one. Raises NotUnpacked."""
    dictionary, frame = f"{_ENVELOPE.unpack_from(raw)[3]:08x}", memoryview(raw)[_ENVELOPE.size :]
    try:
        size = zstandard.frame_content_size(frame)
        if size < 0:
            raise NotUnpacked("it does not say how large it becomes")
        if size > _most(len(frame)):
            raise NotUnpacked(
                f"its {len(frame)} bytes would become {size}; at most {_most(len(frame))} are expected"
            )
        plain: bytes = _decompressor(dictionary).decompress(frame, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise NotUnpacked(str(error)) from None
    return plain


@cache
def _content(dictionary: str) -> bytes:
    """Return the content of a dictionary, which is what its name says."""
    path = _FOLDER / f"{dictionary}.bin"
    if not path.is_file():
        raise NotUnpacked(
            f"it is packed with dictionary {dictionary}, which this version of StreamRL does not have: "
            "upgrade the reader"
        )
    found = path.read_bytes()
    if hash_of_dictionary(found) != dictionary:
        raise NotUnpacked(f"{path} is damaged: install this version of StreamRL again")
    return found


def hash_of_dictionary(content: bytes) -> str:
    """Return the name of a dictionary."""
    return hashlib.blake2b(content, digest_size=4).hexdigest()


def _dictionary(name: str) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(_content(name), dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _compressor(dictionary: str) -> zstandard.ZstdCompressor:
    known: dict[str, zstandard.ZstdCompressor] = _own.__dict__.setdefault("compressors", {})
    if dictionary not in known:
        known[dictionary] = zstandard.ZstdCompressor(level=_LEVEL, dict_data=_dictionary(dictionary))
    return known[dictionary]


def _decompressor(dictionary: str) -> zstandard.ZstdDecompressor:
    known: dict[str, zstandard.ZstdDecompressor] = _own.__dict__.setdefault("decompressors", {})
    if dictionary not in known:
        known[dictionary] = zstandard.ZstdDecompressor(dict_data=_dictionary(dictionary))
    return known[dictionary]
