"""The machines of a simulated run: what each generator costs, and how many of them there is room for."""

from __future__ import annotations

from dataclasses import replace

from flows.planning.step_estimate import GeneratorKind, MachineSplit
from flows.simulation.simulated_run import SimulatedRun, SimulatedSite


def on_machines(run: SimulatedRun, split: MachineSplit) -> SimulatedRun:
    """Return a simulated run of a split with the prices and the room of its machines.

    A generator costs its devices' share of a machine while that is there. The trainer costs the rest of the
    split's price, also of devices that nobody uses.
    """
    kinds = {kind.pool.name: (kind, count) for kind, count in split.generators}
    sites = tuple(_site(site, kinds[site.name][0], split) for site in run.sites)
    generating = sum(site.price_per_hour * kinds[site.name][1] for site in sites)
    return replace(run, sites=sites, learner_price_per_hour=max(0.0, split.price - generating))


def _site(site: SimulatedSite, kind: GeneratorKind, split: MachineSplit) -> SimulatedSite:
    pool, trainer = kind.pool, split.trainer
    if pool.shares_cores:  # as many as one likes, and those beside the trainer are on its machine
        price = 0.0 if pool == trainer.pool else pool.price * kind.tensor_parallel / pool.devices
        return replace(site, price_per_hour=price)
    left = pool.total - (trainer.devices if pool == trainer.pool and not split.takes_turns else 0)
    return replace(
        site, price_per_hour=pool.price * kind.tensor_parallel / pool.devices,
        most=left // kind.tensor_parallel,
    )  # fmt: skip
