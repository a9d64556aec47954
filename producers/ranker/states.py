"""Rankers in the object store, as safetensors files: a run's own versions, and rankers to start from.

runs/<run>/ranker/v000012.safetensors     the ranker of prompts whose predictor is "…/12"
rankers/<name>/v000003.safetensors        trained offline from recorded samples; `lengths.start` names one
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from blake3 import blake3
from safetensors import SafetensorError
from safetensors.numpy import load, save

from infra.errors import Explained
from infra.keys import ring_from_env
from infra.safetensors_header import header_in
from infra.stores.opening import open_store
from infra.stores.store import Exists, Missing, Store
from producers.ranker.ranker import SCHEMA, Backbone, Ranker, StateError

_ABOUT, _SIGNATURE, _KIND = "streamrl_ranker", "streamrl_signature", "ranker"
_LARGEST, _LARGEST_HEADER = 1 << 30, 1 << 20  # bytes
_AGAIN = "make another with `streamrl ranker`"
_NAME = re.compile(r".*/v(\d+)\.safetensors")


class RankerError(Explained):
    """A stored ranker can't be used; the message names the file and says what to do."""

    lasting = True


def backbone_name(backbone: str) -> str:
    """Return a backbone's name as it is stored with rankers: the last part of its folder."""
    return backbone.rstrip("/").rpartition("/")[2]


class States:
    """The rankers in one folder of a store, by number."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder

    @classmethod
    def of_run(cls, store: Store, run: str) -> States:
        """Return the rankers of a run."""
        return cls(store, f"runs/{run}/ranker")

    @classmethod
    def to_start_from(cls, store: Store, name: str) -> States:
        """Return the rankers that were trained offline under a name."""
        return cls(store, f"rankers/{name}")

    def key(self, number: int) -> str:
        """Return the key of a ranker in the store."""
        return f"{self._folder}/v{number:06d}.safetensors"

    def numbers(self) -> list[int]:
        """Return the numbers of the stored rankers, ascending."""
        found = (_NAME.fullmatch(key) for key in self._store.list(self._folder))
        return sorted(int(match[1]) for match in found if match)

    def put(self, number: int, ranker: Ranker) -> None:
        """Store a ranker. If one of this number is stored it stays: it ranked prompts already."""
        with suppress(Exists):
            self._store.put_new(self.key(number), packed_ranker(ranker))

    def get(self, number: int, backbone: Backbone) -> Ranker:
        """Load a ranker. Raises RankerError if it can't be used."""
        key = self.key(number)
        return unpacked_ranker(self._store.get(key, _LARGEST), backbone, f"{self._store.url}/{key}")

    def collect(self, keep: int) -> None:
        """Remove all but the newest `keep` rankers."""
        for number in self.numbers()[:-keep]:
            self._store.delete(self.key(number))


def start_from(where: str, store: Store, backbone: Backbone) -> Ranker:
    """Load the ranker that `lengths.start` names: by a URL, or by a key in the run's own store."""
    return unpacked_ranker(_read(where, store), backbone, f"lengths.start: {where}").as_start()


def check_start(where: str, store: Store, backbone: str) -> None:
    """Raise RankerError if a run can't start from a ranker, as far as its file's header tells."""
    _check(_read(where, store), backbone, f"lengths.start: {where}")


def _read(where: str, store: Store) -> bytes:
    url, _, key = where.rpartition("/") if "://" in where else ("", "", where)
    try:
        return (open_store(url) if url else store).get(key, _LARGEST)
    except Missing as error:
        raise RankerError(f"lengths.start: {error}; `streamrl ranker RUN` makes one") from error


def packed_ranker(ranker: Ranker) -> bytes:
    """Pack a ranker into a file's bytes, signed if there is a key."""
    about = json.dumps({"schema": SCHEMA, "backbone": ranker.backbone.name, "version": ranker.version})
    plain, ring = save(ranker.arrays(), metadata={_ABOUT: about}), ring_from_env()
    if not ring.signs:
        return plain
    signature = str(ring.sign(_signed(plain, "a ranker"), _KIND))
    return save(ranker.arrays(), metadata={_ABOUT: about, _SIGNATURE: signature})


def unpacked_ranker(data: bytes, backbone: Backbone, where: str) -> Ranker:
    """Read a ranker from a file's bytes. Raises RankerError if it can't be used."""
    _check(data, backbone.name, where)
    try:
        return Ranker.restored(load(data), backbone)
    except (SafetensorError, StateError, ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise RankerError(f"{where} can't be read: {error}; {_AGAIN}") from error


def _check(data: bytes, backbone: str, where: str) -> None:
    """Raise if a file is no ranker of this schema and backbone, or has no good signature."""
    about, signature = _about(data, where)
    ring = ring_from_env()
    ring.verify(_signed(data, where) if ring.trusts else b"", signature, where, _KIND)
    try:
        schema, name = int(about["schema"]), str(about["backbone"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise RankerError(f"{where} is not a stored ranker: {error}; {_AGAIN}") from error
    if schema != SCHEMA:
        raise RankerError(f"{where} has schema {schema}; this version of StreamRL reads {SCHEMA}: {_AGAIN}")
    if name != backbone:
        raise RankerError(
            f"{where} was trained with backbone {name!r}, and lengths.backbone is {backbone!r}: "
            f"use that one, or {_AGAIN}"
        )


def _about(data: bytes, where: str) -> tuple[dict[str, Any], str | None]:
    """Return a file's description of itself, and its signature (None if it has none)."""
    try:
        said = _header(data)[0]["__metadata__"]
        about = json.loads(said[_ABOUT])
        if not isinstance(about, dict):
            raise TypeError(f"its description is no JSON object: {str(about)[:64]}")
        return about, said.get(_SIGNATURE)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RankerError(f"{where} is not a stored ranker: {error}; {_AGAIN}") from error


def _signed(data: bytes, where: str) -> bytes:
    """Return the bytes that a signature signs: the whole file, without the signature."""
    try:
        header, body = _header(data)
        header["__metadata__"].pop(_SIGNATURE, None)
        said = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RankerError(f"{where} is not a stored ranker: {error}; {_AGAIN}") from error
    return said.encode() + b"\0" + blake3(body).digest()


def _header(data: bytes) -> tuple[dict[str, Any], memoryview]:
    if len(data) > _LARGEST:
        raise ValueError(f"it has {len(data)} bytes; {_LARGEST} are the most")
    header, at = header_in(data, _LARGEST_HEADER)
    return json.loads(header), memoryview(data)[at:]
