"""An archive as tables for queries: of its files only the columns and row groups are read that a query needs.

Pages carry checksums, which find damage. If archives have to be signed, each file is read whole once, and
compared with the digest that was signed.
"""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.dataset as ds

from infra.archive.archive_reading import ArchiveIndex
from infra.archive.archived_topics import BY_ITERATION, KINDS
from infra.archive.columns import schema_of
from infra.archive.lent_to_arrow import LentToArrow
from infra.archive.parquet_files import check_digest
from infra.archive.segments import ArchiveFile, Segment, file_key
from infra.stores.store import Store

_NUMBER = "iteration="


class StoredFile(io.RawIOBase):
    """An object of a store as a file that can be read anywhere."""

    def __init__(self, store: Store, key: str, size: int) -> None:
        self._store, self._key, self._size, self._at = store, key, size, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to another position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes."""
        left = max(0, self._size - self._at)
        count = left if size is None or size < 0 else min(size, left)
        found = self._store.get_part(self._key, self._at, count) if count else b""
        self._at += count
        return found


def archived_table(index: ArchiveIndex, newest: Segment | None, short: str, lent: LentToArrow) -> ds.Dataset:
    """Return the records of a topic that are archived up to a segment, as a table."""
    files = [file for segment in index.up_to(newest) for file in segment.files if file.topic == short]
    return ds.FileSystemDataset(
        [_fragment(index, file, lent) for file in files], schema_of(KINDS[short]), _form()
    )


def _form() -> ds.ParquetFileFormat:
    checked = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    return ds.ParquetFileFormat(default_fragment_scan_options=checked)


def _fragment(index: ArchiveIndex, file: ArchiveFile, lent: LentToArrow) -> ds.Fragment:
    key = file_key(index.run, file)
    if index.signed:
        check_digest(index.store.get(key, file.size), file, f"{index.store.url}/{key}")
    opened = pa.PythonFile(lent.lend(StoredFile(index.store, key, file.size)), mode="r")
    _, _, number = file.name.split("/")[1].partition(_NUMBER)
    if file.topic in BY_ITERATION and number.isdigit():
        return _form().make_fragment(opened, partition_expression=ds.field("iteration") == int(number))
    return _form().make_fragment(opened)
