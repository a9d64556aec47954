"""For an object store of your own: see docs/extending/store.md."""

from __future__ import annotations

from infra.stores.store import Exists, Missing, Store, StoreError

__all__ = [
    "Exists",
    "Missing",
    "Store",
    "StoreError",
]
