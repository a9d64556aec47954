"""All that detectors can look at. The ledger is read once; of each step only some numbers are kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan

import numpy as np
import torch

from consumers.batches.log_places import fetch_rows
from consumers.batches.training_rows import TrainingRow
from consumers.replay import Again
from consumers.steps.failing import FailedSteps, NoFailedStep
from consumers.steps.ledger import steps_in_log
from consumers.stream.recorded_groups import samples_topic
from flows.explain.own_model import OwnModel
from flows.run.replaying import taking_again
from flows.run.step_files import OpenStepFile
from flows.run.suggested_commands import SuggestedCommands
from flows.run.version_weights import VersionWeights
from infra.bus import read_until
from infra.gate import Gate, passed_over
from infra.run_handle import RunHandle
from infra.weights.adapter_tensors import Merging, layers_of
from infra.weights.folder import ModelFolder
from producers.tokenizing import special_tokens
from schemas.identity import sample_id
from schemas.messages import TRAIN, Evaluation, Prompt, StepRecord
from schemas.topics import Topic
from schemas.wire import MessageT

MOST_STEPS = 200_000  # of the newest ones, numbers are kept: some 700 bytes a step
LOOKED_AT = (
    "cut_off", "failed_rewards", "gap_tokens", "grad_norm", "informative_groups", "learning_rate",
    "length", "logprob_gap", "reward",
)  # fmt: skip
_GROUPS = 4096  # newest groups of which it is known which step trained them


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Some numbers of a step."""

    step: int
    iteration: int
    offset: int  # of its record in the ledger
    numbers: array[float]  # the metrics of LOOKED_AT; NaN where the record has none
    highest: tuple[str, float]  # the sample with the largest reward, by its size
    reward_scale: float  # median size of the rewards
    widest: tuple[str, float]  # the sample with the largest gap to the behaviour logprobs
    failed: str  # id of a sample without a reward; empty if all have one
    failed_reason: str
    split: tuple[tuple[int, int], ...]  # groups that an earlier step had trained in part, and that step
    weights: float  # length of the weights as a vector

    def metric(self, name: str) -> float:
        """Return a metric of LOOKED_AT; NaN if the record has none."""
        return self.numbers[LOOKED_AT.index(name)]


