"""The versioned codec of everything that travels over Kafka: a small header, then raw arrays. No pickle.

    0   magic   b"SRL\\0"
    4   u16     format of this envelope
    6   u16     reserved, zero
    8   u32     length of the header
    12  u32     length of the arrays
    16  header  msgpack: {"kind", "version", "fields", "arrays": [[name, dtype, shape, offset], ...]}
    ..  arrays  raw little-endian values, each aligned to 8 bytes from the start of the record

A message with a DICTIONARY travels packed (`schemas.packed`). Its arrays of differences have their first
value, then the difference of each other one to the one before, in the narrowest type for them: dtype "+int8".

Reading copies no other array: decoded arrays are read-only numpy views into the record. Nothing is built
before its type and size are known: fields are decoded straight into the types of the message, arrays and text
are bounded by the record, and numbers by their own fields (`schemas.messages`).
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from schemas.packed import NotUnpacked, is_packed, packed_record, unpacked_record

MAGIC = b"SRL\0"
FORMAT = 1
_ENVELOPE = struct.Struct("<4sHHII")
_ALIGN = 8
_SUMMED = "+"  # before the dtype of differences
_WIDTHS = ("int8", "int16", "int32", "int64")
_MOST_SUMMED = 32 << 20  # bytes of the arrays that a record's differences may become
_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("int8", "uint8", "int16", "int32", "int64", "uint64", "float32", "float64")
}


class Unreadable(ValueError):
    """A record can't be read. The error's message is the reason that goes to the dead-letter topic."""


class Contradictory(Unreadable):
    """A record holds a message of the right kind, but its fields contradict each other."""


class RawArray:
    """Marks a field that travels as a raw one-dimensional array of one dtype, or as its differences."""

    def __init__(self, dtype: str, *, differences: bool = False) -> None:
        self.dtype, self.differences = dtype, differences


Int8s = Annotated[np.ndarray, RawArray("int8")]
Int16s = Annotated[np.ndarray, RawArray("int16")]
Int32s = Annotated[np.ndarray, RawArray("int32")]
Int64s = Annotated[np.ndarray, RawArray("int64")]
UInt64s = Annotated[np.ndarray, RawArray("uint64")]
Float32s = Annotated[np.ndarray, RawArray("float32")]
Float64s = Annotated[np.ndarray, RawArray("float64")]
Int16Differences = Annotated[np.ndarray, RawArray("int16", differences=True)]
Int32Differences = Annotated[np.ndarray, RawArray("int32", differences=True)]
Int64Differences = Annotated[np.ndarray, RawArray("int64", differences=True)]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages. A subclass names its kind and its schema version.

    A reader accepts its own version and older ones: a new field needs a default, anything else a new version.
    """

    KIND: ClassVar[str] = ""
    VERSION: ClassVar[int] = 1
    DICTIONARY: ClassVar[str] = ""  # with which it is packed; empty: it is not packed
    ON_WIRE: ClassVar[Mapping[str, str]] = {}  # fields that have another name in records, as they always had
    LEFT_OUT: ClassVar[frozenset[str]] = frozenset()  # fields that records lack while they are empty

    def wrong(self) -> str:
        """Return why the fields contradict each other; empty if they do not. `decode` calls this."""
        return ""

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


@cache
def _array_fields(kind: type[Message]) -> dict[str, RawArray]:
    known = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is Annotated:
            marks = [mark for mark in get_args(hint) if isinstance(mark, RawArray)]
            if marks:
                known[name] = marks[0]
    return known


def encode(message: Message, *, packs: bool = True) -> bytes:
    """Return the bytes of a message. `packs`: whether it is packed, if it has a dictionary."""
    if packs and message.DICTIONARY:
        return packed_record(_laid_out(message, differences=True), message.DICTIONARY)
    return _laid_out(message, differences=False)


def _laid_out(message: Message, *, differences: bool) -> bytes:
    arrays = _array_fields(type(message))
    table: list[list[Any]] = []
    parts: list[bytes] = []
    offset = 0
    for name, mark in arrays.items():
        value, dtype = np.ascontiguousarray(getattr(message, name), dtype=_DTYPES[mark.dtype]), mark.dtype
        if value.ndim != 1:
            raise ValueError(f"{type(message).__name__}.{name} has {value.ndim} dimensions; one is allowed")
        if differences and mark.differences:
            value, dtype = _differences(value)
        raw = value.tobytes()
        table.append([name, dtype, value.size, offset])
        padded = -len(raw) % _ALIGN
        parts += [raw, b"\0" * padded]
        offset += len(raw) + padded
    fields = {
        message.ON_WIRE.get(name, name): getattr(message, name)
        for name in message.__struct_fields__
        if name not in arrays and (name not in message.LEFT_OUT or getattr(message, name))
    }
    header = msgspec.msgpack.encode(
        {"kind": message.KIND, "version": message.VERSION, "fields": fields, "arrays": table}
    )
    gap = -(_ENVELOPE.size + len(header)) % _ALIGN
    body = b"".join(parts)
    envelope = _ENVELOPE.pack(MAGIC, FORMAT, 0, len(header), len(body))
    return b"".join([envelope, header, b"\0" * gap, body])


