"""Opens the object store that a URL names."""

from __future__ import annotations

from infra.stores.file_store import FileStore
from infra.stores.store import Store, StoreError


def open_store(url: str) -> Store:
    """Return the store at an fsspec URL. Raise StoreError if it can't be opened."""
    if "://" not in url:
        raise StoreError(f"store {url!r}: a URL is expected, such as s3://bucket/prefix or file:///path")
    if url.startswith("file://"):
        return FileStore(url)
    from infra.stores.remote_store import FsspecStore  # fsspec and s3fs take a second to import

    return FsspecStore(url)
