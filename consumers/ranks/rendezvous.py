"""The address at which ranks of other machines find a run's trainer, and the key by which they are let in.

runs/<run>/ranks.json   written by each start of a trainer that has such ranks; the newest counts

Whoever may read the run's folder of the object store may become a rank. The key is drawn at each start.
"""

from __future__ import annotations

import json
import secrets
import time

import msgspec

from infra.keys import SIGNING, TRUSTED, ring_from_env
from infra.runs import RunRecord
from infra.stores.store import Missing, Store, StoreError

_KIND = "ranks"
_LARGEST = 16 << 10


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """The place where ranks meet for one start of a trainer."""

    run: str
    identity: str  # of the run, see `RunRecord`
    host: str
    port: int
    key: str  # in hexadecimal
    at: float
    signature: str | None = None

    @property
    def content(self) -> bytes:
        """The bytes that are signed."""
        rest = {name: value for name, value in msgspec.to_builtins(self).items() if name != "signature"}
        return json.dumps(rest, sort_keys=True).encode()


def _key(run: str) -> str:
    return f"runs/{run}/ranks.json"


def announce(store: Store, record: RunRecord, host: str, port: int) -> Rendezvous:
    """Write down where ranks find the trainer that starts now, with a new key."""
    ring = ring_from_env()
    found = Rendezvous(
        run=record.id, identity=record.identity, host=host, port=port, key=secrets.token_hex(32),
        at=time.time(),
    )  # fmt: skip
    signature = ring.sign(found.content, _KIND)
    if ring.trusts and signature is None:
        raise StoreError(
            f"ranks of other machines would not believe where the trainer of {record.id} is: {TRUSTED} is "
            f"set; set {SIGNING} too"
        )
    found = msgspec.structs.replace(found, signature=signature)
    store.put(_key(record.id), msgspec.json.encode(found))
    return found


def newest(store: Store, record: RunRecord) -> Rendezvous | None:
    """Return where ranks find the newest start of a run's trainer; None if no start has said it.

    Raises StoreError if it can't be read, and KeysError if it is not signed as it must be.
    """
    where = f"{store.url}/{_key(record.id)}"
    try:
        raw = store.get(_key(record.id), _LARGEST)
    except Missing:
        return None
    try:
        found = msgspec.json.decode(raw, type=Rendezvous)
        bytes.fromhex(found.key)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreError(f"{where} does not say where the trainer is: {error}") from error
    if (found.run, found.identity) != (record.id, record.identity):
        raise StoreError(f"{where} is of another run than {record.id}")
    ring_from_env().verify(found.content, found.signature, where, _KIND)
    return found
