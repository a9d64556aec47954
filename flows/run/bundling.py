"""Makes a step file of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from consumers.replay import Again, CapturedSteps
from flows.run.prompt_search import PromptsGone, prompt_records
from flows.run.versions_beside import versions_beside
from infra.bus import Record
from infra.machine_kind import kind_of_machine
from infra.run_handle import RunHandle
from infra.step_file.step_file_writer import StepFileContent, Written, write_step_file
from infra.weights.bits import bits_of
from infra.weights.folder import ModelFolder
from schemas.losses import SAMPLES
from schemas.topics import Topics
from schemas.wire import encode


@dataclass(frozen=True)
class MadeStepFile:
    """A step file that was written."""

    path: Path
    size: int
    first: int
    last: int
    samples_size: int  # bytes of its samples in the log
    prompts_missing: str  # why it has no prompts; empty: it has them
    versions: list[int]  # whose weights it has beside the state


def make_step_file(
    again: Again, handle: RunHandle, path: Path | None, first: int | None, last: int | None, *, failed: bool,
    regenerate: bool, written: Written,
) -> MadeStepFile:  # fmt: skip
    """Write a step file; by default RUN-stepN.tar.zst in the current folder.

    `regenerate`: with the weights of all versions that drew the samples, even if they take much room.
    """
    found = again.capture(first, last, failed=failed)
    records, missing = _records(found, handle)
    state = {name: bits_of(one) for name, one in found.state.items()}
    versions = versions_beside(found, handle, state, regenerate=regenerate)
    spec, folder = handle.spec, ModelFolder(handle.record.model)
    reference = spec.loss.reference if again.needs.reference else None
    own = reference not in (None, SAMPLES, handle.record.model)
    other = ModelFolder(str(reference)) if own else None
    content = StepFileContent(
        record=handle.record, first=found.first, last=found.last, asked=found.last, failed=failed,
        made_on=_made_on(found), samples_of=found.samples.name.removesuffix(".samples"),
        records=records, versions=versions, state=state,
        model=folder.bits() if spec.model.lora or (again.needs.reference and other is None) else {},
        reference=other.bits() if other else {}, model_files=folder.beside,
        reference_files=other.beside if other else {},
    )  # fmt: skip
    path = path or Path(f"{handle.run}-step{found.last}.tar.zst")
    size = write_step_file(content, path, written)
    samples = sum(len(one.value) for one in content.records["samples"])
    return MadeStepFile(path, size, found.first, found.last, samples, missing, sorted(versions))


def _made_on(found: CapturedSteps) -> str:
    newest = found.failed or found.records[-1]
    return newest.made_on or kind_of_machine()


def _records(found: CapturedSteps, handle: RunHandle) -> tuple[dict[str, list[Record]], str]:
    """Return the records that a step file has, by kind; and why it has no prompts."""
    ledger, samples = handle.topics.ledger.name, found.samples.name
    rows = {(row.partition, row.offset): row.sample for row in found.rows}
    records = {
        "ledger": [Record(ledger, 0, one.step, str(one.step).encode(), encode(one)) for one in found.records],
        "samples": [
            Record(samples, *place, sample.id.encode(), encode(sample)) for place, sample in rows.items()
        ],
    }
    if found.failed is not None:
        records["failed"] = [Record("failed", 0, found.failed.step, b"", encode(found.failed))]
    prompts = Topics(samples.removesuffix(".samples"), handle.spec.lengths.classes).prompts
    try:
        records["prompts"] = prompt_records(handle, prompts, [row.sample for row in found.rows])
    except PromptsGone as error:
        return records, str(error)
    return records, ""
