"""Makes an engine of several ranks: rank 0 in this process, the others in processes here and elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from infra import choices
from infra.gpus import VISIBLE, visible_gpus
from infra.logs import set_up
from infra.runs import find
from infra.stores.opening import open_store
from infra.weights.slices import Slicing
from producers.engines.engine import FarRanksAsked, lasting_error
from producers.engines.engine_door import EngineDoor
from producers.engines.engine_messages import EngineOptions
from producers.engines.leading_rank import LeadingRank
from producers.engines.rank_group import EngineRank, new_group_name
from producers.engines.rank_team import RankTeam
from producers.engines.vllm_in_process import VllmEngine
from schemas.runspec import RunSpec

_SHARE = 0.8


def leading_engine(
    own: Callable[[EngineRank], VllmEngine], model: str, spec: RunSpec, far: FarRanksAsked | None = None
) -> LeadingRank:
    """Return an engine of as many ranks as a run's generators have. `own`: makes the engine of rank 0.

    `far`: how ranks of other machines find it; None: all are on this machine.
    """
    layout, deadline_s = spec.generator.layout, rank_deadline_s(spec)
    slicing, ranks = Slicing.of(Path(model), layout), layout.ranks
    door = None if far is None else _door(far, model)
    _check_gpus(ranks - (door.wanted if door else 0))
    options = EngineOptions(model=model, spec=spec.model_dump_json())
    team = RankTeam(options, ranks, new_group_name(), deadline_s=deadline_s, door=door).open()
    with team.doing("start", marked=False):
        engine = own(EngineRank(0, 0, slicing, team.meeting, team.group, deadline_s, team.decide))
    return LeadingRank(engine, team)


def _door(far: FarRanksAsked, model: str) -> EngineDoor:
    """Return the door for other machines, shut."""
    store = open_store(far.store)
    log = set_up(far.run, f"engine-of-generator-{far.generator}")
    return EngineDoor(store, find(store, far.run), far.generator, model, log)


def rank_deadline_s(spec: RunSpec) -> float:
    """Return how long ranks wait for each other: less than the generator does, so they say which is late."""
    return _SHARE * spec.deadlines.start_s


def _check_gpus(ranks: int) -> None:
    """Raise EngineError unless each rank can have a GPU, or all compute on CPUs."""
    if choices.cuda() and len(found := visible_gpus()) < ranks:
        raise lasting_error(
            f"generator.tensor_parallel: {ranks} ranks of an engine need as many GPUs (tensor_parallel × "
            f"pipeline_parallel, without those elsewhere), and this process sees {len(found)} ({VISIBLE})"
        )
