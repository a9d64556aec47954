"""Makes an engine of several ranks: rank 0 in this process, the others in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from infra import choices
from infra.gpus import VISIBLE, visible_gpus
from infra.weights.slices import Slicing
from producers.engines.engine import EngineError
from producers.engines.engine_messages import EngineOptions
from producers.engines.leading_rank import LeadingRank
from producers.engines.rank_group import EngineRank, new_group_name
from producers.engines.rank_team import RankTeam
from producers.engines.vllm_in_process import VllmEngine
from schemas.runspec import RunSpec


def leading_engine(own: Callable[[EngineRank], VllmEngine], model: str, spec: RunSpec) -> LeadingRank:
    """Return an engine of as many ranks as a run's generators have. `own`: makes the engine of rank 0."""
    ranks, deadline_s = spec.generator.devices, spec.deadlines.start_s
    slicing, gpus = Slicing.of(Path(model), ranks), _gpus(ranks)
    if gpus:
        os.environ[VISIBLE] = gpus[0]  # each rank sees one device, whose number is 0
    options = EngineOptions(model=model, spec=spec.model_dump_json())
    team = RankTeam(options, ranks, new_group_name(), deadline_s=deadline_s).open(gpus)
    with team.doing("start"):
        engine = own(EngineRank(0, slicing, team.meeting, team.group, deadline_s))
    return LeadingRank(engine, team)


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
