"""A run's record in the object store: what any process, on any site, needs to take part.

runs/<run>/run.json     written when the run is made; only a resume that extends the run replaces it
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.errors import Explained
from infra.store import Exists, Missing, Store
from schemas.runspec import RunSpec

_log = logging.getLogger(__name__)

# What a resumed run may change: none of it touches what is learned from a sample.
_CHANGEABLE = {"placement", "deadlines", "report", "trainer.checkpoint_every", "trainer.keep_checkpoints",
               "trainer.keep_weights", "trainer.learner", "trainer.ranks",
               "trainer.zero_stage", "algorithm.iterations", "evaluation.every"}  # fmt: skip


class RunError(Explained):
    """A run that can't be made or found."""


class RunRecord(BaseModel):
    """One run."""

    model_config = ConfigDict(extra="forbid")

    id: str
    spec: RunSpec
    bootstrap_servers: str
    store: str
    model: str  # folder with the starting weights and the tokenizer
    created_at: float
    identity: str = ""  # drawn when the run was made: two runs of one id in two stores differ; "": an old run
    store_id: str = ""  # of the store that it was made in; "": an old run, which does not know

    def here(self, model: str | None, reward: str | None) -> RunRecord:
        """As it is on a machine that has the model's folder, or the reward, at another place."""
        task = self.spec.task.model_copy(update={"reward": reward} if reward else {})
        spec = self.spec.model_copy(update={"task": task})
        return self.model_copy(update={"spec": spec, **({"model": model} if model else {})})


def _key(run: str) -> str:
    return f"runs/{run}/run.json"


def create(
    store: Store, spec: RunSpec, *, bootstrap_servers: str, model: str, run_id: str | None = None,
    topics: Iterable[str] = (),
) -> RunRecord:  # fmt: skip
    """A new run, under the next free number of its name; of two callers each gets a number of its own.

    `topics` are those of the broker: a run in another store, or in one that is gone, may have left some.
    """
    ids = {*runs_of(store), *(topic.rpartition(".")[0] for topic in topics)}
    number = 1 + max((int(run.rpartition("-")[2]) for run in _of_name(ids, spec.run)), default=0)
    while True:
        record = RunRecord(
            id=run_id or f"{spec.run}-{number}", spec=spec, bootstrap_servers=bootstrap_servers,
            store=store.url, model=model, created_at=time.time(), identity=uuid.uuid4().hex,
        )  # fmt: skip
        try:
            store.put_new(_key(record.id), record.model_dump_json(indent=1).encode())
            return record
        except Exists:
            if run_id:
                raise RunError(
                    f"run {run_id} exists in {store.url}: resume it, or leave the id out"
                ) from None
            number += 1


def runs_of(store: Store, name: str | None = None) -> list[str]:
    """The ids of all runs, or of those with a name, oldest first."""
    ids = [key.split("/")[1] for key in store.list("runs") if key.endswith("/run.json")]
    if name is not None:
        ids = _of_name(ids, name)
    return sorted(ids, key=lambda run: (run.rpartition("-")[0], int(run.rpartition("-")[2])) if
                  run.rpartition("-")[2].isdigit() else (run, 0))  # fmt: skip


def _of_name(ids: Iterable[str], name: str) -> list[str]:
    return [run for run in ids if run.rpartition("-")[0] == name and run.rpartition("-")[2].isdigit()]


def find(store: Store, run: str) -> RunRecord:
    """A run by its id."""
    try:
        raw = store.get(_key(run))
    except Missing:
        known = ", ".join(runs_of(store)[-5:]) or "none"
        raise RunError(f"there is no run {run} in {store.url}; the newest there: {known}") from None
    try:
        return RunRecord.model_validate(json.loads(raw))
    except (ValidationError, ValueError, RecursionError) as error:
        raise RunError(f"{store.url}/{_key(run)} is not a run record: {error}") from error


def newest(store: Store) -> RunRecord | None:
    """The run that was started last, of those whose records this version can read."""
    records = []
    for run in runs_of(store):
        try:
            records.append(find(store, run))
        except RunError as error:
            _log.warning("passed over: %s", str(error).splitlines()[0])
    return max(records, key=lambda record: record.created_at, default=None)


def resume(store: Store, run: str, spec: RunSpec, *, bootstrap_servers: str) -> RunRecord:
    """An existing run with what may change taken from `spec`; refuses what would change what is learned."""
    old = find(store, run)
    before, after = _flat(old.spec.model_dump(mode="json")), _flat(spec.model_dump(mode="json"))
    names = [*after, *(name for name in before if name not in after)]  # a section may have been left out
    changed = [name for name in names if before.get(name) != after.get(name) and not _changeable(name)]
    if changed:
        name = changed[0]
        raise RunError(
            f"run {run} was started with {name} = {before.get(name)!r}; the run file now says "
            f"{after.get(name)!r}. A resumed run must not change what is learned: undo that, "
            "or start a new run without --resume"
        )
    record = old.model_copy(update={"spec": spec, "bootstrap_servers": bootstrap_servers})
    store.put(_key(run), record.model_dump_json(indent=1).encode())
    return record


def _changeable(name: str) -> bool:
    return any(name == allowed or name.startswith(f"{allowed}.") for allowed in _CHANGEABLE)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else key)
    return flat


def host_name() -> str:
    """This machine's name, for people."""
    return os.uname().nodename
