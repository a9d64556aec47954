"""The Parquet files of an archive: written from tables, and checked when they are read."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from infra.archive.columns import schema_of
from infra.archive.segments import ArchiveError, ArchiveFile
from schemas.wire import Message

_LEVEL = 3  # of zstd: 9 saves another 2 % and takes three times as long
_ROW_GROUP = 1 << 14
_MOST_DECODED = 1 << 30  # bytes that a file may become
_MOST_VALUES = 1 << 27  # of a column


def parquet_bytes(table: pa.Table) -> bytes:
    """Return a table as a Parquet file, with a checksum for each page.

    Strings get no dictionary: zstd makes repeated ones as small, and a reader knows from the file's footer
    how much they will take. Bytes of numbers of one weight stand together, which makes them smaller.
    """
    out = io.BytesIO()
    split = [name for name in _leaves(table.schema) if _is_split(table.schema, name)]
    pq.write_table(
        table, out, compression="zstd", compression_level=_LEVEL, use_dictionary=False,
        use_byte_stream_split=split, write_page_checksum=True, row_group_size=_ROW_GROUP,
        store_schema=False,
    )  # fmt: skip
    return out.getvalue()


def _leaves(schema: pa.Schema) -> list[str]:
    found = []
    for field in schema:
        if pa.types.is_list(field.type):
            found.append(f"{field.name}.list.element")
        elif not pa.types.is_map(field.type):
            found.append(field.name)
    return found


def _is_split(schema: pa.Schema, leaf: str) -> bool:
    form = schema.field(leaf.partition(".")[0]).type
    form = form.value_type if pa.types.is_list(form) else form
    return pa.types.is_floating(form) or form in (pa.int32(), pa.int64())


def check_digest(raw: bytes, file: ArchiveFile, where: str) -> None:
    """Raise ArchiveError unless these bytes are those of a file."""
    if len(raw) != file.size or str(blake3(raw).hexdigest()) != file.digest:
        raise ArchiveError(f"{where} is damaged: it is not the file that its segment names")


def read_table(raw: bytes, file: ArchiveFile, kind: type[Message], where: str) -> pa.Table:
    """Return the table of a file. Columns that this version of StreamRL does not know are left out."""
    try:
        opened = pq.ParquetFile(pa.BufferReader(raw), page_checksum_verification=True)
        check_footer(opened.metadata, file.rows, where)
        found, wanted = opened.schema_arrow, schema_of(kind)
        names = [name for name in wanted.names if name in found.names]
        table = opened.read(columns=names)
        table = table.select(names).cast(pa.schema([wanted.field(name) for name in names]))
        table.validate(full=True)
        return table
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise ArchiveError(f"{where} can't be read: {str(error)[:300]}") from error


def check_footer(metadata: Any, rows: int, where: str) -> None:
    """Raise ArchiveError if a file would become more than its segment says, or than there is room for."""
    if metadata.num_rows != rows:
        raise ArchiveError(f"{where} has {metadata.num_rows} rows; its segment says {rows}")
    size = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for place in range(group.num_columns):
            column = group.column(place)
            size += max(0, column.total_uncompressed_size)
            if column.has_dictionary_page and column.physical_type == "BYTE_ARRAY":
                raise ArchiveError(f"{where} was not written by StreamRL: its strings have a dictionary")
            if not 0 <= column.num_values <= _MOST_VALUES:
                raise ArchiveError(f"{where} has a column of {column.num_values:,} values")
    if size > _MOST_DECODED:
        raise ArchiveError(f"{where} would become {size:,} bytes; at most {_MOST_DECODED:,} are expected")
