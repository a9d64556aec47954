"""Gathers all that a plan or a simulation of a run file needs: machines, times and lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from flows.planning.hardware import HARDWARE
from flows.planning.machine_pools import MachinePool, PlanError, check_pools, pools_of
from flows.planning.model_shape import ModelShape, shape_of
from flows.planning.step_estimate import IterationDemand
from flows.planning.table_times import TableTimes
from flows.planning.times_source import TimesSource
from flows.planning.workload import DrawnLengths, LogNormalLengths, ObservedLengths, RecordedLengths, Workload
from flows.plans.measured_times import MeasuredTimes
from flows.plans.named_profiles import HardwareProfile, hardware_of_profile, named_profiles
from infra.model_config import read_config
from schemas.profile import Profile
from schemas.runspec import RunSpec

ModelProgress = Callable[[float, str], None]
_ASSUMED_SHARE, _ASSUMED_SIGMA = (
    1 / 3,
    0.8,
)  # of sampling.max_tokens, and of the logarithm: lengths nobody knows
_RANKER_SIGMA = 0.4  # of the logarithm of a ranker's error
# of mean lengths that are assumed, that the user gives, and that learning changes
_ASSUMED_SPREAD, _GIVEN_SPREAD, _LEARNING_SPREAD = 0.3, 0.1, 0.05
_SAYS_FOUR_BITS = "streamrl_four_bits"  # in the config.json of a model whose weights are not here
_ITERATIONS = 4  # whose lengths make up the demand of one


@dataclass(frozen=True)
class KnownLengths:
    """Lengths with their source, and the relative deviation of their mean."""

    workload: Workload
    source: str
    spread: float


@dataclass(frozen=True)
class PlanningInputs:
    """The machines of a run file, how fast they are, and the work that they have."""

    spec: RunSpec
    pools: tuple[MachinePool, ...]
    times: TimesSource
    lengths: KnownLengths
    demand: IterationDemand

    @property
    def workload(self) -> Workload:
        """The lengths that the run meets."""
        return self.lengths.workload


def planning_inputs(
    spec: RunSpec, *, runfile: str = "RUNFILE", profile: Path | None = None,
    mean_length: float | None = None, progress: ModelProgress = lambda done, text: None,
) -> PlanningInputs:  # fmt: skip
    """Return all that can be known without measuring. Raises PlanError and others that explain themselves.

    `profile`: its file; by default the one that `streamrl profile` keeps of the run file, if there is one.
    """
    if spec.algorithm.mode == "offline":
        raise PlanError(
            "algorithm.mode is offline: such a run generates nothing, so there is nothing to divide"
        )
    if spec.generator.computes_elsewhere and not spec.placement.machines:
        raise PlanError(
            f"generator.engine is {spec.generator.engine}: servers draw, and nobody says on which machines. "
            "Name them at placement.machines, with hardware, devices and use: generate, and those that train"
        )
    here = profile_at_hand(spec, runfile, profile)
    shape = cache(lambda: shape_at_hand(spec, progress))
    named = named_profiles(spec, _model_with_weights(spec), shape, list(HARDWARE))
    pools = pools_of(spec.placement, cores=here.identity.cores if here else None)
    measured = here or (named[0].profile if named else None)
    if measured is not None and mean_length is None and measured.lengths.answers:
        lengths = _of_profile(spec, measured)
    else:
        lengths = _assumed(spec, mean_length)
    demand = demand_of_workload(spec, lengths.workload)
    table = cache(lambda: TableTimes(spec, shape(), demand, four_bits=_in_four_bits(spec)))
    if measured is None:
        check_pools(pools, list(HARDWARE))  # before a model is built for nothing
        return PlanningInputs(spec, pools, table(), lengths, demand)
    profiles = [*named, *_unnamed(here, named)]
    times = MeasuredTimes(spec, profiles, demand, _pairs(spec, lengths.workload), table, list(HARDWARE))
    return PlanningInputs(spec, tuple(times.near(pool) for pool in pools), times, lengths, demand)


def _unnamed(here: Profile | None, named: Sequence[HardwareProfile]) -> list[HardwareProfile]:
    """Return the profile of this machine, unless the run file names another one of the same hardware."""
    if here is None:
        return []
    hardware = hardware_of_profile(here, list(HARDWARE))
    taken = {one.hardware.upper() for one in named}
    return [] if hardware.upper() in taken else [HardwareProfile(hardware, here)]


def profile_at_hand(spec: RunSpec, runfile: str, file: Path | None) -> Profile | None:
    """Return the profile in a file, or the one that is kept of a run file; None if there is none."""
    from flows.planning.profile_file import profile_for

    model = _model_with_weights(spec)
    if model is None:
        if file is not None:
            raise PlanError(
                f"--profile {file}: the model of {runfile} is not here, so nobody can tell whether the "
                "profile is of it. `streamrl profile` on this machine fetches or builds it"
            )
        return None
    return profile_for(spec, model, runfile=runfile, file=file)


def _model_with_weights(spec: RunSpec) -> Path | None:
    from flows.run.start_model import model_at_hand

    model = model_at_hand(spec)
    if model is None or not (model / "config.json").is_file() or not any(model.glob("*.safetensors")):
        return None
    return model


def _in_four_bits(spec: RunSpec) -> bool:
    """Whether `streamrl quantize` has rounded the model. Without weights here, its config has to say so."""
    if spec.model.lora is None:
        return False
    model = _model_with_weights(spec)
    if model is None:
        named = Path(spec.model.path or "")
        return (named / "config.json").is_file() and read_config(named).get(_SAYS_FOUR_BITS) is True
    from infra.weights.folder import ModelFolder
    from infra.weights.four_bits import exactly

    folder = ModelFolder(model)
    name = next((name for name in folder.names if name.endswith("_proj.weight")), None)
    return name is not None and exactly(folder.tensor(name)) is not None


def _of_profile(spec: RunSpec, profile: Profile) -> KnownLengths:
    """Return lengths as the first weights drew them; they change while a model learns."""
    lengths = profile.lengths
    means = np.array(lengths.answers, float).reshape(-1, lengths.group).mean(axis=1)
    spread = float(means.std() / means.mean() / max(1, len(means) - 1) ** 0.5)
    if lengths.group > 1:
        groups = [
            tuple(lengths.answers[first : first + lengths.group])
            for first in range(0, len(lengths.answers), lengths.group)
        ]
        answers: RecordedLengths | ObservedLengths = RecordedLengths(tuple(groups))
    else:
        answers = ObservedLengths(tuple(lengths.answers))
    prompts = ObservedLengths(tuple(max(1, one) for one in lengths.prompts))
    return KnownLengths(
        Workload(answers, prompts, ranker_sigma=_RANKER_SIGMA),
        f"measured with the first weights, {means.mean():.0f} tokens on average",
        math.hypot(_LEARNING_SPREAD, spread),
    )


def _pairs(spec: RunSpec, workload: Workload) -> list[tuple[int, int]]:
    drawn = workload.draw(spec, 0, iterations=1)
    return [
        (int(prompt), int(answer))
        for prompt, row in zip(drawn.prompts.tolist(), drawn.answers.tolist(), strict=True)
        for answer in row
    ]


def _assumed(spec: RunSpec, mean_length: float | None) -> KnownLengths:
    """Return lengths that nobody has measured."""
    most = spec.sampling.max_tokens
    if mean_length is not None and not 1 <= mean_length <= most:
        raise PlanError(
            f"--mean-length {mean_length:g}: the mean length of answers lies between 1 and "
            f"sampling.max_tokens, {most}"
        )
    mean = mean_length or max(1.0, most * _ASSUMED_SHARE)
    prompts = LogNormalLengths(max(1.0, spec.sampling.max_prompt_tokens / 2), 0.3)
    said = (
        "as --mean-length says" if mean_length else "assumed, for no profile and no --mean-length says them"
    )
    return KnownLengths(
        Workload(LogNormalLengths(mean, _ASSUMED_SIGMA, most), prompts, ranker_sigma=_RANKER_SIGMA),
        f"{said}: log-normal, {mean:.0f} tokens on average",
        _GIVEN_SPREAD if mean_length else _ASSUMED_SPREAD,
    )


def demand_of_workload(spec: RunSpec, workload: Workload, seed: int = 0) -> IterationDemand:
    """Return the work of a mean iteration of a run that meets these lengths."""
    return demand_of_lengths(spec, workload.draw(spec, seed, iterations=_ITERATIONS), _ITERATIONS)


def demand_of_lengths(spec: RunSpec, drawn: DrawnLengths, iterations: int) -> IterationDemand:
    """Return the work of a mean iteration of some that have these lengths."""
    lengths = np.sort(drawn.answers.ravel())
    algorithm, many = spec.algorithm, drawn.answers.size // iterations
    return IterationDemand(
        lengths[iterations // 2 :: iterations][:many], float(drawn.prompts.mean()), algorithm.lookahead,
        spec.trainer.microbatch_tokens, algorithm.optimizer_steps,
    )  # fmt: skip


def shape_at_hand(spec: RunSpec, progress: ModelProgress) -> ModelShape:
    """Return the shape of a run file's model. Of a name on the Hub the config alone is fetched."""
    from flows.run.start_model import model_at_hand, prepare_model
    from infra.hub import HubError, advice, cache_folder, is_hub_name
    from schemas.importing import said

    path = spec.model.path
    if path and (Path(path) / "config.json").is_file():
        return shape_of(Path(path))
    if (folder := model_at_hand(spec)) is not None:
        return shape_of(folder)
    if path and is_hub_name(path):
        from huggingface_hub import hf_hub_download

        progress(0.0, f"fetching the config of {path}")
        try:
            config = hf_hub_download(path, "config.json", cache_dir=cache_folder())
        except Exception as error:
            raise HubError(advice(path, "model", said(error))) from error
        return shape_of(Path(str(config)))
    if path:
        raise PlanError(
            f"model.path: {path} has no config.json: it is no Hugging Face model. A plan needs no more of a "
            "model than its config"
        )
    return shape_of(prepare_model(spec, progress))
