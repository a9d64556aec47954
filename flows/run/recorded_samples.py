"""The samples of a recorded step, sampled again or with their rewards computed again: nothing is trained."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from consumers.batches.log_places import fetch_rows
from consumers.replay import StepProgress, newest_step_of
from consumers.steps.failing import FailedSteps
from consumers.stream.recorded_groups import samples_topic
from flows.run.prompt_search import problems_by_group, prompt_records
from flows.run.replay_gpus import gpus_of_replay
from flows.run.replaying import opened_source
from flows.run.request import RunFailed
from flows.run.rescoring import Rescored, RewardCode, rescored, reward_code
from flows.run.step_files import OpenStepFile, refuse_own_code
from flows.run.step_search import find_sample, step_record_of
from flows.run.suggested_commands import SuggestedCommands
from flows.run.version_weights import VersionWeights
from infra.machine_kind import kind_of_machine
from infra.run_handle import RunHandle
from infra.step_file.unpacking import Read
from producers.regenerating import Redrawn, RedrawProgress, Regenerating
from schemas.messages import Sample, StepRecord
from schemas.stages import Stage, tolerances


@dataclass(frozen=True)
class RecordedSamples:
    """A step's samples, or one of them."""

    handle: RunHandle
    begins: OpenStepFile | None
    own_code: bool
    record: StepRecord
    samples: Sequence[Sample]

    def regenerated(self, stepping: StepProgress, drawing: RedrawProgress) -> RedrawnStep:
        """Sample them again. Raises RunFailed or RegenerationError if something is missing."""
        spec = self.handle.spec
        if not spec.generator.draws_again:
            raise RunFailed(
                f"engine {spec.generator.engine} can't draw a recorded sample again, token by token. Without "
                "it, `streamrl replay` trains the step again, and `--rewards` computes its rewards"
            )
        if spec.generator.engine == "vllm" and importlib.util.find_spec("vllm") is None:
            raise RunFailed(
                "vLLM is not installed here, and the samples were drawn with it: pip install "
                "'streamrl[cpu]', or vllm on a machine with a GPU. Without it, `streamrl replay` trains the "
                "step again, and `--rewards` computes its rewards"
            )
        if self.begins is not None and not self.own_code:
            refuse_own_code("the step file", [one for one in [spec.generator.imported] if one])
        weights = VersionWeights(self.handle, self.begins, stepping)
        try:
            with (
                gpus_of_replay(self.handle),
                closing(Regenerating(self.handle.record.model, spec, weights.published)) as again,
            ):
                found = again.again(self.samples, drawing)
        finally:
            weights.close()
        return RedrawnStep(self.record, found, _tolerance(self.record, self.handle))

    def rescored(self, scoring: RedrawProgress) -> RescoredStep:
        """Compute their rewards again. Raises RunFailed or PromptsGone if something is missing."""
        record = self.handle.record
        if self.begins is not None:
            if not any(one.name == "records/prompts" for one in self.begins.index.members):
                raise RunFailed(
                    "the step file has no prompts, which a reward needs: it is of format 1, or retention had "
                    "removed them. `streamrl replay` takes the step again with the rewards as recorded"
                )
            if not self.own_code:
                refuse_own_code("the step file", [record.spec.task.reward or str(record.spec.task.python)])
        code = reward_code(record)
        prompts = prompt_records(self.handle, self.handle.topics.prompts, self.samples)
        return RescoredStep(
            self.record, rescored(record, self.samples, problems_by_group(prompts), scoring), code
        )


@dataclass(frozen=True)
class RedrawnStep:
    """A step's samples, sampled again."""

    record: StepRecord
    samples: Sequence[Redrawn]
    tolerance: float  # of a log-probability, on another kind of machine

    @property
    def equal(self) -> bool:
        """Whether all bits are the same."""
        return all(one.equal for one in self.samples)

    @property
    def first_other(self) -> Redrawn | None:
        """The first sample, in the step's order, that differs."""
        return next((one for one in self.samples if not one.equal), None)

    @property
    def apart(self) -> float:
        """The largest difference of a log-probability of the same answer so far."""
        return max((one.apart for one in self.samples), default=0.0)

    @property
    def same_machine(self) -> bool:
        """Whether the step was trained on this kind of machine; samples don't say where they were drawn."""
        return self.record.made_on in ("", kind_of_machine())

    @property
    def as_expected(self) -> bool:
        """Whether bits are equal, or differ on another kind of machine by no more than its tolerance."""
        return self.equal or (not self.same_machine and self.apart <= self.tolerance)


@dataclass(frozen=True)
class RescoredStep:
    """A step's samples, with the rewards that they have now."""

    record: StepRecord
    samples: Sequence[Rescored]
    code: RewardCode

    @property
    def equal(self) -> bool:
        """Whether all rewards are the same."""
        return all(one.equal for one in self.samples)


@contextmanager
def recorded_samples(
    source: str, store_name: str, step: int | None, sample: str | None, *, failed: bool = False,
    own_code: bool = False, archive_alone: bool = False, read: Read = lambda done, total: None,
) -> Iterator[RecordedSamples]:  # fmt: skip
    """Yield the samples of a step of a run, or of those in a step file.

    `step`: None is the newest, or that of `sample`. `failed`: of a step that could not be taken.
    """
    with opened_source(source, store_name, read=read, own_code=own_code, archive_alone=archive_alone) as (
        handle,
        begins,
    ):
        index = begins.index if begins is not None else None
        topic = samples_topic(handle)
        if topic.name != handle.topics.samples.name:
            maker = topic.name.removesuffix(".samples")
            commands = SuggestedCommands(maker, store_name, archive_alone=archive_alone)
            raise RunFailed(
                f"run {handle.run} trained samples of run {maker}: ask that run for how they were drawn, "
                f"such as `{commands.command('replay', '--sample', 'ID')}`"
            )
        if failed or (index is not None and index.failed and step in (None, index.asked)):
            record, place = FailedSteps(handle.store, handle.run).find(step), None
        elif sample is not None:
            record, place = find_sample(handle, sample, step)
        else:
            number = index.asked if index is not None else newest_step_of(handle)
            record, place = step_record_of(handle, number if step is None else step), None
        rows = fetch_rows(handle, topic, record)
        chosen = rows if place is None else rows[place : place + 1]
        if place is None and sample is not None:
            chosen = [row for row in rows if row.sample.id == sample]
            if not chosen:
                raise RunFailed(f"step {record.step} has no sample {sample[:60]}")
        samples = list({row.sample.id: row.sample for row in chosen}.values())
        yield RecordedSamples(handle, begins, own_code, record, samples)


def _tolerance(record: StepRecord, handle: RunHandle) -> float:
    known = record.tolerances.size > Stage.LOGPROBS
    said = record.tolerances.tolist() if known else tolerances(handle.spec.model.dtype)
    return float(said[Stage.LOGPROBS])
