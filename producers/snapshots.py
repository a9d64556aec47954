"""Snapshots: the feeder's state, so that a feeder that starts again reads only the records after it.

runs/<run>/feeder/00000041-03.json     after iteration 41 was admitted, by start 3 of the feeder

A snapshot only saves time: all that it says follows from the log. One that is damaged or newer than the log
is skipped; an older one or the log's beginning takes its place, and the same prompts are planned.
"""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.errors import Explained
from infra.keys import ring_from_env
from infra.stores.store import Store, StoreError

_KEPT = 3
_KIND = "feeder's snapshot"
_LARGEST = 256 << 20  # bytes
_LEAST_S = 1.0  # least time from one snapshot to the next

Positions = dict[int, int]  # by partition


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class Lot(_Part):
    """Groups that one version admitted. With the task, it determines their prompts."""

    version: int = Field(ge=0)
    first: int = Field(ge=0)  # the first group; the others follow by number
    predicted: list[float]
    predictor: str
    edges: list[float]


class PlannerState(_Part):
    """The state of a planner."""

    version: int = Field(0, ge=0)  # iterations whose last step is in the ledger
    steps: int = Field(0, ge=0)  # number of the next step
    planned: int = Field(-1, ge=-1)  # the newest version at which groups were admitted
    admitted: int = Field(0, ge=0)  # groups
    edges: list[float]
    recent: list[float] = []  # predictions that the edges are computed from
    lots: list[Lot] = []  # of iterations that are not trained yet
    taken: list[int] = []  # groups that are trained, of those that could still be (order arrival)


class Opened(_Part):
    """Where topics ended before something was sent: all records about it come after."""

    prompts: Positions = {}
    dead: int = Field(0, ge=0)


class Began(_Part):
    """The number and ledger position of an iteration's first step."""

    step: int = Field(ge=0)
    position: int = Field(ge=0)


class OpenEvaluation(_Part):
    """An evaluation that still waits for samples."""

    version: int = Field(ge=0)
    opened: Opened
    samples: Positions


class Announced(_Part):
    """The ranker and the edges of the length classes that were announced last."""

    predictor: str = ""
    edges: list[float] = []


class FeederSnapshot(_Part):
    """The whole state of a feeder."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    format: Literal[1] = 1
    run: str
    epoch: int = Field(ge=0)
    planner: PlannerState
    ledger: int = Field(ge=0)  # position behind the last step that was taken
    began: dict[int, Began]  # by iteration
    samples: Positions  # all samples of open iterations come after these positions
    samples_of: dict[int, Positions]  # by iteration: what raises `samples` once it is long trained
    iterations: dict[int, Opened] = Field(alias="windows")  # open iterations; files have their old name
    ends: Opened  # if nothing is open: where to read on
    evals: int = Field(ge=0)
    evaluated: list[int]
    evaluations: list[OpenEvaluation]
    announced: Announced
    roots: dict[int, str] = {}  # of a fork: roots of versions of its run that samples may still name

    def opened(self) -> Opened:
        """Return where to read from to find all that is open."""
        parts = [*self.iterations.values(), *(one.opened for one in self.evaluations)] or [self.ends]
        return Opened(prompts=lowest([part.prompts for part in parts]), dead=min(part.dead for part in parts))


class _File(_Part):
    content: dict[str, Any]
    digest: str
    signature: str | None = None


def lowest(many: list[Positions]) -> Positions:
    """Return the lowest position by partition.

    A partition that is missing in one of them is left out, and so read from its start.
    """
    common = set(many[0]).intersection(*many[1:]) if many else set()
    return {partition: min(one[partition] for one in many) for partition in sorted(common)}


class Snapshots:
    """A run's snapshots in its store."""

    def __init__(self, store: Store, run: str, warn: Callable[[str], None]) -> None:
        self._store, self._run, self._warn = store, run, warn
        self._folder = f"runs/{run}/feeder"
        self._known: deque[str] | None = None

    def newest(self, misfit: Callable[[FeederSnapshot], str]) -> FeederSnapshot | None:
        """Return the newest usable snapshot, or None.

        `misfit` says why one contradicts the log; empty if it fits.
        """
        try:
            keys = self._keys()
        except StoreError as error:
            self._warn(f"{error}: the feeder reads the log from its beginning")
            return None
        for key in reversed(keys):
            try:
                snapshot = unpacked_snapshot(self._store.get(key, _LARGEST), f"{self._store.url}/{key}")
                why = misfit(snapshot) if snapshot.run == self._run else f"it is of run {snapshot.run[:64]}"
            except (Explained, ValueError, RecursionError) as error:
                why = str(error)[:500]
            if not why:
                return snapshot
            self._warn(f"{self._store.url}/{key} is passed over: {why}; an older one stands in for it")
        return None

    def put(self, snapshot: FeederSnapshot) -> None:
        """Write a snapshot, and remove all but the newest three."""
        if self._known is None:
            self._known = deque(self._keys())
        key = f"{self._folder}/{snapshot.planner.version:08d}-{snapshot.epoch:02d}.json"
        self._store.put(key, packed_snapshot(snapshot))
        if key not in self._known:
            self._known.append(key)
        while len(self._known) > _KEPT:
            self._store.delete(self._known[0])
            self._known.popleft()

    def _keys(self) -> list[str]:
        """List the keys of snapshots, oldest first. Other files in the folder are ignored."""
        pattern = re.compile(rf"{re.escape(self._folder)}/(\d{{8,10}})-(\d{{2,10}})\.json")
        found = [match for key in self._store.list(self._folder) if (match := pattern.fullmatch(key))]
        return [match[0] for match in sorted(found, key=lambda one: (int(one[1]), int(one[2])))]


