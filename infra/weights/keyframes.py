"""Ways from nothing that versions were given after they were published. Each is put once and signed, as they.

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
    """Those of one series of versions."""

    def __init__(self, store: Store, prefix: str, keys: Keys) -> None:
        self._store, self._prefix, self._keys = store, prefix, keys

    def listed(self) -> set[str]:
        """The keys of all that there are. One listing: hardly any version has one."""
        return set(self._store.list(f"{self._prefix}/keyframes"))

    def added(self, manifest: VersionManifest, listed: set[str]) -> VersionManifest:
        """A manifest with the way from nothing that lies beside it, if there is one."""
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
        """Commit one. If somebody else did, that is as good."""
        keyframe = Keyframe(
            run=manifest.run, version=manifest.version, root=manifest.root, chunks=tuple(chunks),
            created_at=time.time(),
        )  # fmt: skip
        with contextlib.suppress(Exists):
            key = keyframe_key(self._prefix, manifest.version)
            self._store.put_new(key, self._keys.signed(keyframe).model_dump_json().encode())
