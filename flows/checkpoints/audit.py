"""Audits all versions of weights: the chain of manifests, every chunk, and the bits that each path makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from infra.stores.store import Missing
from infra.weights.codec.chunks import decode_chunk
from infra.weights.copy import Copy
from infra.weights.digest import model_digests, root_digest
from infra.weights.garbage import ByteProgress
from infra.weights.manifest import Chunk, VersionManifest
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError

_KEPT, _EVERY = 32, 8  # copies of every eighth of the last 32 versions are kept: longer paths start there


class Audit:
    """An audit that reads every manifest and every chunk once."""

    def __init__(self, weights: WeightStore) -> None:
        self._weights = weights
        self._copies: dict[int, Copy] = {}  # by version: the copies that later paths may start from
        self.versions = weights.versions()
        self.size = 0  # bytes that were read
        self.wrong = 0  # problems found so far

    def problems(self, progress: ByteProgress = lambda done, whole: None) -> Iterator[str]:
        """Yield a line for each problem. `progress` is called with versions instead of bytes."""
        before: VersionManifest | None = None
        for place, version in enumerate(self.versions):
            progress(place, len(self.versions))
            try:
                manifest = self._weights.manifest(version)
            except (WeightsError, Missing) as error:
                yield self._said(str(error))
                before = None
                continue
            if before is not None and before.version == version - 1 and manifest.previous != before.hash():
                yield self._said(
                    f"version {version} was not made from the version {before.version} that is here"
                )
            yield from self._version(manifest)
            before = manifest
        progress(len(self.versions), len(self.versions))

    def _said(self, problem: str) -> str:
        self.wrong += 1
        return problem

    def _version(self, manifest: VersionManifest) -> Iterator[str]:
        try:
            manifest = self._weights.complete(manifest)
        except WeightsError as error:
            yield self._said(str(error))
        yield from self._read(manifest.files.values(), "")
        made: list[Copy] = []
        for path in manifest.paths:
            start = "nothing" if path.since is None else f"version {path.since}"
            where = f"version {manifest.version}, from {start}: "
            copy = self._start(manifest, path.since)
            if copy is None:
                yield from self._read(path.chunks, where)
                continue
            try:
                for chunk in path.chunks:
                    decode_chunk(self._file(chunk), copy.model, self._weights.chunk_key(chunk))
            except (WeightsError, Missing) as error:
                yield self._said(f"{where}{error}")
                continue
            digests = model_digests(copy.model)
            if digests != manifest.digests or root_digest(digests) != manifest.root:
                yield self._said(f"{where}this path makes other bits than the version has")
            else:
                made.append(copy)
        self._keep(manifest.version, made)

    def _start(self, manifest: VersionManifest, since: int | None) -> Copy | None:
        """Return a copy to which a path can be applied; None if the version it starts from is not kept."""
        if since is None:
            return Copy.blank(manifest.tensors)
        return Copy(bytearray(self._copies[since].file)) if since in self._copies else None

    def _keep(self, version: int, made: list[Copy]) -> None:
        self._copies = {
            number: copy for number, copy in self._copies.items()
            if number % _EVERY == 0 and number >= version - _KEPT
        }  # fmt: skip
        if made:
            self._copies[version] = made[0]

    def _read(self, chunks: Iterable[Chunk], where: str) -> Iterator[str]:
        for chunk in chunks:
            try:
                self._file(chunk)
            except (WeightsError, Missing) as error:
                yield self._said(f"{where}{error}")

    def _file(self, chunk: Chunk) -> bytes:
        data = self._weights.file(chunk)
        self.size += len(data)
        return data
