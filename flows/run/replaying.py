"""Replays steps of a run on this machine, during the run or long after it. Nothing of the run is changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from consumers.batches.log_places import Gone
from consumers.learners.learner import Learner
from consumers.ranks.choose_learner import learner_of
from consumers.replay import Again, StateBefore, StepProgress
from consumers.stream.recorded_groups import samples_topic
from flows.run.locations import named_store, store_option
from flows.run.replay_gpus import gpus_of_replay
from flows.run.request import RunFailed
from flows.run.step_files import OpenStepFile, opened_step_file
from flows.run.step_search import first_kept_step
from flows.run.suggested_commands import SuggestedCommands
from infra.errors import Explained
from infra.run_handle import RunHandle, opened_run
from infra.runs import find
from infra.step_file.index import StepFileIndex
from infra.step_file.unpacking import Read, is_step_file


@dataclass(frozen=True)
class Replaying:
    """A run, or a step file, whose steps can be taken again."""

    again: Again
    handle: RunHandle
    index: StepFileIndex | None  # of the step file


@contextmanager
def replaying(
    source: str, store_name: str, progress: StepProgress, *, read: Read = lambda done, total: None,
    own_code: bool = False, archive_alone: bool = False,
) -> Iterator[Replaying]:  # fmt: skip
    """Yield an object that replays steps of a run, or those in a step file.

    `read` hears how much of a step file is read. `own_code`: whether a step file may have a loss or learner
    imported that lies on this machine. `archive_alone`: read a run from its archive, and ask no broker.
    """
    opening = opened_source(source, store_name, read=read, own_code=own_code, archive_alone=archive_alone)
    with opening as (handle, start):
        again = taking_again(handle, progress, start.start if start else None)
        try:
            yield Replaying(again, handle, start.index if start else None)
        finally:
            again.close()


@contextmanager
def opened_source(
    source: str, store_name: str, *, read: Read = lambda done, total: None, own_code: bool = False,
    archive_alone: bool = False,
) -> Iterator[tuple[RunHandle, OpenStepFile | None]]:  # fmt: skip
    """Yield a run to read; of a step file, also what it begins with."""
    if is_step_file(source):
        with opened_step_file(Path(source), read, own_code=own_code) as found:
            yield found.handle, found
        return
    store = named_store(store_name)
    record = find(store, source).with_code("loss", "trainer")
    if not Path(record.model).is_dir():
        commands = SuggestedCommands(source, store_name, archive_alone=archive_alone)
        raise RunFailed(
            f"the model that run {source} began with is not on this machine: there is no folder "
            f"{record.model}. Where it is, `{commands.command('bundle')}` makes a file that replays anywhere"
        )
    with opened_run(
        store, record, "streamrl-replay", archive_alone=archive_alone, store_option=store_option(store_name)
    ) as handle:
        try:
            yield handle, None
        except Gone as error:
            raise RunFailed(f"{error}{_still_possible(handle)}") from error


def _still_possible(handle: RunHandle) -> str:
    """Say what can be done with a run whose samples are gone in part."""
    try:
        first = first_kept_step(handle, samples_topic(handle))
    except Explained:
        return ""
    kept = (
        "no step has all its samples any more" if first is None
        else f"from step {first} on all samples are there, and steps can be replayed that have a checkpoint "
        f"between step {first} and them (trainer.keep_checkpoints)"
    )  # fmt: skip
    return (
        f". It is in no archive, either: {kept}. Step files that were made in time replay as ever, and "
        "conditions of `streamrl bisect` on the ledger's metrics need no samples. For other runs: `streamrl "
        "archive` keeps records before retention removes them"
    )


def taking_again(handle: RunHandle, progress: StepProgress, start: StateBefore | None = None) -> Again:
    """Return an object that takes a run's steps again, with the model that the run began with.

    `start`: the state of a step file.
    """

    def learner() -> Learner:
        return learner_of(handle.record.model, handle.spec, run=handle.run, log=handle.log)

    return Again(handle, learner, progress, start, gpus_of_replay(handle))
