"""Makes an engine of several ranks: rank 0 in this process, the others in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
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

_SHARE = 0.8


def leading_engine(own: Callable[[EngineRank], VllmEngine], model: str, spec: RunSpec) -> LeadingRank:
    """Return an engine of as many ranks as a run's generators have. `own`: makes the engine of rank 0."""
    layout, deadline_s = spec.generator.layout, rank_deadline_s(spec)
    slicing, ranks = Slicing.of(Path(model), layout), layout.ranks
    _check_gpus(ranks)
    options = EngineOptions(model=model, spec=spec.model_dump_json())
    team = RankTeam(options, ranks, new_group_name(), deadline_s=deadline_s).open()
    with team.doing("start"):
        engine = own(EngineRank(0, slicing, team.meeting, team.group, deadline_s, team.decide))
    return LeadingRank(engine, team)


def rank_deadline_s(spec: RunSpec) -> float:
    """Return how long ranks wait for each other: less than the generator does, so they say which is late."""
    return _SHARE * spec.deadlines.start_s


def _check_gpus(ranks: int) -> None:
    """Raise EngineError unless each rank can have a GPU, or all compute on CPUs."""
    if choices.cuda() and len(found := visible_gpus()) < ranks:
        refused = EngineError(
            f"generator.tensor_parallel: an engine of {ranks} ranks needs as many GPUs (tensor_parallel × "
            f"pipeline_parallel), and this process sees {len(found)} ({VISIBLE})"
        )
        refused.lasting = True
        raise refused
