"""Gathers all that a plan or a simulation of a run file needs: machines, times, and lengths, with their sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flows.planning.hardware import HARDWARE
from flows.planning.machine_pools import MachinePool, PlanError, check_pools, pools_of
from flows.planning.model_shape import ModelShape, shape_of
from flows.planning.step_estimate import IterationDemand
from flows.planning.table_times import TableTimes
from flows.planning.times_source import TimesSource
from flows.planning.workload import LogNormalLengths, Workload
from schemas.runspec import RunSpec

_ASSUMED_SHARE, _ASSUMED_SIGMA = (
    1 / 3,
    0.8,
)  # of sampling.max_tokens, and of the logarithm: lengths nobody knows
_ASSUMED_SPREAD = 0.3  # of lengths that are assumed; 0.1 of a mean that the user gives
_GIVEN_SPREAD = 0.1
_ITERATIONS = 4  # whose lengths make up the demand of one


@dataclass(frozen=True)
class PlanningInputs:
    """What a run file's machines can do, and what they have to do."""

    spec: RunSpec
    pools: tuple[MachinePool, ...]
    times: TimesSource
    workload: Workload
    demand: IterationDemand
    lengths_from: str
    lengths_spread: float


def planning_inputs(
    spec: RunSpec, *, profile: Path | None = None, mean_length: float | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> PlanningInputs:  # fmt: skip
    """Return what can be known without measuring. Raises PlanError and others that explain themselves."""
    if spec.algorithm.mode == "offline":
        raise PlanError(
            "algorithm.mode is offline: such a run generates nothing, so there is nothing to divide"
        )
    pools = pools_of(spec.placement)
    workload, lengths_from, spread = _assumed(spec, mean_length)
    demand = demand_of_workload(spec, workload)
    check_pools(pools, list(HARDWARE))  # before a model is built for nothing
    times = TableTimes(spec, shape_at_hand(spec, progress or (lambda done, text: None)), demand)
    return PlanningInputs(spec, pools, times, workload, demand, lengths_from, spread)


def _assumed(spec: RunSpec, mean_length: float | None) -> tuple[Workload, str, float]:
    """Return lengths, where they come from, and their spread."""
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
    spread = _GIVEN_SPREAD if mean_length else _ASSUMED_SPREAD
    return (
        Workload(LogNormalLengths(mean, _ASSUMED_SIGMA, most), prompts, ranker_sigma=0.4),
        f"{said}: log-normal, {mean:.0f} tokens on average",
        spread,
    )


def demand_of_workload(spec: RunSpec, workload: Workload, seed: int = 0) -> IterationDemand:
    """Return the work of a mean iteration of a run that meets these lengths."""
    drawn = workload.draw(spec, seed, iterations=_ITERATIONS)
    lengths = np.sort(drawn.answers.ravel())
    algorithm, many = spec.algorithm, drawn.answers.size // _ITERATIONS
    lookahead = algorithm.lookahead if algorithm.order == "window" else float(algorithm.most_stale)
    return IterationDemand(
        lengths[_ITERATIONS // 2 :: _ITERATIONS][:many], float(drawn.prompts.mean()), lookahead,
        spec.trainer.microbatch_tokens, algorithm.optimizer_steps,
    )  # fmt: skip


def shape_at_hand(spec: RunSpec, progress: Callable[[float, str], None]) -> ModelShape:
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
            return shape_of(Path(str(hf_hub_download(path, "config.json", cache_dir=cache_folder()))))
        except Exception as error:
            raise HubError(advice(path, "model", said(error))) from error
    if path:
        raise PlanError(
            f"model.path: {path} has no config.json: it is no Hugging Face model. A plan needs no more of a "
            "model than its config"
        )
    return shape_of(prepare_model(spec, progress))