def _differences(values: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the differences of numbers to those before them, and their dtype. Sums of them wrap likewise."""
    found = values.astype(np.int64)
    found[1:] -= values[:-1]
    low, high = (int(found.min()), int(found.max())) if found.size else (0, 0)
    narrow = next(one for one in _WIDTHS if np.iinfo(one).min <= low and high <= np.iinfo(one).max)
    return found.astype(_DTYPES[narrow]), f"{_SUMMED}{narrow}"


class _Header(msgspec.Struct):
    kind: str
    version: int
    fields: msgspec.Raw
    arrays: Annotated[list[tuple[str, str, int, int]], msgspec.Meta(max_length=64)]


_header_decoder = msgspec.msgpack.Decoder(_Header)


@cache
def _field_decoder(kind: type[Message]) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder for a message's fields that are no arrays, each to its own type."""
    arrays, hints = _array_fields(kind), get_type_hints(kind, include_extras=True)
    fields: list[Any] = [
        (
            field.name,
            hints[field.name],
            msgspec.field(default=field.default, name=kind.ON_WIRE.get(field.name)),
        )
        for field in msgspec.structs.fields(kind)
        if field.name not in arrays
    ]
    return msgspec.msgpack.Decoder(msgspec.defstruct(f"{kind.__name__}Fields", fields, kw_only=True))


def decode(raw: bytes | memoryview, expected: type[MessageT]) -> MessageT:
    """Return the message in a record. Raises only Unreadable, with a reason that a person can act on."""
    if expected.DICTIONARY and is_packed(raw, MAGIC):
        try:
            raw = unpacked_record(raw)
        except NotUnpacked as error:
            raise Unreadable(f"the record can't be unpacked: {str(error)[:500]}") from None
    header, start = _open(raw)
    if header.kind != expected.KIND:
        raise Unreadable(f"this is a {header.kind[:64]!r} record where a {expected.KIND!r} is expected")
    if header.version > expected.VERSION:
        raise Unreadable(
            f"{header.kind} schema {header.version} is newer than {expected.VERSION}, the newest that this "
            "version of StreamRL reads: upgrade the reader"
        )
    fields = _arrays(raw, header, start, expected)
    try:
        plain = _field_decoder(expected).decode(header.fields)
        message = expected(**fields, **msgspec.structs.asdict(plain))
    except (msgspec.DecodeError, TypeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        said = str(error)[:500]
        for name, on_wire in expected.ON_WIRE.items():
            said = said.replace(f"$.{on_wire}`", f"$.{name}`")
        raise Unreadable(f"{header.kind} schema {header.version}: {said}") from None
    if wrong := message.wrong():
        raise Contradictory(wrong)
    return message


def _arrays(raw: bytes | memoryview, header: _Header, start: int, expected: type[Message]) -> dict[str, Any]:
    """Return the arrays of a record, as views into it, and sums of its differences."""
    wanted, found, size, summed = _array_fields(expected), dict[str, Any](), len(raw), 0
    if not isinstance(raw, bytes):
        raw = memoryview(raw).toreadonly()
    for name, dtype, count, offset in header.arrays:
        mark = wanted.get(name)
        if mark is None:
            continue  # a field of an older schema that is gone
        sums = mark.differences and dtype[:1] == _SUMMED and dtype[1:] in _WIDTHS
        if dtype != mark.dtype and not sums:
            raise Unreadable(f"field {name} has type {dtype[:64]}; {mark.dtype} is expected")
        kind = _DTYPES[dtype[1:] if sums else dtype]
        if count < 0 or offset < 0 or start + offset + count * kind.itemsize > size:
            raise Unreadable(f"field {name} reaches past the end of the record")
        if offset % _ALIGN:
            raise Unreadable(f"field {name} is not aligned to {_ALIGN} bytes")
        found[name] = np.frombuffer(raw, kind, count, start + offset)
        if sums:
            summed += count * _DTYPES[mark.dtype].itemsize
            if summed > _MOST_SUMMED:
                raise Unreadable(f"its differences become more than {_MOST_SUMMED} bytes of numbers")
            found[name] = np.add.accumulate(found[name], dtype=_DTYPES[mark.dtype])
            found[name].flags.writeable = False
    return found


def _open(raw: bytes | memoryview) -> tuple[_Header, int]:
    """Check the envelope. Returns the header, and where the arrays start."""
    if sys.byteorder != "little":  # pragma: no cover - no such machine runs vLLM
        raise Unreadable("big-endian machines are not supported")
    if len(raw) < _ENVELOPE.size:
        raise Unreadable(f"{len(raw)} bytes are too few for a StreamRL record")
    magic, form, _, header_size, body_size = _ENVELOPE.unpack_from(raw)
    if magic != MAGIC:
        raise Unreadable("this is not a StreamRL record: it does not begin with the magic bytes")
    if form != FORMAT:
        raise Unreadable(f"envelope format {form} is unknown; this version of StreamRL reads {FORMAT}")
    start = _ENVELOPE.size + header_size
    start += -start % _ALIGN
    if start + body_size != len(raw):
        raise Unreadable(
            f"the record has {len(raw)} bytes; by its header it has {start + body_size}: it is truncated or "
            "damaged"
        )
    try:
        header = _header_decoder.decode(memoryview(raw)[_ENVELOPE.size : _ENVELOPE.size + header_size])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise Unreadable(f"the header can't be read: {str(error)[:500]}") from None
    return header, start
