"""The split that a run file has as it stands: so many generators here and at each site, so many ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flows.planning.allocating import kind_in_turns
from flows.planning.machine_pools import MachinePool, PlanError, site_links
from flows.planning.step_estimate import GeneratorKind, MachineSplit, TrainerKind
from flows.plans.planning_inputs import PlanningInputs


def given_split(inputs: PlanningInputs, generators: Mapping[str, int] | None = None) -> MachineSplit:
    """Return the split of a run file. `generators`: by pool how many, instead. Raises PlanError."""
    pools = _pools(inputs)
    asked = _generators(inputs, pools) if generators is None else dict(generators)
    unknown = set(asked) - {pool.name for pool in pools}
    if unknown:
        names = ", ".join(pool.name for pool in pools)
        raise PlanError(f"there are no machines {', '.join(sorted(unknown))}; there are {names}")
    chosen = tuple((_kind(inputs, pool), count) for pool in pools if (count := asked.get(pool.name, 0)) > 0)
    if not chosen:
        raise PlanError("no machine has a generator: set placement.generators, or --generators")
    turns = inputs.spec.placement.takes_turns
    trainer = _trainer(inputs)
    if turns:
        if problem := inputs.times.turn_problem(trainer.pool.hardware, trainer.devices):
            raise PlanError(problem)
        chosen = tuple((_in_turns(inputs, kind), count) for kind, count in chosen)
    split = MachineSplit(trainer, chosen, inputs.demand.lookahead, takes_turns=turns)
    if problem := split.memory_problem():
        raise PlanError(problem)
    return split


def _in_turns(inputs: PlanningInputs, kind: GeneratorKind) -> GeneratorKind:
    """Return a kind with as many slots as fit beside the learner's state."""
    found = kind_in_turns(kind, inputs.times)
    if found is None:
        raise PlanError(
            f"placement.machines.{kind.pool.name}: {kind.tensor_parallel} {kind.pool.hardware} can't hold "
            "the model in the share of their memory that an engine takes in turns: raise "
            "generator.gpu_memory, or take more devices"
        )
    return found


def _pools(inputs: PlanningInputs) -> tuple[MachinePool, ...]:
    """Return the pools, and where no machines are named, one like this for each site.

    The processes of a site that is not elsewhere are started here, and have no cores of their own.
    """
    placement = inputs.spec.placement
    if placement.machines:
        return inputs.pools
    here, links = inputs.pools[0], site_links(placement)
    there = {
        name: replace(here, name=name, site=name, trains=False, link=links[name]) for name in placement.sites
    }
    return (
        *inputs.pools,
        *(
            replace(there[name], free_cores=None)
            if site.elsewhere
            else replace(there[name], cores_of=here.name)
            for name, site in placement.sites.items()
        ),
    )


def _generators(inputs: PlanningInputs, pools: tuple[MachinePool, ...]) -> dict[str, int]:
    """Return how many generators each pool has: the first of each site has all of that site."""
    placement = inputs.spec.placement
    wanted = {"": placement.generators} | {name: site.generators for name, site in placement.sites.items()}
    found: dict[str, int] = {}
    for site, count in wanted.items():
        there = [pool for pool in pools if pool.generates and pool.site == site]
        if count and not there:
            where = f"at the site {site}" if site else "beside the object store"
            raise PlanError(
                f"the run file has {count} generators {where}, and placement.machines has no machine there "
                "that may generate: name one"
            )
        if count:
            found[there[0].name] = count
    return found


def _kind(inputs: PlanningInputs, pool: MachinePool) -> GeneratorKind:
    times, able = inputs.times, inputs.times.tensor_parallel(pool.hardware, pool.devices)
    devices = able[0] if pool.shares_cores else inputs.spec.generator.devices
    if not pool.shares_cores and devices > pool.devices:
        raise PlanError(
            f"placement.machines.{pool.name}: an engine takes {devices} devices (tensor_parallel × "
            f"pipeline_parallel), and a machine has {pool.devices}: name machines with more"
        )
    if most := times.most_slots(pool.hardware, devices) if devices in able else 0:
        slots = min(most, inputs.spec.generator.slots)
        return GeneratorKind(pool, times.engine(pool.hardware, devices, slots), devices)
    fits = next((one for one in able if times.most_slots(pool.hardware, one)), None)
    if fits is None:
        raise PlanError(
            f"placement.machines.{pool.name}: a machine of {pool.devices} {pool.hardware} can't hold the "
            "model"
        )
    raise PlanError(
        f"placement.machines.{pool.name}: an engine on {devices} {pool.hardware} can't hold the model: set "
        f"generator.tensor_parallel: {max(1, fits // inputs.spec.generator.layout.stretches)}"
    )


def _trainer(inputs: PlanningInputs) -> TrainerKind:
    pool = next((one for one in inputs.pools if one.trains), None)
    if pool is None:
        raise PlanError("placement.machines: none of them may train: add train to the `use` of one of them")
    trainer = inputs.spec.trainer
    devices = trainer.ranks * (trainer.threads if pool.shares_cores else 1)
    learner = inputs.times.learner(pool.hardware, devices)
    if learner is None:
        why = inputs.times.trainer_problem(pool.hardware, devices)
        raise PlanError(
            f"trainer.ranks: {devices} devices of {pool.hardware} can't hold the model with its optimizer's "
            f"state: {why or 'take more ranks'}"
        )
    return TrainerKind(pool, learner, devices)