class RunEvidence:
    """A run, as detectors see it."""

    def __init__(
        self, handle: RunHandle, begins: OpenStepFile | None = None, commands: SuggestedCommands | None = None
    ) -> None:
        """`begins`: the step file that the run is read from; None: it is a run.

        `commands`: writes those that are suggested; None: as for a run that was named by its id alone.
        """
        self.handle, self.spec = handle, handle.spec
        self._commands = commands or SuggestedCommands(handle.run)
        self._start = None if begins is None else begins.start
        self.is_step_file = begins is not None
        self._versions = VersionWeights(handle, begins, lambda done, total: None)
        self._samples = samples_topic(handle)
        self._adapters: dict[int, Mapping[str, torch.Tensor] | None] = {}  # by version; they are small

    @cached_property
    def steps(self) -> list[StepFacts]:
        """Some numbers of each step that the ledger still has."""
        found: list[StepFacts] = []
        parts: dict[int, int] = {}  # by group: the step that trained it
        for record, step in steps_in_log(self.handle, self.handle.run, self.spec, 0):
            found.append(_facts(step, record.offset, parts))
            del found[: max(0, len(found) - MOST_STEPS)]
        return found

    def record(self, step: int) -> StepRecord:
        """Return the record of a step."""
        facts = next(one for one in self.steps if one.step == step)
        return next(
            found
            for _, found in steps_in_log(self.handle, self.handle.run, self.spec, facts.offset)
            if found.step == step
        )

    def rows(self, step: int) -> list[TrainingRow]:
        """Return the samples of a step. Raises Gone if the log has them no more."""
        return fetch_rows(self.handle, self._samples, self.record(step))

    def curve(self, name: str) -> np.ndarray:
        """Return a metric of all steps; NaN where a step lacks it."""
        return np.array([one.metric(name) for one in self.steps])

    def prompts(self) -> Iterator[Prompt]:
        """Yield the admitted training prompts that the log still has, partition by partition."""
        return (one for one in self._messages(self.handle.topics.prompts, Prompt) if one.purpose == TRAIN)

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations that the log still has, by version."""
        return sorted(self._messages(self.handle.topics.evals, Evaluation), key=lambda one: one.version)

    def _messages(self, topic: Topic, kind: type[MessageT]) -> Iterator[MessageT]:
        """Yield the messages that a topic has now."""
        gate = Gate(kind, self.handle.run, passed_over)
        reader = self.handle.bus.reader(topic)
        try:
            found = read_until(reader, reader.end_offsets(), topic, deadline_s=self.spec.deadlines.progress_s)
            yield from (message for _, message in gate.take(found))
        finally:
            reader.close()

    @cached_property
    def failed_step(self) -> StepRecord | None:
        """The newest step that could not be taken; None if all could."""
        try:
            return FailedSteps(self.handle.store, self.handle.run).find()
        except NoFailedStep:
            return None

    def weights(self, version: int) -> dict[str, torch.Tensor] | None:
        """Return the tensors that versions differ in, of a published one; None if they are not kept any more.

        Of adapters these are the layers that they change: all else, `own_model` has from the start.
        """
        if self._merging is None:
            found = self._versions.kept(version) or self._versions.of_file(version)
            return None if found is None else dict(found)
        if version not in self._adapters:
            self._adapters[version] = self._versions.kept(version) or self._versions.of_file(version)
        adapter = self._adapters[version]
        if adapter is None:
            return None
        return {f"{layer}.weight": self._merging.merged(layer, adapter) for layer in layers_of(adapter)}

    @cached_property
    def _merging(self) -> Merging | None:
        model = self.spec.model
        return Merging(model, ModelFolder(self.handle.record.model)) if model.lora else None

    @cached_property
    def own_model(self) -> OwnModel:
        """The run's model, as transformers computes it."""
        found = OwnModel(
            self.handle.record.model, self.spec.sampling.temperature, longest=self.spec.longest_sample,
            follows=self.spec.model.follow_routes,
        )  # fmt: skip
        if self._merging is not None:  # adapters are merged into the base in the run's own type of numbers
            found.round_to(self.spec.model.dtype)
        return found

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """The names of the model's special tokens."""
        return {number: name for name, number in special_tokens(self.handle.record.model).items()}

    def again(self) -> Again:
        """Return an object that takes the run's steps again."""
        return taking_again(self.handle, lambda done, total: None, self._start)

    def command(self, name: str, *words: str) -> str:
        """Return a command line about this run."""
        return self._commands.command(name, *words)


def _facts(step: StepRecord, offset: int, parts: dict[int, int]) -> StepFacts:
    sizes = np.abs(np.nan_to_num(step.rewards.astype(np.float64)))
    missing = np.flatnonzero(np.isnan(step.rewards))
    gaps = np.nan_to_num(step.gaps) if step.gaps.size else np.zeros(0)
    groups = np.unique(step.groups[step.replayed :]).tolist()
    split = tuple((one, parts[one]) for one in groups if parts.get(one, step.step) != step.step)
    for one in groups:
        parts.setdefault(one, step.step)
    while len(parts) > _GROUPS:
        del parts[next(iter(parts))]
    return StepFacts(
        step.step, step.iteration, offset, array("d", [step.metrics.get(one, nan) for one in LOOKED_AT]),
        _most(step, sizes),
        float(np.median(sizes)) if sizes.size else 0.0, _most(step, gaps),
        _id(step, int(missing[0])) if missing.size else "", step.failed_reason, split,
        float(step.sizes[-1]) if step.sizes.size else 0.0,
    )  # fmt: skip


def _most(step: StepRecord, values: np.ndarray) -> tuple[str, float]:
    if not values.size:
        return "", 0.0
    row = int(values.argmax())
    return _id(step, row), float(values[row])


def _id(step: StepRecord, row: int) -> str:
    return sample_id(int(step.groups[row]), int(step.indexes[row]))


def ids(rows: Sequence[TrainingRow]) -> list[str]:
    """Return the ids of some samples."""
    return [row.sample.id for row in rows]
