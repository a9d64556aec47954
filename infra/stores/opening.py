"""Opens the object store that a URL names."""

from __future__ import annotations

from infra.stores.store import Store, StoreError
from schemas.importing import BadImport
from schemas.stores import OWN_STORES, STORES, own_stores

_NEEDED = [name for name in vars(Store) if not name.startswith("_") and callable(getattr(Store, name))]


def open_store(url: str) -> Store:
    """Return the store at a URL. Raise StoreError if it can't be opened.

    A scheme that is neither ours nor anybody's own is one of fsspec, as s3 is.
    """
    scheme, colon, _ = url.partition("://")
    if not colon:
        raise StoreError(f"store {url!r}: a URL is expected, such as s3://bucket/prefix or file:///path")
    if where := own_stores().get(scheme):
        return _own_store(url, where)
    kind = STORES.own_class(scheme if scheme in STORES.built_in() else "s3")
    store: Store = kind(url)
    return store


def _own_store(url: str, where: str) -> Store:
    try:
        kind = STORES.class_at(where)
    except BadImport as error:
        raise StoreError(f"store {url}: {error} ({OWN_STORES}, or an installed package)") from error
    if lacks := [name for name in _NEEDED if not callable(getattr(kind, name, None))]:
        raise StoreError(f"store {url}: {where} has no {', '.join(lacks)}: see docs/extending/store.md")
    store: Store = kind(url)
    return store
