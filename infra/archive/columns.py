"""Records as the columns of a table, and back, byte for byte.

The fields of a message are columns of their own types. A record that its columns alone do not give back to
the last byte is kept raw beside them: it can't be read, or an older version of StreamRL has written it. A
record that an older version has archived comes back as this version writes that message. A packed one comes
back as it would be without: whoever reads it would unpack it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
from msgspec import Meta

from infra.bus import Record
from schemas.wire import Message, RawArray, Unreadable, decode, encode

PARTITION, OFFSET, KEY = "log_partition", "log_offset", "log_key"
RAW = "log_value"  # the record itself, where the columns do not give it back
FAULT = "log_fault"  # why there are no columns; null: there are
_PLACE = [pa.field(PARTITION, pa.int32(), False), pa.field(OFFSET, pa.int64(), False)]
_REST = [pa.field(KEY, pa.binary(), False), pa.field(RAW, pa.binary()), pa.field(FAULT, pa.string())]
_UNSIGNED = {"seed"}  # the only numbers that may be larger than 2^63
_PLAIN = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_(), bytes: pa.binary()}


@cache
def schema_of(kind: type[Message]) -> pa.Schema:
    """Return the columns of a kind of messages."""
    hints = get_type_hints(kind, include_extras=True)
    fields = [pa.field(name, _column(name, hints[name])) for name in kind.__struct_fields__]
    return pa.schema([*_PLACE, *fields, *_REST])


def _column(name: str, hint: Any) -> pa.DataType:
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        arrays = [mark for mark in marks if isinstance(mark, RawArray)]
        return pa.list_(pa.type_for_alias(arrays[0].dtype)) if arrays else _column(name, inner)
    if get_origin(hint) is list:
        return pa.list_(_column("", get_args(hint)[0]))
    if get_origin(hint) is dict:
        key, value = get_args(hint)
        return pa.map_(_column("", key), _column("", value))
    if name in _UNSIGNED:
        return pa.uint64()
    if get_origin(hint) is Union or hint not in _PLAIN:
        raise TypeError(f"field {name} has type {hint}, for which there is no column")
    return _PLAIN[hint]


def to_table(
    records: Sequence[Record], kind: type[Message], names: Collection[str] | None = None
) -> pa.Table:  # fmt: skip
    """Return records as a table, in the order of their places. `names`: of its columns; None: all."""
    records = sorted(records, key=lambda one: (one.partition, one.offset))
    messages, faults = _read(records, kind)
    schema, columns = schema_of(kind), list[pa.Array]()
    if names is not None:
        schema = pa.schema([field for field in schema if field.name in names])
    for field in schema:
        values = _values_of(field.name, records, messages, faults)
        whole = field.name in kind.__struct_fields__ and _is_array(kind, field.name)
        columns.append(_arrays(values, field.type) if whole else pa.array(values, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _values_of(
    name: str, records: Sequence[Record], messages: Sequence[Message | None], faults: Sequence[str | None]
) -> Sequence[Any]:
    """Return the values of a column."""
    if name == PARTITION:
        return [one.partition for one in records]
    if name == OFFSET:
        return [one.offset for one in records]
    if name == KEY:
        return [one.key for one in records]
    if name == FAULT:
        return faults
    if name == RAW:
        both = zip(records, messages, strict=True)
        return [
            None if found is not None and encode(found) == one.value else one.value for one, found in both
        ]
    return [None if one is None else getattr(one, name) for one in messages]


def _read(
    records: Sequence[Record], kind: type[Message]
) -> tuple[list[Message | None], list[str | None]]:  # fmt: skip
    """Return the messages of records, and why columns can't hold one."""
    messages, faults = list[Message | None](), list[str | None]()
    for record in records:
        try:
            messages.append(decode(record.value, kind))
            faults.append(None)
        except Unreadable as error:
            messages.append(None)
            faults.append(_utf8(str(error)))
        except Exception as error:  # nothing that a record holds ends a pass
            messages.append(None)
            faults.append(_utf8(f"it can't be understood: {type(error).__name__}: {error}"))
    for name, (low, high) in _limits(kind).items():
        numbers = [getattr(one, name) for one in messages if one is not None]
        if not numbers or (low <= min(numbers) and max(numbers) < high):
            continue
        for row, one in enumerate(messages):
            if one is not None and not low <= getattr(one, name) < high:
                messages[row], faults[row] = None, f"{name} is {getattr(one, name)}, which no column holds"
    return messages, faults


def _utf8(text: str) -> str:
    return text.encode(errors="replace").decode()


@cache
def _limits(kind: type[Message]) -> dict[str, tuple[int, int]]:
    """Return, by field, the smallest number that its column holds, and the first one that is too large.

    Fields are left out that `decode` keeps within smaller bounds.
    """
    hints, found = get_type_hints(kind, include_extras=True), dict[str, tuple[int, int]]()
    for name in kind.__struct_fields__:
        form = schema_of(kind).field(name).type
        marks = get_args(hints[name])[1:] if get_origin(hints[name]) is Annotated else ()
        bounded = any(isinstance(one, Meta) and None not in (one.ge, one.le) for one in marks)
        if pa.types.is_integer(form) and not bounded:
            found[name] = (0, 2**64) if form == pa.uint64() else (-(2**63), 2**63)
    return found


@cache
def _is_array(kind: type[Message], name: str) -> bool:
    hint = get_type_hints(kind, include_extras=True)[name]
    return get_origin(hint) is Annotated and any(isinstance(mark, RawArray) for mark in get_args(hint))


def _arrays(values: Sequence[np.ndarray | None], form: pa.DataType) -> pa.Array:
    """Return arrays as one column: all their numbers end to end, and where each begins."""
    held = [value for value in values if value is not None]
    sizes = np.array([0 if value is None else value.size for value in values], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]).astype(np.int32)
    numbers = np.concatenate(held) if held else np.zeros(0)
    gaps = pa.array([value is None for value in values]) if len(held) < len(values) else None
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(numbers.astype(form.value_type.to_pandas_dtype(), copy=False)),
        type=form, mask=gaps,
    )  # fmt: skip


def to_records(table: pa.Table, topic: str, kind: type[Message]) -> Iterator[Record]:
    """Yield the records of a table as they were in the log, but none of them packed.

    `topic`: the name of their topic.

    A field without a column, or without a value there, is younger than the file: it has its default.
    """
    places = zip(table[PARTITION].to_pylist(), table[OFFSET].to_pylist(), strict=True)
    keys, raws = table[KEY].to_pylist(), table[RAW].to_pylist()
    fields = {
        name: _values(table[name], array=_is_array(kind, name))
        for name in kind.__struct_fields__
        if name in table.column_names
    }
    for row, ((partition, offset), key, raw) in enumerate(zip(places, keys, raws, strict=True)):
        if (value := raw) is None:
            said = {name: of(row) for name, of in fields.items()}
            known = {name: one for name, one in said.items() if one is not None}
            value = encode(kind(**known), packs=False)
        yield Record(topic, partition, offset, key, value)


def _values(column: pa.ChunkedArray, *, array: bool) -> Callable[[int], Any]:
    """Return a function that gives the value of a row."""
    if not array:
        form = column.type
        found = column.to_pylist()
        if pa.types.is_map(form):
            return lambda row: dict(found[row])
        return lambda row: found[row]
    whole = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    offsets, numbers = whole.offsets.to_numpy(), whole.values.to_numpy(zero_copy_only=False)
    return lambda row: numbers[offsets[row] : offsets[row + 1]]
