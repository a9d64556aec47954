"""Frames, through pipes and connections between ranks.

frame   u64 length, little-endian, then so many bytes: one message
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from infra.errors import Explained

FRAME_LENGTH = struct.Struct("<Q")
_LARGEST = 1 << 32  # bytes: msgpack holds no more in one value


def frame_of(data: msgspec.Struct) -> bytes:
    """Return a message as a frame."""
    raw = msgspec.msgpack.encode(data)
    return FRAME_LENGTH.pack(len(raw)) + raw


def write_frame(file: BinaryIO, data: msgspec.Struct) -> None:
    """Write a frame and flush."""
    file.write(frame_of(data))
    file.flush()


def read_frame(file: BinaryIO, largest: int = _LARGEST) -> bytes | None:
    """Read the next frame; None if the other side is gone. Raise Explained if it would be too large."""
    head = file.read(FRAME_LENGTH.size)
    if len(head) < FRAME_LENGTH.size:
        return None
    (size,) = FRAME_LENGTH.unpack(head)
    if size > largest:
        raise Explained(f"a message between ranks would have {size} bytes; {largest} are allowed")
    data = file.read(size)
    return data if len(data) == size else None


def kernel_time(seconds: float) -> bytes:
    """Return whole seconds as the kernel takes them for the deadlines of a connection."""
    return struct.pack("ll", int(seconds), 0)
