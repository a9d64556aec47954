"""Measures the way of a version of the weights: learner ──► the run's store ──► copy ──► patch ──► engine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from flows.planning.profiled_learner import ProfiledLearner, ProfilingFailed
from infra.core_waits import WorkWatch
from infra.stores.store import Prunable, Store, StoreError
from infra.weights.copy import Copy
from infra.weights.folder import ModelFolder
from infra.weights.versions import WeightStore
from producers.engines.profile_process import InstallTimes
from producers.engines.remote_profile import ProfiledEngine
from producers.installing import Newest
from schemas.profile import WeightsProfile
from schemas.runspec import RunSpec

_LARGE = 8 << 20  # bytes of the object by which the store's speed is measured
_SMALL = 5  # small objects, for its latency


@contextmanager
def scratch(store: Store) -> Iterator[str]:
    """Yield a prefix in the store for objects that are removed in the end."""
    prefix = f"profiles/{os.urandom(8).hex()}"
    try:
        yield prefix
    finally:
        with contextlib.suppress(StoreError):
            for key in store.list(prefix):
                store.delete(key)
            if isinstance(store, Prunable):
                store.prune("profiles")


def store_speed(store: Store, prefix: str) -> tuple[float, float]:
    """Return the bytes a second that a store gives, and the seconds until it gives a small object."""
    small, large = f"{prefix}/small", f"{prefix}/large"
    store.put(small, b"x" * 64)
    store.put(large, os.urandom(1 << 20) * (_LARGE >> 20))
    waits = []
    for _ in range(_SMALL):
        began = time.perf_counter()
        store.get(small, 64)
        waits.append(time.perf_counter() - began)
    began = time.perf_counter()
    store.get(large, _LARGE)
    took = time.perf_counter() - began
    latency = float(np.median(waits))
    return _LARGE / max(1e-6, took - min(latency, took / 2)), latency


class WeightsWay:
    """Brings versions from a learner into an engine, and times each part of the way."""

    def __init__(self, spec: RunSpec, model: str, store: Store, prefix: str) -> None:
        self._spec, self._store, self._prefix = spec, store, prefix
        self._weights = WeightStore(store, "profile-1", prefix=f"{prefix}/weights")
        self._newest = Newest(spec.model, ModelFolder(model), spec.generator)
        self._copy: Copy | None = None
        self._version = 0
        self._deltas: list[dict[str, float]] = []

    def bring(self, learner: ProfiledLearner, engine: ProfiledEngine) -> None:
        """Publish what the learner has, and install it in the engine."""
        put = learner.put(self._version)
        watch = WorkWatch()
        manifest, self._copy = self._weights.update(self._copy, put.version, root=put.root)
        fetched = watch.end()
        watch.begin()
        fresh = self._newest.version(manifest, self._copy)
        patched = watch.end()
        fresh.claim()
        took = engine.install(fresh.patch, recompute=self._spec.generator.on_update == "recompute")
        _check(took, fresh.digests, put.version)
        self._version += 1
        self._deltas.append(
            {"publish_s": put.seconds, "fetch_s": fetched.seconds, "patch_s": patched.seconds,
             "prepare_s": took.prepare_s, "install_s": took.install_s,
             "delta_bytes": put.delta_bytes, "whole_bytes": put.whole_bytes}
        )  # fmt: skip

    def profile(self) -> WeightsProfile:
        """Return the medians, without the first version, which has no other before it."""
        rows = self._deltas[1:] or self._deltas
        found = {name: float(np.median([row[name] for row in rows])) for name in rows[0]}
        speed, latency = store_speed(self._store, self._prefix)
        sizes = {name: round(found.pop(name)) for name in ("delta_bytes", "whole_bytes")}
        return WeightsProfile(**found, **sizes, bytes_per_s=speed, latency_s=latency)


def _check(took: InstallTimes, digests: Mapping[str, str], version: int) -> None:
    if wrong := [name for name, digest in digests.items() if took.digests.get(name) != digest]:
        raise ProfilingFailed(
            f"the engine does not hold the weights of version {version} that it was given: "
            f"{', '.join(sorted(wrong)[:3])} differ, so its figures would be of no use"
        )
