"""Versions of the weights in the object store.

runs/<run>/weights/chunks/<hash>                changes, whole tensors, or a file beside the tensors
runs/<run>/weights/v000012/manifest.json        put last and never overwritten: the only commit point
runs/<run>/weights/keyframes/v000012.json       a keyframe that a version was given later
runs/<run>/weights/leases/<reader>.json         which version somebody reads or publishes, see `leases.py`
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from infra import choices
from infra.stores.orphans import sweep
from infra.stores.store import Exists, Missing, Store
from infra.weights import limits
from infra.weights.bits import Model
from infra.weights.cheapest_paths import Paths, cheapest, cost
from infra.weights.codec.chunks import decode_chunk, encode_model, in_threads
from infra.weights.codec.covered import Covered
from infra.weights.codec.decoding import StaleTile
from infra.weights.codec.scan import load_scanner
from infra.weights.copy import Copy
from infra.weights.digest import model_digests, root_digest
from infra.weights.garbage import COLLECT_GRACE_S, ByteProgress, Collected, collect_garbage, manifest_key
from infra.weights.gpu_bits import model_where_it_lies
from infra.weights.keyframes import Keyframes
from infra.weights.leases import Lease
from infra.weights.manifest import Chunk, Path, Tensor, VersionManifest, parsed
from infra.weights.objects import UNDER_WAY, Objects
from infra.weights.series import Held, Series
from infra.weights.signing import Keys
from infra.weights.weights_error import WeightsError

if TYPE_CHECKING:
    import torch

    from infra.weights.inspection import Inspected

_MOST_THREADS = 8

_log = logging.getLogger("streamrl.weights")


class WeightStore:
    """Publishes and fetches the versions of a run, or of any other series."""

    def __init__(
        self, store: Store, run: str, *, prefix: str | None = None, keys: Keys | None = None,
        threads: int | None = None, near: Callable[[str], bool] = lambda key: False,
        check: Callable[[VersionManifest], None] = lambda manifest: None,
    ) -> None:  # fmt: skip
        """`near` says by key which objects are cheap to read. `threads` encode and decode, see `_threads`.

        `check` raises if a version can't be one of the model that its reader knows.
        """
        self._check = check
        self._store, self._run, self._threads, self._near = store, run, threads or _threads(), near
        self._prefix = prefix or f"runs/{run}/weights"
        self._keys = keys or Keys.from_env()
        self._objects = Objects(store, self._prefix)
        self._keyframes = Keyframes(store, self._prefix, self._keys)
        self._series = Series()
        self._files: tuple[Mapping[str, bytes], Mapping[str, Chunk]] | None = None

    def manifest_key(self, version: int) -> str:
        """Return the key of a version's manifest."""
        return manifest_key(self._prefix, version)

    def chunk_key(self, chunk: Chunk) -> str:
        """Return the key of a chunk."""
        return self._objects.key(chunk)

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], *, trainer_epoch: int,
        base: str | None = None, files: Mapping[str, bytes] | None = None, known: Inspected | None = None,
        progress: ByteProgress = lambda done, whole: None,
    ) -> VersionManifest:  # fmt: skip
        """Publish a version. One that is there already with the same bits is accepted (the trainer resumed).

        The tensors must not change any more. `base`: root of the model that the tensors are an adapter of.
        `known`: what inspecting the tensors has just found. Raises WeightsError if one has NaN or infinity.
        """
        return self.publish_model(
            version, model_where_it_lies(tensors), trainer_epoch=trainer_epoch, base=base, files=files,
            known=known, progress=progress,
        )  # fmt: skip

    def publish_model(
        self, version: int, model: Model, *, trainer_epoch: int = 0, base: str | None = None,
        files: Mapping[str, bytes] | None = None, progress: ByteProgress = lambda done, whole: None,
        known: Inspected | None = None,
    ) -> VersionManifest:  # fmt: skip
        """Like `publish`, for bits. `progress` gets the bytes sent, and 0, for their total is unknown."""
        bad = [known.wrong] if known else [name for name, bits in model.items() if not bits.finite()]
        if any(bad):
            raise WeightsError(f"version {version} is not published: NaN or infinity in {', '.join(bad[:3])}")
        digests = known.digests if known else model_digests(model)
        new = Held(version, root_digest(digests), model)
        manifest = self.find(version)
        if manifest is None:
            with self.lease(version, f"publisher-{trainer_epoch}", puts=True):
                manifest = self._put(new, digests, trainer_epoch, base, files or {}, progress)
        else:
            self._series.spool(new)
        self._same(manifest, new.root, base)
        self._series.published(new)
        return manifest

    def lease(self, version: int, holder: str = "", *, puts: bool = False) -> Lease:
        """Return a lease on a version. With `puts`, no chunk at all is collected while it lasts."""
        return Lease(self._store, self._prefix, version, holder, puts=puts)

    def goes_on_from(self, version: int, model: Model) -> None:
        """Allow the next version to be published as a delta of this one, which is in the store."""
        held = Held(version, self.manifest(version).root, model)
        self._series.spool(held)
        self._series.published(held)

    def add_keyframe(
        self, version: int, progress: ByteProgress = lambda done, whole: None
    ) -> tuple[VersionManifest, bool]:
        """Give a version a keyframe if it has none. Returns its manifest, and whether that is new."""
        manifest = self.complete(self.manifest(version))
        if manifest.path(None) is not None:
            return manifest, False
        with self.lease(version, puts=True):
            _, copy = self._updated(None, manifest, progress)
            chunks = encode_model(None, copy.model, threads=self._threads)
            self._keyframes.put(manifest, self._objects.put(chunks, progress))
        return self.complete(manifest), True

    def complete(self, manifest: VersionManifest) -> VersionManifest:
        """Return a manifest with the keyframe that its version was given later, if it was."""
        if manifest.path(None) is not None:
            return manifest
        return self._keyframes.added(manifest, self._keyframes.listed())

    def _put(
        self, new: Held, digests: Mapping[str, str], trainer_epoch: int, base: str | None,
        files: Mapping[str, bytes], progress: ByteProgress,
    ) -> VersionManifest:  # fmt: skip
        paths = []
        for plan in self._series.plans(new):
            since = plan.since
            path = Path(
                since=since.version if since else None,
                root=since.root if since else None,
                chunks=self._objects.put(plan.chunks(new, self._threads), progress),
            )
            if self._series.made(plan, new, path.size):
                paths.append(path)
        self._series.spool(new)
        before = self.find(new.version - 1) if new.version else None
        manifest = self._keys.signed(
            VersionManifest(
                run=self._run, version=new.version, root=new.root, paths=tuple(paths), base=base,
                tensors={
                    name: Tensor(dtype=bits.dtype, shape=bits.shape, digest=digests[name])
                    for name, bits in new.model.items()
                },
                files=self._beside(files, progress),
                previous=before.hash() if before else None, trainer_epoch=trainer_epoch,
                created_at=time.time(),
            )
        )  # fmt: skip
        try:
            self._store.put_new(self.manifest_key(new.version), manifest.raw)
        except Exists:
            return self.manifest(new.version)
        return manifest

    def _beside(self, files: Mapping[str, bytes], progress: ByteProgress) -> Mapping[str, Chunk]:
        """Put the files beside the tensors, if they are not those put last. Returns their chunks."""
        if self._files is None or self._files[0] != files:
            self._files = files, dict(zip(files, self._objects.put(files.values(), progress), strict=True))
        return self._files[1]

    def _same(self, known: VersionManifest, root: str, base: str | None) -> None:
        if known.base != base:
            raise WeightsError(
                f"version {known.version} of run {self._run} is published for the base {known.base}, not for "
                f"{base}: this trainer started from another model"
            )
        if known.root != root:
            raise WeightsError(
                f"version {known.version} of run {self._run} is published with other bits "
                f"({known.root[:12]}, not {root[:12]}): another trainer is at work on this run"
            )

    def find(self, version: int) -> VersionManifest | None:
        """Return a version's manifest; None if it is not published."""
        try:
            return self.manifest(version)
        except Missing:
            return None

    def manifest(self, version: int) -> VersionManifest:
        """Return a version's manifest. Raises Missing if it is not published."""
        return self.manifest_of(version, self._store.get(self.manifest_key(version), limits.MANIFEST))

    def manifest_of(self, version: int, raw: bytes) -> VersionManifest:
        """Parse a manifest. Raises WeightsError unless it is this version's and passes all checks."""
        where = f"{self._store.url}/{self.manifest_key(version)}"
        manifest = parsed(raw, where)
        if manifest.run != self._run or manifest.version != version:
            raise WeightsError(
                f"{where} is of run {manifest.run}, version {manifest.version}; {self._run}, {version} is "
                "expected"
            )
        self._keys.check(manifest, where)
        self._check(manifest)
        return manifest

    def fetch(
        self, version: int, *, root: str | None = None
    ) -> tuple[VersionManifest, dict[str, torch.Tensor]]:
        """Fetch a version's tensors, verified bit by bit. `root`: the root that was announced."""
        manifest, copy = self.update(None, version, root=root)
        return manifest, copy.tensors()

    def fetch_file(self, version: int, *, root: str | None = None) -> tuple[VersionManifest, bytearray]:
        """Like `fetch`, with the tensors as a safetensors file."""
        manifest, copy = self.update(None, version, root=root)
        return manifest, copy.file

    def update(
        self, copy: Copy | None, version: int, *, root: str | None = None,
        progress: ByteProgress = lambda done, whole: None,
    ) -> tuple[VersionManifest, Copy]:  # fmt: skip
        """Turn a copy into a version, in place and by the cheapest paths; without a copy, make one.

        If this fails, the copy is of no version, and the next call begins with nothing.
        """
        with self.lease(version):
            return self._updated(copy, self._expected(version, root), progress)

    def _expected(self, version: int, root: str | None) -> VersionManifest:
        manifest = self.manifest(version)
        if root is not None and manifest.root != root:
            raise WeightsError(
                f"version {version} has root {manifest.root[:12]} in the store; {root[:12]} was announced"
            )
        return manifest

    def paths_to(self, manifest: VersionManifest, copy: Copy | None = None) -> Paths | None:
        """Return the cheapest paths to a version, from a copy if it has a version, else from nothing."""
        held = _held(copy, manifest)
        listed = set[str]() if held else self._keyframes.listed()
        whole = self._keyframes.added(manifest, listed)
        return cheapest(whole, partial(self._on_the_way, listed), held, self._cost)

    def _on_the_way(self, listed: set[str], version: int) -> VersionManifest | None:
        """Return the manifest of an older version; None if it can't be read: another way may do."""
        try:
            found = self.find(version)
            return self._keyframes.added(found, listed) if found else None
        except WeightsError as error:
            _log.warning("version %d is no way to a newer one: %s", version, error)
            return None

    def _cost(self, path: Path) -> int:
        return cost(path, lambda chunk: self._near(self.chunk_key(chunk)))

    def _updated(
        self, copy: Copy | None, manifest: VersionManifest, progress: ByteProgress
    ) -> tuple[VersionManifest, Copy]:
        if copy is not None and _held(copy, manifest):
            paths = self.paths_to(manifest, copy)
            try:
                if paths is not None:
                    return manifest, self._taken(paths, copy, manifest, progress)
            except (StaleTile, Missing):
                pass  # the copy is not what it was taken for, or something on its way was collected
        paths = self.paths_to(manifest)
        if paths is None:
            raise WeightsError(
                f"version {manifest.version} of run {self._run} can't be made: {self._store.url} has no "
                "keyframe of it, and an older version that it needs is not there"
            )
        return manifest, self._taken(paths, Copy.blank(manifest.tensors), manifest, progress)

    def _taken(self, paths: Paths, copy: Copy, target: VersionManifest, progress: ByteProgress) -> Copy:
        whole = sum(path.size for _, path in paths)
        copy.version, done = None, 0
        if any(path.since is not None for _, path in paths):
            for kind in {bits.kind for bits in copy.model.values()}:
                load_scanner(kind)
        for _, path in paths:
            covered = Covered()
            fetched = in_threads(self._objects.get, path.chunks, UNDER_WAY)
            for chunk, data in zip(path.chunks, fetched, strict=True):
                what = f"{self._store.url}/{self.chunk_key(chunk)}"
                decode_chunk(data, copy.model, what, threads=self._threads, covered=covered)
                done += chunk.size
                progress(done, whole)
        found = model_digests(copy.model)
        if wrong := sorted(name for name, tensor in target.tensors.items() if found[name] != tensor.digest):
            error = WeightsError if paths else StaleTile  # without a path, the copy should have been right
            raise error(
                f"{self._store.url}/{self.manifest_key(target.version)}: its chunks make wrong bits of "
                f"{', '.join(wrong[:3])}"
            )
        copy.version, copy.root = target.version, target.root
        return copy

    def file(self, chunk: Chunk) -> bytes:
        """Return an object's bytes. Raises if it is missing or damaged."""
        return self._objects.get(chunk)

    def versions(self) -> list[int]:
        """Return all published versions, oldest first."""
        pattern = re.compile(rf"{re.escape(self._prefix)}/v(\d+)/manifest\.json")
        found = (pattern.fullmatch(key) for key in self._store.list(self._prefix))
        return sorted(int(match[1]) for match in found if match)

    def collect(self, keep: int, *, grace_s: float = COLLECT_GRACE_S) -> Collected:
        """Remove versions and chunks that nobody needs; keeps the newest ones. See `collect_garbage`."""
        return collect_garbage(self._store, self._prefix, self._readable, keep, grace_s=grace_s)

    def sweep(self) -> int:
        """Remove what killed writes left. Returns how many there were."""
        return sweep(self._store, self._prefix)

    def manifests(self) -> dict[int, VersionManifest]:
        """Return the manifests of all published versions that can be read, with all paths to each."""
        return self._readable()[0]

    def _readable(self) -> tuple[dict[int, VersionManifest], list[int]]:
        """Return the manifests that `manifests` returns, and the versions that can't be read."""
        listed, found, others = self._keyframes.listed(), dict[int, VersionManifest](), list[int]()
        for version in self.versions():
            try:
                if (manifest := self.find(version)) is not None:
                    found[version] = self._keyframes.added(manifest, listed)
            except WeightsError as error:  # planted, damaged, or signed with an old key
                _log.warning("a version is passed over: %s", error)
                others.append(version)
        return found, others


def _threads() -> int:
    """Return how many threads code by default: a quarter of the cores, since others compute meanwhile."""
    return min(_MOST_THREADS, max(1, choices.cores() // 4))


def _held(copy: Copy | None, manifest: VersionManifest) -> tuple[int, str] | None:
    """Return version and root of a copy that another version can be made of; None if it can't."""
    if copy is None or copy.version is None or copy.root is None or not copy.fits(manifest):
        return None
    return copy.version, copy.root
