"""A profile: measured points of one run file's parts on one kind of machine, with all that they depend on.

identity     the model's shape, the machine, libraries, and the settings that the figures depend on
generation   decode steps by batch and context, prefill, start, memory
training     calls of the learner by tokens and micro-batches, optimizer steps
weights      a version from the optimizer step until an engine holds it
rewards      seconds of the task's reward
lengths      tokens of prompts, and of the answers that the first weights draw
together     both sides at once: how much each slows down the other
overheads    the work of a run's other processes, if there was a run already
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from schemas.section import Section

PROFILE_FORMAT = 2
SIZES = (
    "generator.slots", "generator.threads", "trainer.ranks", "trainer.threads", "trainer.microbatch_tokens",
    "sampling",
)  # fmt: skip

_LONGEST_S = 1e7
_MOST_POINTS = 512
_MOST_LENGTHS = 8192
_Seconds = Annotated[float, Field(gt=0, le=_LONGEST_S)]
_SomeSeconds = Annotated[float, Field(ge=0, le=_LONGEST_S)]  # 0: not measured, or too short to be seen
_Share = Annotated[float, Field(ge=0, le=1)]
_Amount = Annotated[float, Field(ge=0, le=1e12)]
_Tokens = Annotated[int, Field(ge=0, le=1_000_000_000)]
_Text = Annotated[str, Field(max_length=2000)]
_Key = Annotated[str, Field(min_length=1, max_length=100)]


class ProfileIdentity(Section):
    """All that a profile's figures depend on."""

    model: Annotated[str, Field(min_length=8, max_length=128)] = Field(
        description="Hash of the model's config and of the shapes of its tensors."
    )
    root: Annotated[str, Field(max_length=128)] = Field(
        "", description="Root of the weights that drew the answers."
    )
    parameters: Annotated[int, Field(gt=0, le=10**15)] = Field(description="Weights of the model.")
    machine: Annotated[str, Field(min_length=1, max_length=2000)] = Field(
        description="The kind of the machine, as in the ledger."
    )
    cores: Annotated[int, Field(gt=0, le=100_000)] = Field(description="Cores that processes may use.")
    libraries: dict[_Key, _Text] = Field({}, max_length=32, description="Versions of libraries, by name.")
    settings: dict[_Key, _Text] = Field(
        {}, max_length=200, description="Settings that the figures depend on, as JSON, by name."
    )
    sizes: dict[_Key, Annotated[int, Field(gt=0, le=1_000_000_000)]] = Field(
        max_length=32, description="Settings that figures can be carried over from, by name."
    )

    @model_validator(mode="after")
    def _has_sizes(self) -> ProfileIdentity:
        if missing := [name for name in SIZES if name not in self.sizes]:
            raise ValueError(f"sizes lacks {', '.join(missing)}")
        return self


class DecodePoint(Section):
    """Decode steps of about the same kind, taken one after the other."""

    samples: Annotated[float, Field(gt=0, le=1e6)] = Field(description="Samples in a step, on average.")
    context: _Amount = Field(description="Tokens that the samples of a step attend to, all together.")
    begun: Annotated[float, Field(ge=0, le=1e6)] = Field(0.0, description="Samples that began in a step.")
    filled: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Share of the steps in which a sample began."
    )
    prompt: _Amount = Field(0.0, description="Tokens of prompts that were prefilled in a step.")
    ended: Annotated[float, Field(ge=0, le=1e6)] = Field(0.0, description="Samples that ended in a step.")
    steps: Annotated[int, Field(gt=0, le=1_000_000)] = Field(description="Number of these steps.")
    seconds: _Seconds = Field(description="Seconds of a step, without waits for a core.")
    noise: _SomeSeconds = Field(0.0, description="Standard error of `seconds`.")
    held_out: bool = Field(False, description="Curves are not fitted to it: it tells their error.")


_Point = TypeVar("_Point", bound="DecodePoint | TrainPoint")


def _some_fitted(points: list[_Point]) -> list[_Point]:
    if all(one.held_out for one in points):
        raise ValueError("all points are held out: there is none that a curve can be fitted to")
    return points


