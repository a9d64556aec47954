"""The addresses at which ranks of other machines find rank 0, and the keys by which they are let in.

runs/<run>/ranks.json              of the trainer, if it has such ranks
runs/<run>/engine_ranks/<n>.json   of the engine of generator n, if it has such ranks

Each start of a rank 0 writes its own anew; the newest counts. Whoever may read the run's folder of the object
store may become a rank. The key is drawn at each start.
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
import time

import msgspec

from infra.keys import SIGNING, TRUSTED, ring_from_env
from infra.runs import RunRecord
from infra.stores.store import Missing, Store, StoreError

TRAINER = "ranks"  # the meeting of the trainer's ranks

_ENGINES = "engine_ranks/"
_KIND = "ranks"
_LARGEST = 16 << 10
_NUMBER = re.compile(r"[0-9]{1,9}")
_PORTS = range(1, 1 << 16)


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """The place where ranks meet for one start of a rank 0."""

    run: str
    identity: str  # of the run, see `RunRecord`
    meeting: str  # whose ranks meet: the name of the object without its ending
    host: str  # an address, no name
    port: int
    key: str  # in hexadecimal
    at: float
    signature: str | None = None

    @property
    def content(self) -> bytes:
        """The bytes that are signed."""
        rest = {name: value for name, value in msgspec.to_builtins(self).items() if name != "signature"}
        return json.dumps(rest, sort_keys=True).encode()


def engine_meeting(generator: int) -> str:
    """Return the name of the meeting of a generator's engine."""
    return f"{_ENGINES}{generator}"


def engine_meetings(store: Store, record: RunRecord) -> list[str]:
    """Return the names of the meetings of all engines of a run that have been announced."""
    folder = f"runs/{record.id}/{_ENGINES}"
    names = [key.removeprefix(folder).removesuffix(".json") for key in store.list(folder.rstrip("/"))]
    numbers = sorted(int(name) for name in names if _NUMBER.fullmatch(name))
    return [engine_meeting(number) for number in numbers]


def _key(run: str, meeting: str) -> str:
    return f"runs/{run}/{meeting}.json"


def announce(
    store: Store, record: RunRecord, host: str, port: int, meeting: str = TRAINER
) -> Rendezvous:  # fmt: skip
    """Write down where ranks find the rank 0 that starts now, with a new key."""
    ring = ring_from_env()
    found = Rendezvous(
        run=record.id, identity=record.identity, meeting=meeting, host=host, port=port,
        key=secrets.token_hex(32), at=time.time(),
    )  # fmt: skip
    signature = ring.sign(found.content, _KIND)
    if ring.trusts and signature is None:
        raise StoreError(
            f"ranks of other machines would not believe where rank 0 of {meeting} of {record.id} is: "
            f"{TRUSTED} is set; set {SIGNING} too"
        )
    found = msgspec.structs.replace(found, signature=signature)
    store.put(_key(record.id, meeting), msgspec.json.encode(found))
    return found


def newest(store: Store, record: RunRecord, meeting: str = TRAINER) -> Rendezvous | None:
    """Return where ranks find the newest start of a rank 0; None if no start has said it.

    Raises StoreError if it can't be read, and KeysError if it is not signed as it must be.
    """
    where = f"{store.url}/{_key(record.id, meeting)}"
    try:
        raw = store.get(_key(record.id, meeting), _LARGEST)
    except Missing:
        return None
    try:
        found = msgspec.json.decode(raw, type=Rendezvous)
        bytes.fromhex(found.key)
        ipaddress.ip_address(found.host)
        if found.port not in _PORTS:
            raise ValueError(f"there is no port {found.port}")
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreError(f"{where} does not say where rank 0 is: {error}") from error
    if (found.run, found.identity, found.meeting) != (record.id, record.identity, meeting):
        raise StoreError(f"{where} is of another run than {record.id}, or of other ranks than {meeting}")
    ring_from_env().verify(found.content, found.signature, where, _KIND)
    return found


def withdraw(store: Store, record: RunRecord, mine: Rendezvous) -> None:
    """Take back where ranks meet, unless a newer start has written it anew."""
    if newest(store, record, mine.meeting) == mine:
        store.delete(_key(record.id, mine.meeting))
