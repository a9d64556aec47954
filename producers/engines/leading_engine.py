"""Makes an engine of several ranks: rank 0 in this process, the others in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infra import choices
from infra.gpus import VISIBLE, visible_gpus
from infra.weights.slices import Slicing
from producers.engines.engine import EngineError
from producers.engines.engine_messages import EngineOptions
from producers.engines.rank_group import EngineRank, new_group_name
from producers.engines.rank_team import RankOptions, RankTeam
from producers.engines.ranked_engine import RankedEngine
from schemas.generation import ENGINES
from schemas.runspec import RunSpec

if TYPE_CHECKING:
    from producers.engines.vllm_engine import VllmSettings
    from producers.engines.vllm_in_process import VllmEngine


def leading_engine(settings: VllmSettings, model: str, spec: RunSpec) -> RankedEngine:
    """Return an engine of as many ranks as the settings say."""
    ranks, deadline_s = settings.tensor_parallel, spec.deadlines.start_s
    slicing = Slicing.of(Path(model), ranks)
    gpus = _gpus(ranks)
    options = EngineOptions(model=model, spec=spec.model_dump_json())
    team = RankTeam(options, ranks, new_group_name(), deadline_s=deadline_s)
    if gpus:
        os.environ[VISIBLE] = gpus[0]  # each rank sees one device, whose number is 0
    team.open(gpus)
    rank = EngineRank(0, slicing, team.meeting, team.group, deadline_s)
    with team.doing("start"):
        own = settings.own_engine(model, spec, rank)
    return RankedEngine(own, team)


def following_engine(options: RankOptions) -> VllmEngine:
    """Return the engine of another rank than 0."""
    from producers.engines.vllm_engine import VllmSettings

    spec = RunSpec.model_validate_json(options.engine.spec)
    settings = ENGINES.loaded(spec.generator)
    assert isinstance(settings, VllmSettings)
    slicing = Slicing.of(Path(options.engine.model), settings.tensor_parallel)
    rank = EngineRank(options.number, slicing, Path(options.meeting), options.group, spec.deadlines.start_s)
    return settings.own_engine(options.engine.model, spec, rank)


def _gpus(ranks: int) -> Sequence[str]:
    """Return a GPU for each rank, as CUDA_VISIBLE_DEVICES names them; none if engines compute on CPUs."""
    if not choices.cuda():
        return ()
    found = visible_gpus()
    if len(found) < ranks:
        refused = EngineError(
            f"generator.tensor_parallel: an engine of {ranks} ranks needs as many GPUs, and this process "
            f"sees {len(found)} ({VISIBLE})"
        )
        refused.lasting = True
        raise refused
    return found[:ranks]
