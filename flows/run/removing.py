"""Removes a run: its topics, its objects, and its record last, so that a removal that was killed can go on.

A run that is alive is not removed: one whose processes send heartbeats, whose flow writes down its state, or
whose report folder a flow holds.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from flows.run.folder_owner import lock_of_run
from flows.run.locations import named_as, report_folder
from flows.run.request import RunFailed
from flows.run.run_state import HEARD_WITHIN_S, is_heard_again, read_state
from flows.run.suggested_commands import SuggestedCommands
from infra.archive.segments import ARCHIVES
from infra.bus import Bus, Reader
from infra.files.locks import LockHeld
from infra.gate import Gate, passed_over
from infra.ownership import topics_owner
from infra.roles.turns import turn_files
from infra.runs import RunError, RunRecord, find
from infra.stores.orphans import sweep
from infra.stores.store import Prunable, Store
from infra.stores.store_identity import check_identity
from schemas.messages import Heartbeat
from schemas.topics import Topics

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,80}")
LISTEN_S = 4.0  # a process sends a heartbeat twice a second, a busy one later
_NEWEST = 2_000  # records of the status topic that are looked at
_FRESH_S = 15.0  # a process whose last heartbeat is no older may be alive
_AT_ONCE = 16  # objects that are removed at the same time

ObjectProgress = Callable[[int, int], None]  # objects that are gone so far, and all objects


@dataclass(frozen=True)
class Remains:
    """Everything that is left of a run."""

    run: str
    record: RunRecord | None  # None: it is gone already, or can't be read
    topics: list[str] = field(default_factory=list)
    foreign: str = ""  # store of another run of that id, if the topics belong to that one
    objects: list[str] = field(default_factory=list)
    report: Path | None = None  # its folder on this machine

    def __bool__(self) -> bool:
        return bool(self.topics or self.objects)


def remains(
    store: Store, run: str, open_bus: Callable[[RunRecord], Bus] | None,
    tell: Callable[[str], None] = lambda text: None,
) -> Remains:  # fmt: skip
    """Return everything that is left of a run in a store and, with `open_bus`, on its broker.

    Raises RunError if `run` is no id, RunFailed if the run is alive.
    """
    if not _ID.fullmatch(run):  # the id becomes part of a path: `..` would be the whole store
        raise RunError(f"{run!r} is no id of a run: such an id is a name and a number, as count-1")
    folders = f"{ARCHIVES}/{run}", f"runs/{run}"
    objects = [key for folder in folders for key in store.list(folder) if key.startswith(f"{folder}/")]
    if f"runs/{run}/run.json" not in objects:
        return Remains(run, None, objects=objects)
    try:
        record = find(store, run)
    except RunError as error:
        if open_bus is not None:
            raise RunError(
                f"{error}. Only this record says which topics the run has, and on which broker: "
                "--no-topics removes the objects of the run without them"
            ) from error
        return Remains(run, None, objects=objects)
    check_identity(store, record.store_id)
    _refuse_if_kept(store, run, tell)
    folder = report_folder(record)
    found = Remains(run, record, objects=objects, report=folder if folder.is_dir() else None)
    if open_bus is None:
        return found
    with contextlib.closing(open_bus(record)) as bus:
        topics = Topics(run, record.spec.lengths.classes)
        there = bus.topic_names()
        names = [topic.name for topic in topics.all() if topic.name in there]
        owner = topics_owner(bus, topics, run) if topics.owner.name in there else None
        if owner is not None and owner.identity != record.identity:
            return Remains(run, record, foreign=owner.store, objects=objects, report=found.report)
        if topics.status.name in there:
            _refuse_if_alive(bus, topics, run)
    return Remains(run, record, names, objects=objects, report=found.report)


def remove(
    store: Store, found: Remains, open_bus: Callable[[RunRecord], Bus] | None, *, report: bool = False,
    progress: ObjectProgress = lambda done, whole: None,
) -> None:  # fmt: skip
    """Remove everything that was found. The report folder goes only with `report`."""
    with _held(found):
        if found.topics and found.record is not None and open_bus is not None:
            with contextlib.closing(open_bus(found.record)) as bus:
                bus.delete_topics(found.topics)
        record = f"runs/{found.run}/run.json"
        _delete(store, [key for key in found.objects if key != record], progress)
        folders = f"{ARCHIVES}/{found.run}", f"runs/{found.run}"
        for folder in folders:
            sweep(store, folder, file_grace_s=0.0, upload_grace_s=0.0)
        if record in found.objects:
            store.delete(record)
        progress(len(found.objects), len(found.objects))
        if isinstance(store, Prunable):
            for folder in folders:
                store.prune(folder)
    if found.record is not None:
        for file in turn_files(found.record):
            file.unlink(missing_ok=True)
    if report and found.report is not None:
        shutil.rmtree(found.report)


def _delete(store: Store, keys: list[str], progress: ObjectProgress) -> None:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for done, _ in enumerate(pool.map(store.delete, keys), 1):
            progress(done, len(keys) + 1)


@contextlib.contextmanager
def _held(found: Remains) -> Iterator[None]:
    """Hold the run's lock, so that no flow starts the run again. Raises RunFailed if a flow holds it."""
    if found.report is None:
        yield
        return
    try:
        with lock_of_run(found.run, found.report, 0.0):
            yield
    except LockHeld as error:
        raise RunFailed(f"run {found.run} is going on: stop it first (Ctrl-C). {error}") from error


def _refuse_if_kept(store: Store, run: str, tell: Callable[[str], None]) -> None:
    """Raise RunFailed if a flow of the run, on whichever machine, goes on writing down its state."""
    state = read_state(store, run)
    if state is not None and state.is_active and is_heard_again(store, run, state, HEARD_WITHIN_S, tell):
        stop = SuggestedCommands(run, named_as(store.url)).command("stop")
        raise RunFailed(f"run {run} is going on at {state.host}: stop it first ({stop})")


def _refuse_if_alive(bus: Bus, topics: Topics, run: str) -> None:
    """Raise RunFailed if a process of the run sends heartbeats, or has sent one in the last seconds."""
    first = bus.reader(topics.status)
    try:
        begin, end = first.begin_offsets()[0], first.end_offsets()[0]
    finally:
        first.close()
    reader = bus.reader(topics.status, {0: max(begin, end - _NEWEST)})
    try:
        alive = _alive(reader, end, Gate(Heartbeat, run, passed_over))
    finally:
        reader.close()
    if alive:
        raise RunFailed(
            f"run {run} is going on: {', '.join(alive[:4])} still send heartbeats. Stop the run first "
            "(Ctrl-C), or wait until it has ended"
        )


def _alive(reader: Reader, end: int, gate: Gate[Heartbeat]) -> list[str]:
    newest: dict[tuple[str, int], tuple[Heartbeat, bool]] = {}
    until = time.monotonic() + LISTEN_S
    while time.monotonic() < until:
        for record, beat in gate.take(reader.poll(0.2)):
            newest[beat.role, beat.number] = beat, record.offset >= end
        recent = [name for name, found in newest.items() if _is_alive(*found)]
        quiet = not newest or all(beat.is_last for beat, _ in newest.values())
        if reader.positions()[0] >= end and (recent or quiet):
            break
    return sorted(f"{role}-{number}" for (role, number), found in newest.items() if _is_alive(*found))


def _is_alive(beat: Heartbeat, new: bool) -> bool:
    return not beat.is_last and (new or abs(time.time() - beat.sent_at) < _FRESH_S)
