"""Mirrors versions at a site: fetches each chunk into the cache once, and verifies the version in a copy."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from infra.errors import Explained
from infra.sites.peers import Way
from infra.sites.site_store import SiteStore
from infra.stores.store import Exists, Store
from infra.weights.codec.chunks import encode_model
from infra.weights.copy import Copy
from infra.weights.limits import unpacked_within_limits
from infra.weights.manifest import Chunk, VersionManifest
from infra.weights.objects import chunk_of
from infra.weights.series import KEYFRAME_AFTER
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError

_AT_ONCE = 4  # chunks
_MANIFESTS = 32  # at once

_log = logging.getLogger("streamrl.sites")

Planned = Callable[[int, Sequence[Chunk]], Mapping[Chunk, Way]]


class Mirror:
    """The versions that one relay brings to its site.

    `share`: the relay's number among the relays of its site, and how many there are, so that each begins with
    other chunks.
    """

    def __init__(self, run: str, origin: Store, site: SiteStore, *, share: tuple[int, int] = (0, 1)) -> None:
        self._site, self._share = site, share
        self._weights = WeightStore(site, run, near=site.near)
        self._origin = WeightStore(origin, run)
        self._copy: Copy | None = None
        self._coming: set[str] = set()  # keys that threads fetch: the decoder waits for them
        site.may_fetch = lambda key: key not in self._coming
        self.done, self.whole = 0, 0  # bytes of the newest version: fetched, and missing at first
        self.trouble = ""  # the newest unexpected error of a thread

    def bring(
        self, version: int, root: str, planned: Planned = lambda since, chunks: {}, told: bytes = b""
    ) -> VersionManifest:
        """Bring a version to the site, verified bit by bit. Return its manifest.

        `planned` names the chunks that shall come from other sites, with the way to each. `told`: the packed
        manifest, if it was announced.
        """
        self.done, self.whole, self.trouble = 0, 0, ""
        with self._kept(version), self._unless_false(version, told):
            manifest = self._manifest(version, root, told)
            self._look_back(version)
            paths = self._weights.paths_to(manifest, self._copy) or []
            chunks = [chunk for _, path in paths for chunk in path.chunks]
            if len(paths) == 1:
                since = paths[0][1].since
                ways = planned(-1 if since is None else since, chunks)
                self._site.ways = {self._weights.chunk_key(chunk): way for chunk, way in ways.items()}
                chunks = list(ways) or chunks
            with self._fetching(chunks):
                # chunks that have come are decoded while the rest is fetched
                manifest, self._copy = self._weights.update(self._copy, version, root=root)
        return manifest

    def _manifest(self, version: int, root: str, told: bytes) -> VersionManifest:
        """Return a version's manifest, announced or from the origin, and keep it in the cache for readers."""
        key = self._weights.manifest_key(version)
        if told:
            raw = unpacked_within_limits(told, f"{key} as announced")
            if self._weights.manifest_of(version, raw).root == root:
                self._site.keep(key, raw)
        with contextlib.suppress(WeightsError):  # one that is damaged in the cache
            if (manifest := self._weights.manifest(version)).root == root:
                return manifest
        self._site.delete(key)  # perhaps of a false announcement: ask the origin
        return self._weights.manifest(version)

    @contextlib.contextmanager
    def _unless_false(self, version: int, told: bytes) -> Iterator[None]:
        """Delete an announced manifest from the cache if the version could not be made from it."""
        try:
            yield
        except Explained:
            if told:
                with contextlib.suppress(Explained):
                    self._site.delete(self._weights.manifest_key(version))
            raise

    def make_keyframe(self, manifest: VersionManifest) -> None:
        """Make a keyframe of the version from the copy, without fetching, for processes that join later."""
        path = manifest.path(None)
        if path is None or self._copy is None or self._copy.version != manifest.version:
            return
        keys = [self._weights.chunk_key(chunk) for chunk in path.chunks]
        if all(self._site.near(key) for key in keys):
            return
        for key, chunk, data in zip(keys, path.chunks, encode_model(None, self._copy.model), strict=False):
            if chunk_of(data) != chunk:
                return  # another version of the compressor: whoever needs the keyframe fetches it
            with contextlib.suppress(Exists):
                self._site.put_new(key, data)

    def collect(self, keep: int) -> None:
        """Delete old versions from the cache, except the newest `keep`, and leftovers of killed writes."""
        self._weights.collect(keep)
        self._weights.sweep()

    def _look_back(self, version: int) -> None:
        """Fetch the older manifests that paths need, all at once: one by one each costs a round trip."""
        held = self._copy.version if self._copy is not None else None
        first = max(0, version - KEYFRAME_AFTER, -1 if held is None else held + 1)
        with ThreadPoolExecutor(_MANIFESTS, thread_name_prefix="manifests") as pool:
            for older in range(version - 1, first - 1, -1):
                pool.submit(self._weights.find, older)

    @contextlib.contextmanager
    def _fetching(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Fetch chunks during the block, except those that another relay of the site fetches."""
        missing = [chunk for chunk in chunks if not self._site.near(self._weights.chunk_key(chunk))]
        self.whole = sum(chunk.size for chunk in missing)
        start = self._share[0] * len(missing) // self._share[1]
        with contextlib.ExitStack() as stack:
            # one pool for each source: a late one holds up no other
            pools: dict[str, ThreadPoolExecutor] = {}
            self._coming = {self._weights.chunk_key(chunk) for chunk in missing}
            for chunk in missing[start:] + missing[:start]:
                source = self._site.source_of(self._weights.chunk_key(chunk))
                if source not in pools:
                    pools[source] = stack.enter_context(ThreadPoolExecutor(_AT_ONCE))
                pools[source].submit(self._brought, chunk)
            try:
                yield
            except BaseException:
                for pool in pools.values():
                    pool.shutdown(cancel_futures=True)
                raise
            finally:
                self._coming.clear()
        self.done = self.whole

    def _brought(self, chunk: Chunk) -> None:
        key = self._weights.chunk_key(chunk)
        try:
            if self._site.bring(key, chunk.size):
                self.done += chunk.size
        except Explained:
            pass  # the decoder meets the same error
        except Exception as error:
            self._heard(f"{key} could not be brought", error)
        finally:
            self._coming.discard(key)  # from now on the decoder may fetch it

    def _heard(self, what: str, error: Exception) -> None:
        """Log and note an unexpected error of a thread. The version may come nevertheless."""
        self.trouble = f"{what}: {type(error).__name__}: {error}"
        _log.error("%s", self.trouble, exc_info=error)

    @contextlib.contextmanager
    def _kept(self, version: int) -> Iterator[None]:
        """Have the origin keep the version during the block, by a lease that nobody waits for."""
        over = threading.Event()

        def keep() -> None:
            try:
                with contextlib.suppress(Explained), self._origin.lease(version):
                    over.wait()
            except Exception as error:
                self._heard(f"the lease on version {version} could not be kept", error)

        threading.Thread(target=keep, daemon=True, name="lease").start()
        try:
            yield
        finally:
            over.set()
