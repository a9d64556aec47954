"""A run's record in the object store: all that a process, at any site, needs to take part in the run.

runs/<run>/run.json     written when the run is made; replaced only by a resume
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError

from infra.contents import contents_of
from infra.errors import Explained
from infra.keys import SIGNING, TRUSTED, ring_from_env
from infra.resuming import other_bits, refused
from infra.stores.store import Exists, Missing, Store
from infra.stores.store_identity import check_identity, identify
from schemas.importing import BadImport
from schemas.runspec import RunSpec

_log = logging.getLogger(__name__)
_KIND = "run"  # kind of the signed content
_LARGEST = 16 << 20  # bytes of a record: nearly all of them have some thousand
_MOST_FLOW_RUNS = 64  # so many of the newest are remembered


class RunError(Explained):
    """A run that can't be made, found or resumed."""


class ForkOrigin(BaseModel):
    """The run that a fork went on from, and where."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    identity: str = ""  # of that run's record
    step: int  # the fork's first step; all before it are that run's
    iteration: int  # the fork's first iteration

    @property
    def words(self) -> str:
        """The origin, for people."""
        return f"{self.run} at step {self.step}"


class RunRecord(BaseModel):
    """A run, as it is recorded in the store."""

    model_config = ConfigDict(extra="forbid")

    id: str
    spec: RunSpec
    bootstrap_servers: str
    store: str
    model: str  # folder with the starting weights and the tokenizer
    created_at: float
    identity: str = ""  # drawn when the run was made, to tell runs of one id apart; "": an old run
    store_id: str = ""  # of the store that the run was made in; "": an old run, without it
    contents: dict[str, str] = {}  # hashes of the files that the spec names, and of the model
    flow_runs: tuple[str, ...] = ()  # ids of Prefect flow runs that made it or went on with it, newest last
    fork: ForkOrigin | None = None  # where it goes on from another run; None: it begins with `model`
    signature: str | None = None  # of all other fields, if there was a key

    def here(self, model: str | None, reward: str | None) -> RunRecord:
        """Return a copy for a machine that has the model's folder, or the reward, at another path."""
        task = self.spec.task.model_copy(update={"reward": reward} if reward else {})
        spec = self.spec.model_copy(update={"task": task})
        return self.model_copy(update={"spec": spec, **({"model": model} if model else {})})

    def with_code(self, *sections: str) -> RunRecord:
        """Return a copy with the code that these sections of the run file choose. Raises RunError."""
        try:
            return self.model_copy(update={"spec": self.spec.with_code(*sections)})
        except BadImport as error:
            raise RunError(f"run {self.id}: {error}") from error


def _key(run: str) -> str:
    return f"runs/{run}/run.json"


def create(
    store: Store, spec: RunSpec, *, bootstrap_servers: str, model: str, run_id: str | None = None,
    topics: Iterable[str] = (), flow_run: str = "", name: str | None = None, fork: ForkOrigin | None = None,
) -> RunRecord:  # fmt: skip
    """Record a new run under the next free number of its name, and return the record.

    If two callers create one at the same time, each gets its own number. `run_id`: use this id instead; raise
    RunError if it exists. `topics`: the broker's topic names, whose numbers are not used again: a run in
    another store, or in a deleted one, may have left them. `flow_run`: the Prefect flow run that makes it.
    A store without an id gets one here. `name`: for the id, instead of the run file's, which decides seeds.
    `fork`: where it goes on from another run.
    """
    name = name or spec.run
    ids = {*runs_of(store), *(topic.rpartition(".")[0] for topic in topics)}
    number = 1 + max((int(run.rpartition("-")[2]) for run in _of_name(ids, name)), default=0)
    record = RunRecord(
        id="", spec=spec, bootstrap_servers=bootstrap_servers, store=store.url, model=model,
        created_at=time.time(), identity=uuid.uuid4().hex, store_id=identify(store),
        contents=contents_of(spec, model), flow_runs=(flow_run,) if flow_run else (), fork=fork,
    )  # fmt: skip
    while True:
        record = record.model_copy(update={"id": run_id or f"{name}-{number}"})
        try:
            store.put_new(_key(record.id), _signed(record))
            return record
        except Exists:
            if run_id:
                raise RunError(
                    f"run {run_id} exists in {store.url}: resume it, or leave the id out"
                ) from None
            number += 1


def _signed(record: RunRecord) -> bytes:
    """Return a record as it is stored, signed if there is a key. Raise RunError if a signature is missing."""
    ring = ring_from_env()
    said = record.model_copy(update={"signature": None}).model_dump(mode="json")
    if record.fork is None:
        del said["fork"]  # versions of StreamRL that know no forks read the record, too
    said["signature"] = ring.sign(_content(said), _KIND)
    if ring.trusts and said["signature"] is None:
        raise RunError(
            f"run {record.id} can't be written down unsigned: {TRUSTED} is set, so nobody would believe it; "
            f"set {SIGNING} too"
        )
    return json.dumps(said, indent=1).encode()


