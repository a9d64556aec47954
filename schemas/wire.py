"""The versioned codec of everything that travels over Kafka: a small header, then raw arrays. No pickle.

    0   magic   b"SRL\\0"
    4   u16     format of this envelope
    6   u16     reserved, zero
    8   u32     length of the header
    12  u32     length of the arrays
    16  header  msgpack: {"kind", "version", "fields", "arrays": [[name, dtype, shape, offset], ...]}
    ..  arrays  raw little-endian values, each aligned to 8 bytes from the start of the record

Reading never copies an array: what comes back are read-only numpy views into the record.
"""

from __future__ import annotations

import math
import struct
import sys
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

MAGIC = b"SRL\0"
FORMAT = 1
_ENVELOPE = struct.Struct("<4sHHII")
_ALIGN = 8
_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("int8", "uint8", "int16", "int32", "int64", "uint64", "float32", "float64")
}


class Unreadable(ValueError):
    """A record that can't be read; the message is the reason that goes to the dead-letter topic."""


class Array:
    """Marks a field that travels as a raw one-dimensional array of one dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


Int8s = Annotated[np.ndarray, Array("int8")]
Int16s = Annotated[np.ndarray, Array("int16")]
Int32s = Annotated[np.ndarray, Array("int32")]
Int64s = Annotated[np.ndarray, Array("int64")]
UInt64s = Annotated[np.ndarray, Array("uint64")]
Float32s = Annotated[np.ndarray, Array("float32")]
Float64s = Annotated[np.ndarray, Array("float64")]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages. A subclass names its kind and its schema version.

    A reader accepts its own version and older ones: a new field needs a default, anything else a new version.
    """

    KIND: ClassVar[str] = ""
    VERSION: ClassVar[int] = 1

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)


MessageT = TypeVar("MessageT", bound=Message)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray) and left.dtype == right.dtype and left.tobytes() == right.tobytes()
        )
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


_array_fields_cache: dict[type, dict[str, str]] = {}


def _array_fields(kind: type[Message]) -> dict[str, str]:
    known = _array_fields_cache.get(kind)
    if known is None:
        known = {}
        for name, hint in get_type_hints(kind, include_extras=True).items():
            if get_origin(hint) is Annotated:
                marks = [mark for mark in get_args(hint) if isinstance(mark, Array)]
                if marks:
                    known[name] = marks[0].dtype
        _array_fields_cache[kind] = known
    return known


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    arrays = _array_fields(type(message))
    table: list[list[Any]] = []
    parts: list[bytes] = []
    offset = 0
    for name, dtype in arrays.items():
        value = np.ascontiguousarray(getattr(message, name), dtype=_DTYPES[dtype])
        if value.ndim != 1:
            raise ValueError(f"{type(message).__name__}.{name} has {value.ndim} dimensions; one is allowed")
        raw = value.tobytes()
        table.append([name, dtype, value.size, offset])
        padded = -len(raw) % _ALIGN
        parts += [raw, b"\0" * padded]
        offset += len(raw) + padded
    fields = {name: getattr(message, name) for name in message.__struct_fields__ if name not in arrays}
    header = msgspec.msgpack.encode(
        {"kind": message.KIND, "version": message.VERSION, "fields": fields, "arrays": table}
    )
    gap = -(_ENVELOPE.size + len(header)) % _ALIGN
    body = b"".join(parts)
    return b"".join([_ENVELOPE.pack(MAGIC, FORMAT, 0, len(header), len(body)), header, b"\0" * gap, body])


class _Header(msgspec.Struct):
    kind: str
    version: int
    fields: dict[str, Any]
    arrays: list[tuple[str, str, int, int]]


def decode(raw: bytes | memoryview, expected: type[MessageT]) -> MessageT:
    """The message in a record. Raises Unreadable with a reason that a person can act on."""
    header, start = _open(raw)
    if header.kind != expected.KIND:
        raise Unreadable(f"this is a {header.kind!r} record where a {expected.KIND!r} is expected")
    if header.version > expected.VERSION:
        raise Unreadable(
            f"{header.kind} schema {header.version} is newer than {expected.VERSION}, the newest that this "
            "version of StreamRL reads: upgrade the reader"
        )
    wanted = _array_fields(expected)
    fields = dict(header.fields)
    for name, dtype, count, offset in header.arrays:
        if wanted.get(name) is None:
            continue  # a field of an older schema that is gone
        if dtype != wanted[name]:
            raise Unreadable(f"field {name} has type {dtype}; {wanted[name]} is expected")
        kind = _DTYPES[dtype]
        if count < 0 or offset < 0 or start + offset + count * kind.itemsize > len(raw):
            raise Unreadable(f"field {name} reaches past the end of the record")
        view = np.frombuffer(raw, dtype=kind, count=count, offset=start + offset)
        view.flags.writeable = False
        fields[name] = view
    try:
        return msgspec.convert(fields, expected)
    except (msgspec.ValidationError, TypeError) as error:
        raise Unreadable(f"{header.kind} schema {header.version}: {error}") from error


def _open(raw: bytes | memoryview) -> tuple[_Header, int]:
    """Check the envelope; the header and where the arrays start."""
    if sys.byteorder != "little":  # pragma: no cover - no such machine runs vLLM
        raise Unreadable("big-endian machines are not supported")
    if len(raw) < _ENVELOPE.size:
        raise Unreadable(f"{len(raw)} bytes are too few for a StreamRL record")
    magic, form, _, header_size, body_size = _ENVELOPE.unpack_from(raw)
    if magic != MAGIC:
        raise Unreadable("not a StreamRL record: it does not begin with the magic bytes")
    if form != FORMAT:
        raise Unreadable(f"envelope format {form} is unknown; this version of StreamRL reads {FORMAT}")
    start = _ENVELOPE.size + header_size
    start += -start % _ALIGN
    if start + body_size != len(raw):
        raise Unreadable(
            f"the record has {len(raw)} bytes and says {start + body_size}: truncated or damaged"
        )
    try:
        header = msgspec.msgpack.decode(
            memoryview(raw)[_ENVELOPE.size : _ENVELOPE.size + header_size], type=_Header
        )
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreadable(f"the header can't be read: {error}") from error
    return header, start
