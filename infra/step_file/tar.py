"""A tar file that is written and read in one go, compressed by zstd.

Python's own reader follows links, extended headers and sizes that a stranger may have made up. This one
knows plain files alone, and the caller says before which one comes next and how large it is.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import zstandard

from infra.step_file.index import StepFileError

_BLOCK = 512
_LEVEL = 3
_PIECE = 1 << 20
_WINDOW = 1 << 27  # bytes: the most memory that unpacking takes


class TarWriter:
    """Writes a compressed tar file. It is there under its name only once it is whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, path.with_name(f".{path.name}.tmp")
        self._file = self._temporary.open("wb")
        self._stream = zstandard.ZstdCompressor(_LEVEL, write_checksum=True).stream_writer(self._file)

    def __enter__(self) -> TarWriter:
        return self

    def add(self, name: str, size: int, parts: Iterable[bytes | memoryview]) -> None:
        """Add a file of `size` bytes."""
        member = tarfile.TarInfo(name)
        member.size = size
        self._stream.write(member.tobuf(tarfile.GNU_FORMAT))
        written = 0
        for part in parts:
            self._stream.write(part)
            written += len(part)
        assert written == size, f"{name} has {written} bytes instead of {size}"
        self._stream.write(b"\0" * (-size % _BLOCK))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if error is None:
                    self._stream.write(b"\0" * 2 * _BLOCK)
                    self._stream.flush(zstandard.FLUSH_FRAME)
            if error is None:
                self._temporary.replace(self._path)
        finally:
            self._temporary.unlink(missing_ok=True)


class TarReader:
    """Reads a compressed tar file whose files are known, one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise StepFileError(f"{path} can't be read: {error.strerror}") from error
        self._stream = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(self._file)

    def __enter__(self) -> TarReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def next(self, name: str, size: int | None, largest: int) -> Iterator[bytes]:
        """Yield the next file piece by piece. Raise StepFileError unless it is this one.

        `size`: bytes that it has; None: not known, but at most `largest`.
        """
        try:
            member = tarfile.TarInfo.frombuf(self._exactly(_BLOCK), "utf-8", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError, ValueError) as error:
            raise self._wrong(f"{error}, where {name} should begin") from error
        if member.name != name or member.type != tarfile.REGTYPE:
            raise self._wrong(f"{member.name[:100]!r} comes where {name} should")
        if not 0 <= member.size <= largest or (size is not None and member.size != size):
            raise self._wrong(f"{name} has {member.size:,} bytes, which it should not")
        left = member.size
        while left:
            piece = self._exactly(min(left, _PIECE))
            left -= len(piece)
            yield piece
        self._exactly(-member.size % _BLOCK)

    def whole(self, name: str, size: int | None, largest: int) -> bytes:
        """Return the next file."""
        return b"".join(self.next(name, size, largest))

    def _exactly(self, size: int) -> bytes:
        found = io.BytesIO()
        while found.tell() < size:
            try:
                piece = self._stream.read(size - found.tell())
            except zstandard.ZstdError as error:
                raise self._wrong(f"it is damaged, or no step file: {error}") from error
            if not piece:
                raise self._wrong("it ends too early: was it copied whole?")
            found.write(piece)
        return found.getvalue()

    def _wrong(self, why: str) -> StepFileError:
        return StepFileError(f"{self._path} can't be read as a step file: {why}")