def packed_snapshot(snapshot: FeederSnapshot) -> bytes:
    """Pack a snapshot into a file's bytes: content, digest, and a signature if there is a key."""
    content: dict[str, Any] = json.loads(snapshot.model_dump_json())
    if not snapshot.roots:
        del content["roots"]  # versions of StreamRL that know no such field read the snapshot, too
    digest = _digest(content)
    signature = ring_from_env().sign(digest.encode(), _KIND)
    return json.dumps({"content": content, "digest": digest, "signature": signature}).encode()


def unpacked_snapshot(data: bytes, where: str) -> FeederSnapshot:
    """Read a snapshot from a file's bytes. Raises ValueError or KeysError if it can't be used."""
    if len(data) > _LARGEST:
        raise ValueError(f"it has {len(data)} bytes; {_LARGEST} are the most")
    try:
        file = _File.model_validate_json(data)
        if _digest(file.content) != file.digest:
            raise ValueError("it is damaged: its digest is not that of its content")
        ring_from_env().verify(file.digest.encode(), file.signature, where, _KIND)
        return FeederSnapshot.model_validate_json(json.dumps(file.content))
    except ValidationError as error:
        raise ValueError(f"it is no snapshot: {error}") from error


def _digest(content: dict[str, Any]) -> str:
    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Keeper:
    """Stores the newest snapshot now and then, in a thread of its own."""

    def __init__(self, snapshots: Snapshots, warn: Callable[[str], None]) -> None:
        self._snapshots, self._warn = snapshots, warn
        self._newest: FeederSnapshot | None = None
        self._came, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="snapshots")

    def open(self) -> Keeper:
        """Start the thread. Return itself."""
        self._thread.start()
        return self

    def offer(self, snapshot: FeederSnapshot) -> None:
        """Store this snapshot soon, in place of one that still waits."""
        self._newest = snapshot
        self._came.set()

    def close(self) -> None:
        """Store the snapshot that was offered last, and end the thread."""
        self._closed.set()
        self._came.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._came.wait()
            self._came.clear()
            ends = self._closed.is_set()
            newest, self._newest = self._newest, None
            if newest is not None:
                self._put(newest)
            if ends:
                return
            self._closed.wait(_LEAST_S)

    def _put(self, snapshot: FeederSnapshot) -> None:
        try:
            self._snapshots.put(snapshot)
        except Exception as error:  # a snapshot only saves time: the run goes on without
            self._warn(f"the snapshot of iteration {snapshot.planner.version} can't be stored: {error}")