def _content(said: dict[str, Any]) -> bytes:
    """Return the bytes that are signed: all fields of a record, also those unknown to this version."""
    rest = {name: value for name, value in said.items() if name != "signature"}
    return json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()


def runs_of(store: Store, name: str | None = None) -> list[str]:
    """Return the ids of all runs, or of those with a name, sorted by name and number."""
    ids = [key.split("/")[1] for key in store.list("runs") if key.endswith("/run.json")]
    if name is not None:
        ids = _of_name(ids, name)
    return sorted(ids, key=lambda run: (run.rpartition("-")[0], int(run.rpartition("-")[2])) if
                  run.rpartition("-")[2].isdigit() else (run, 0))  # fmt: skip


def _of_name(ids: Iterable[str], name: str) -> list[str]:
    return [run for run in ids if run.rpartition("-")[0] == name and run.rpartition("-")[2].isdigit()]


def find(store: Store, run: str) -> RunRecord:
    """Return a run's record by the run's id. Raise RunError if there is none, or none that can be read."""
    try:
        raw = store.get(_key(run), _LARGEST)
    except Missing:
        known = ", ".join(runs_of(store)[-5:])
        newest_run = known or "none. If there should be some, look whether the store is mounted there"
        raise RunError(
            f"there is no run {run} in {store.url}; the newest there: {newest_run}. `streamrl runs` lists "
            "all, and --store names another store"
        ) from None
    where = f"{store.url}/{_key(run)}"
    try:
        if len(raw) > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes")
        said = json.loads(raw)
        record = RunRecord.model_validate(said)
    except (ValidationError, ValueError, RecursionError) as error:
        raise RunError(f"{where} is not a run record: {error}") from error
    if record.id != run:
        raise RunError(f"{where} is the record of run {record.id}, not of {run}")
    ring_from_env().verify(_content(said), record.signature, where, _KIND)
    return record


def of_flow_run(store: Store, name: str, flow_run: str) -> str | None:
    """Return the newest run of a name that a Prefect flow run made or went on with; None if there is none."""
    for run in reversed(runs_of(store, name)):
        try:
            if flow_run in find(store, run).flow_runs:
                return run
        except RunError as error:
            _log.warning("a run is passed over: %s", str(error).splitlines()[0])
    return None


def unique_name(record: RunRecord) -> str:
    """Return a name for the run that no other run has, in this store or another one."""
    drawn = record.identity or f"{record.store} {record.created_at!r}"
    return f"{record.id}-{blake3(f'{record.store_id} {record.id} {drawn}'.encode()).hexdigest(8)}"


def newest_run(store: Store) -> RunRecord | None:
    """Return the run that was created last, among records that can be read; None if there is none."""
    records = []
    for run in runs_of(store):
        try:
            records.append(find(store, run))
        except RunError as error:
            _log.warning("a run is passed over: %s", str(error).splitlines()[0])
    return max(records, key=lambda record: record.created_at, default=None)


def resume(
    store: Store, run: str, spec: RunSpec, *, bootstrap_servers: str, model: str | None = None,
    say: Callable[[str], None] = _log.info, flow_run: str = "",
) -> RunRecord:  # fmt: skip
    """Record an existing run with new settings. Raise RunError if they would change what is learned.

    `model`: where its starting model is now; None means the recorded place. `say` gets a message if the new
    settings may change the last bits of results. `flow_run`: the Prefect flow run that goes on with it.
    """
    old = find(store, run)
    check_identity(store, old.store_id)
    model = (model if old.contents else None) or old.model
    found = contents_of(spec, model) if old.contents else {}
    if why := refused(old.spec, spec, old.contents, found):
        raise RunError(
            f"run {run} {why}. A resumed run must not change what is learned: undo that, "
            "or start a new run without --resume"
        )
    if changed := other_bits(old.spec, spec):
        say(f"run {run} goes on with other {', '.join(changed)}: what is learned is the same, the last bits "
            "may differ from those of a run that was not resumed")  # fmt: skip
    flow_runs = tuple(one for one in old.flow_runs if one != flow_run) + ((flow_run,) if flow_run else ())
    update = {"spec": spec, "bootstrap_servers": bootstrap_servers, "model": model, "store": store.url,
              "flow_runs": flow_runs[-_MOST_FLOW_RUNS:]}  # fmt: skip
    record = old.model_copy(update=update)
    store.put(_key(run), _signed(record))
    return record


def host_name() -> str:
    """Return this machine's name, for people."""
    return os.uname().nodename
