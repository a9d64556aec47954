"""The machines of a simulated run: their prices, how many generators they have room for, and preemptions."""

from __future__ import annotations

from dataclasses import replace

from flows.planning.step_estimate import GeneratorKind, MachineSplit
from flows.simulation.simulated_run import SimulatedRun, SimulatedSite


def on_machines(run: SimulatedRun, split: MachineSplit) -> SimulatedRun:
    """Return a simulated run of a split with the prices, the room and the preemptions of its machines.

    A generator costs its devices' share of a machine while that is there. The trainer costs the rest of the
    split's price, also of devices that nobody uses.
    """
    kinds = {kind.pool.name: kind for kind, _ in split.generators}
    sites = tuple(_site(site, kinds[site.name], split) for site in run.sites)
    generating = sum(site.price_per_hour * len(site.engines) for site in sites)
    return replace(run, sites=sites, learner_price_per_hour=max(0.0, split.price - generating))


def _site(site: SimulatedSite, kind: GeneratorKind, split: MachineSplit) -> SimulatedSite:
    pool, trainer = kind.pool, split.trainer
    each, count = kind.tensor_parallel, len(site.engines)
    # the trainer's machine stays, so of its generators each is taken away alone
    alone = pool.machines == 1 and pool == trainer.pool
    site = replace(
        site, preemption=pool.preemption, machine_generators=1 if alone else max(1, pool.devices // each)
    )
    if pool.shares_cores:  # as many as one likes, and those beside the trainer are on its machine
        machines = (
            0 if pool.shares_cores_with(trainer.pool) else pool.machines_of(min(pool.total, count * each))
        )
        return replace(site, price_per_hour=pool.price * machines / count)
    left = pool.total - (trainer.devices if pool == trainer.pool and not split.takes_turns else 0)
    return replace(
        site, price_per_hour=pool.price * each / pool.devices, most=pool.most_generators(left, each)
    )  # fmt: skip