class GenerationProfile(Section):
    """One engine, alone on the machine."""

    points: list[DecodePoint] = Field(min_length=1, max_length=_MOST_POINTS)
    start_s: _Seconds = Field(
        description="Seconds until the engine takes requests, while a learner starts, too."
    )
    memory_tokens: _Tokens = Field(0, description="Tokens that its KV cache holds; 0: the engine can't say.")
    busy_cores: Annotated[float, Field(ge=0, le=100_000)] = Field(
        description="Cores that the engine keeps busy while it draws."
    )
    disturbed: _Share = Field(0.0, description="Share of the time in which it waited for a core.")

    @field_validator("points")
    @classmethod
    def _fitted(cls, points: list[DecodePoint]) -> list[DecodePoint]:
        return _some_fitted(points)


class TrainPoint(Section):
    """One call of the learner: forward and backward passes of some micro-batches, with scores they need."""

    samples: Annotated[int, Field(gt=0, le=10_000_000)] = Field(description="Samples with a gradient.")
    tokens: Annotated[int, Field(gt=0, le=10**12)] = Field(description="Their tokens of prompts and answers.")
    context: _Amount = Field(description="Tokens that those tokens attend to, all together.")
    micro_batches: Annotated[int, Field(gt=0, le=1_000_000)]
    calls: Annotated[int, Field(gt=0, le=1_000_000)] = Field(description="Number of these calls.")
    seconds: _Seconds = Field(description="Seconds of a call, without waits for a core.")
    noise: _SomeSeconds = Field(0.0, description="Standard error of `seconds`.")
    held_out: bool = Field(False, description="Curves are not fitted to it: it tells their error.")


class TrainingProfile(Section):
    """The trainer's learner, alone on the machine."""

    points: list[TrainPoint] = Field(min_length=1, max_length=_MOST_POINTS)
    start_s: _Seconds = Field(description="Seconds until the learner is loaded, while an engine starts, too.")
    read_s: _SomeSeconds = Field(description="Seconds to read a sample's record.")
    step_s: _Seconds = Field(description="Seconds of an optimizer step.")
    hash_s: _SomeSeconds = Field(description="Seconds to hash the weights that a step has made.")
    record_s: _SomeSeconds = Field(description="Seconds to write an iteration's record for the ledger.")
    record_samples: Annotated[int, Field(ge=0, le=10_000_000)] = Field(0, description="Samples in it.")
    snapshot_s: _SomeSeconds = Field(0.0, description="Seconds that a checkpoint holds training up.")
    busy_cores: Annotated[float, Field(ge=0, le=100_000)] = Field(
        description="Cores that the learner, with all its ranks, keeps busy while it trains."
    )
    disturbed: _Share = Field(0.0, description="Share of the time in which it waited for a core.")

    @field_validator("points")
    @classmethod
    def _fitted(cls, points: list[TrainPoint]) -> list[TrainPoint]:
        return _some_fitted(points)


class WeightsProfile(Section):
    """A version of the weights on its way from the trainer into an engine."""

    publish_s: _SomeSeconds = Field(
        description="Seconds to copy a version, encode it and put it into the run's store, beside training."
    )
    fetch_s: _SomeSeconds = Field(description="Seconds to fetch and decode a version from the store.")
    patch_s: _SomeSeconds = Field(description="Seconds to compare it with the weights that the engine holds.")
    prepare_s: _SomeSeconds = Field(
        description="Seconds in which the engine prepares it, beside decode steps."
    )
    install_s: _SomeSeconds = Field(description="Seconds without a decode step while it is installed.")
    delta_bytes: Annotated[int, Field(ge=0, le=10**16)] = Field(
        description="Bytes that a generator fetches for a new version."
    )
    whole_bytes: Annotated[int, Field(ge=0, le=10**16)] = Field(description="Bytes of all weights.")
    bytes_per_s: Annotated[float, Field(ge=0, le=1e13)] = Field(
        0.0, description="Bytes a second that the store gives, for large objects."
    )
    latency_s: _SomeSeconds = Field(0.0, description="Seconds until the store answers for a small object.")


class RewardsProfile(Section):
    """The task's reward, in its process."""

    seconds: _SomeSeconds = Field(description="Seconds of a reward, one after the other, on average.")
    cpu_s: _SomeSeconds = Field(0.0, description="Processor seconds of a reward, on average.")
    scored: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    failed: Annotated[int, Field(ge=0, le=1_000_000)] = 0


