"""Keyframes that versions were given after they were published. Each is put once, and signed like a manifest.

<prefix>/keyframes/v000012.json
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from infra.stores.store import Exists, Missing, Store
from infra.weights import limits
from infra.weights.garbage import keyframe_key
from infra.weights.manifest import Chunk, Keyframe, Path, VersionManifest, read_signed
from infra.weights.signing import Keys
from infra.weights.weights_error import WeightsError, damaged


class Keyframes:
    """The keyframes that versions of one series were given after they were published."""

    def __init__(self, store: Store, prefix: str, keys: Keys) -> None:
        self._store, self._prefix, self._keys = store, prefix, keys

    def listed(self) -> set[str]:
        """Return the keys of all keyframes. One listing is cheap, for hardly any version has one."""
        return set(self._store.list(f"{self._prefix}/keyframes"))

    def added(self, manifest: VersionManifest, listed: set[str]) -> VersionManifest:
        """Return a manifest with its keyframe as one more path, if `listed` has one."""
        key = keyframe_key(self._prefix, manifest.version)
        if manifest.path(None) is not None or key not in listed:
            return manifest
        where = f"{self._store.url}/{key}"
        try:
            with damaged(where):
                found = read_signed(self._store.get(key, limits.MANIFEST), Keyframe, where)
        except Missing:
            return manifest  # collected since it was listed
        of = (found.run, found.version, found.root)
        if of != (manifest.run, manifest.version, manifest.root):
            raise WeightsError(
                f"{where} is of run {found.run}, version {found.version} with root {found.root[:12]}; "
                f"{manifest.run}, {manifest.version}, {manifest.root[:12]} is expected"
            )
        self._keys.check(found, where)
        path = Path(since=None, chunks=found.chunks)
        return manifest.model_copy(update={"paths": (*manifest.paths, path)})

    def put(self, manifest: VersionManifest, chunks: Sequence[Chunk]) -> None:
        """Commit a version's keyframe. If somebody else has put one already, that one stays."""
        keyframe = Keyframe(
            run=manifest.run, version=manifest.version, root=manifest.root, chunks=tuple(chunks),
            created_at=time.time(),
        )  # fmt: skip
        with contextlib.suppress(Exists):
            key = keyframe_key(self._prefix, manifest.version)
            self._store.put_new(key, self._keys.signed(keyframe).model_dump_json().encode())
