"""Versions of the weights in the object store.

runs/<run>/weights/chunks/<hash>                what changes, or all that there is
runs/<run>/weights/v000012/manifest.json        put last and never overwritten: the only commit point
runs/<run>/weights/leases/<reader>.json         which version somebody is reading, see `garbage.py`
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from blake3 import blake3

from infra.store import Exists, Missing, Store
from infra.weights.bits import Model, model_of
from infra.weights.codec.chunks import decode, in_threads
from infra.weights.codec.groups import StaleTile
from infra.weights.copy import Copy
from infra.weights.digest import model_digests, root_digest
from infra.weights.errors import WeightsError
from infra.weights.garbage import GRACE_S, Lease, Progress, collect
from infra.weights.manifest import Chunk, Manifest, Path, Tensor, parsed
from infra.weights.routes import Route, cheapest
from infra.weights.series import Held, Series
from infra.weights.signing import Keys

if TYPE_CHECKING:
    import torch

_UNDER_WAY = 4  # chunks that are put or fetched at once


class WeightStore:
    """Publishes and fetches versions."""

    def __init__(
        self, store: Store, run: str, *, prefix: str | None = None, keys: Keys | None = None, threads: int = 1
    ) -> None:
        self._store, self._run, self._threads = store, run, threads
        self._prefix = prefix or f"runs/{run}/weights"
        self._keys = keys or Keys.from_env()
        self._series = Series()

    def manifest_key(self, version: int) -> str:
        """Where a version's manifest lies."""
        return f"{self._prefix}/v{version:06d}/manifest.json"

    def chunk_key(self, chunk: Chunk) -> str:
        """Where a chunk lies."""
        return f"{self._prefix}/chunks/{chunk.hash}"

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], *, trainer_epoch: int,
        base: str | None = None,
    ) -> Manifest:  # fmt: skip
        """Put a version; if it is there already with the same bits, that is fine (a trainer resumed).

        `base`: the tensors are an adapter of the model with this root. They must not change any more.
        """
        return self.publish_model(version, model_of(tensors), trainer_epoch=trainer_epoch, base=base)

    def publish_model(
        self, version: int, model: Model, *, trainer_epoch: int = 0, base: str | None = None,
        files: Mapping[str, bytes] | None = None, progress: Progress = lambda done, whole: None,
    ) -> Manifest:  # fmt: skip
        """The same of bits, and of files beside them. Progress is in bytes that are sent, of unknown many."""
        if bad := [name for name, bits in model.items() if not bits.finite()]:
            raise WeightsError(f"version {version} is not published: NaN or infinity in {', '.join(bad[:3])}")
        digests = model_digests(model)
        new = Held(version, root_digest(digests), model)
        manifest = self.find(version)
        if manifest is None:
            with Lease(self._store, self._prefix, version, f"publisher-{trainer_epoch}") as lease:
                manifest = self._put(new, digests, trainer_epoch, base, files or {}, lease.renewing(progress))
        self._same(manifest, new.root, base)
        self._series.published(new)
        return manifest

    def goes_on_from(self, version: int, model: Model) -> None:
        """The next version may be told as what changes of this one, which is published."""
        self._series.published(Held(version, self.manifest(version).root, model))

    def _put(
        self, new: Held, digests: Mapping[str, str], trainer_epoch: int, base: str | None,
        files: Mapping[str, bytes], progress: Progress,
    ) -> Manifest:  # fmt: skip
        paths, sent = [], 0
        for plan in self._series.plans(new):
            chunks = []
            for chunk in in_threads(self._put_chunk, plan.chunks(new, self._threads), _UNDER_WAY):
                chunks.append(chunk)
                sent += chunk.size
                progress(sent, 0)
            since = plan.since
            path = Path(
                since=since.version if since else None,
                root=since.root if since else None,
                chunks=tuple(chunks),
            )
            if self._series.made(plan, new, path.size):
                paths.append(path)
        before = self.find(new.version - 1) if new.version else None
        manifest = self._keys.signed(
            Manifest(
                run=self._run, version=new.version, root=new.root, paths=tuple(paths), base=base,
                tensors={
                    name: Tensor(dtype=bits.dtype, shape=bits.shape, digest=digests[name])
                    for name, bits in new.model.items()
                },
                files={name: self._put_chunk(data) for name, data in files.items()},
                previous=before.hash() if before else None, trainer_epoch=trainer_epoch,
                created_at=time.time(),
            )
        )  # fmt: skip
        try:
            self._store.put_new(self.manifest_key(new.version), manifest.model_dump_json().encode())
        except Exists:
            return self.manifest(new.version)
        return manifest

    def _put_chunk(self, data: bytes) -> Chunk:
        chunk = Chunk(hash=blake3(data).hexdigest(), size=len(data))
        with contextlib.suppress(Exists):  # of the same name: of the same bytes
            self._store.put_new(self.chunk_key(chunk), data)
        return chunk

    def _same(self, known: Manifest, root: str, base: str | None) -> None:
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

    def find(self, version: int) -> Manifest | None:
        """A version's manifest, if it is published."""
        try:
            return self.manifest(version)
        except Missing:
            return None

    def manifest(self, version: int) -> Manifest:
        """A version's manifest."""
        key = self.manifest_key(version)
        where = f"{self._store.url}/{key}"
        manifest = parsed(self._store.get(key), where)
        if manifest.run != self._run or manifest.version != version:
            raise WeightsError(
                f"{where} is of run {manifest.run}, version {manifest.version}; {self._run}, {version} is "
                "expected"
            )
        self._keys.check(manifest, where)
        return manifest

    def fetch(self, version: int, *, root: str | None = None) -> tuple[Manifest, dict[str, torch.Tensor]]:
        """A version's tensors, verified bit by bit."""
        manifest, copy = self.update(None, version, root=root)
        return manifest, copy.tensors()

    def fetch_file(self, version: int, *, root: str | None = None) -> tuple[Manifest, bytearray]:
        """A version as a safetensors file, its tensors verified bit by bit."""
        manifest, copy = self.update(None, version, root=root)
        return manifest, copy.file

    def update(
        self, copy: Copy | None, version: int, *, root: str | None = None,
        progress: Progress = lambda done, whole: None,
    ) -> tuple[Manifest, Copy]:  # fmt: skip
        """Make a copy a version, in place, by the cheapest way from what it is; without one, make one.

        If it fails the copy is of no version, and the next call begins with nothing.
        """
        with Lease(self._store, self._prefix, version) as lease:
            return self._updated(copy, self._expected(version, root), lease.renewing(progress))

    def _expected(self, version: int, root: str | None) -> Manifest:
        manifest = self.manifest(version)
        if root is not None and manifest.root != root:
            raise WeightsError(
                f"version {version} has root {manifest.root[:12]} in the store; {root[:12]} was announced"
            )
        return manifest

    def _updated(self, copy: Copy | None, manifest: Manifest, progress: Progress) -> tuple[Manifest, Copy]:
        if copy is not None and copy.version is not None and copy.root is not None and copy.fits(manifest):
            route = cheapest(manifest, self.find, (copy.version, copy.root))
            try:
                if route is not None:
                    return manifest, self._taken(route, copy, manifest, progress)
            except (StaleTile, Missing):
                pass  # it is not what it was taken for; or what was on the way was collected
        route = cheapest(manifest, self.find)
        if route is None:
            raise WeightsError(
                f"nothing leads to version {manifest.version} of run {self._run}: what it needs is gone"
            )
        return manifest, self._taken(route, Copy.blank(manifest.tensors), manifest, progress)

    def _taken(self, route: Route, copy: Copy, target: Manifest, progress: Progress) -> Copy:
        whole = sum(path.size for _, path in route)
        copy.version, done = None, 0
        for _, path in route:
            for chunk, data in in_threads(self._get_chunk, path.chunks, _UNDER_WAY):
                what = f"{self._store.url}/{self.chunk_key(chunk)}"
                decode(data, copy.model, what, threads=self._threads)
                done += chunk.size
                progress(done, whole)
        found = model_digests(copy.model)
        if wrong := sorted(name for name, tensor in target.tensors.items() if found[name] != tensor.digest):
            raise WeightsError(
                f"{self._store.url}/{self.manifest_key(target.version)}: its chunks make wrong bits of "
                f"{', '.join(wrong[:3])}"
            )
        copy.version, copy.root = target.version, target.root
        return copy

    def file(self, chunk: Chunk) -> bytes:
        """An object's bytes. Raises unless it is there, and whole."""
        return self._get_chunk(chunk)[1]

    def _get_chunk(self, chunk: Chunk) -> tuple[Chunk, bytes]:
        key = self.chunk_key(chunk)
        data = self._store.get(key)
        if blake3(data).hexdigest() != chunk.hash:
            raise WeightsError(f"{self._store.url}/{key} is damaged: it has other bytes than its name says")
        return chunk, data

    def versions(self) -> list[int]:
        """All published versions, oldest first."""
        pattern = re.compile(rf"{re.escape(self._prefix)}/v(\d+)/manifest\.json")
        found = (pattern.fullmatch(key) for key in self._store.list(self._prefix))
        return sorted(int(match[1]) for match in found if match)

    def collect(self, keep: int, *, grace_s: float = GRACE_S) -> None:
        """Remove all but the newest versions, and what these and those that are being read need."""
        collect(self._store, self._prefix, self._manifests(), keep, grace_s=grace_s)

    def _manifests(self) -> dict[int, Manifest]:
        found = {version: self.find(version) for version in self.versions()}
        return {version: manifest for version, manifest in found.items() if manifest is not None}