class LengthsProfile(Section):
    """Lengths of some prompts, and of the answers that the first weights draw to them, in the same order."""

    prompts: list[_Tokens] = Field(max_length=_MOST_LENGTHS)
    answers: list[_Tokens] = Field(max_length=_MOST_LENGTHS, description="Answers, by prompt and then index.")
    cut: _Tokens = Field(
        0, description="Answers that had no end when time was up: their lengths are least ones."
    )
    group: Annotated[int, Field(gt=0, le=65_536)] = Field(1, description="Answers of each prompt.")
    informative: _Share = Field(1.0, description="Share of the groups whose rewards differ.")

    @model_validator(mode="after")
    def _fit(self) -> LengthsProfile:
        if len(self.answers) != len(self.prompts) * self.group:
            raise ValueError(
                f"answers has {len(self.answers)} lengths; {len(self.prompts)} prompts with {self.group} "
                f"answers each have {len(self.prompts) * self.group}"
            )
        return self


class TogetherProfile(Section):
    """Engine and learner at work at once: seconds of each over those that it takes alone."""

    step: Annotated[float, Field(ge=0.1, le=1000)] = Field(
        1.0, description="Of that part of a decode step that does not depend on its samples."
    )
    samples: Annotated[float, Field(ge=0.1, le=1000)] = Field(
        1.0, description="Of that part of a decode step that grows with its samples."
    )
    training: Annotated[float, Field(ge=0.1, le=1000)] = 1.0
    unsteady: _Share = Field(
        0.0,
        description="Relative standard deviation of the seconds of the same work at different times: how "
        "unsteady the machine's own speed is.",
    )


class DrawnInRun(Section):
    """The work of the engines of a run, and the processor seconds that it took."""

    cpu_s: _Seconds
    tokens: Annotated[int, Field(gt=0, le=10**15)]
    samples: Annotated[int, Field(gt=0, le=10**12)]
    at_once: Annotated[float, Field(gt=0, le=1e6)] = Field(description="Samples in a step, on average.")


class TrainedInRun(Section):
    """The work of the trainer of a run, and the processor seconds that training took."""

    cpu_s: _Seconds
    seconds: _Seconds = Field(description="By the clock: beside engines it had not a core all the time.")
    answer_tokens: Annotated[int, Field(gt=0, le=10**15)]
    groups: Annotated[int, Field(gt=0, le=10**12)] = Field(description="Groups with a gradient.")
    micro_batches: Annotated[int, Field(gt=0, le=10**12)]


class OverheadsProfile(Section):
    """The work of a run's other processes, as the notes of a run say it."""

    steady_cores: Annotated[float, Field(ge=0, le=100_000)] = Field(
        description="Cores that they keep busy, besides the processes of generators."
    )
    generator_cores: Annotated[float, Field(ge=0, le=1000)] = Field(
        description="Cores that the process of each generator keeps busy, besides its engine."
    )
    iteration_s: _SomeSeconds = Field(
        description="Seconds of an iteration in which the trainer records and publishes."
    )
    samples: Annotated[int, Field(ge=0, le=10**12)] = Field(
        description="Samples that the run made meanwhile."
    )
    seconds: _Seconds = Field(description="Seconds of the run that were looked at.")
    drawn: DrawnInRun | None = None
    trained: TrainedInRun | None = None
    pace: Annotated[float, Field(ge=0.25, le=4)] = Field(
        1.0,
        description="Speed of that run over the speed that the rest of this profile predicts of it. Engines "
        "and learner are taken to be so many times as fast.",
    )


class Profile(Section):
    """Measured points of a run file's parts."""

    format: Literal[2] = 2  # PROFILE_FORMAT
    made_at: Annotated[float, Field(gt=0, le=1e11)] = Field(description="Seconds since 1970.")
    took_s: _Seconds = Field(description="Seconds that measuring took.")
    identity: ProfileIdentity
    generation: GenerationProfile
    training: TrainingProfile
    weights: WeightsProfile
    rewards: RewardsProfile
    lengths: LengthsProfile
    together: TogetherProfile = TogetherProfile()
    overheads: OverheadsProfile | None = Field(None, description="Not there: no run has been looked at.")
