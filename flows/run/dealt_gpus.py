"""Deals out the GPUs of a machine to the processes of a run on it: one to each rank of trainer and engines.

ranks of the trainer ── generators of sites that run here ── the run's own generators, as many as there are
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infra.gpus import VISIBLE
from schemas.runspec import RunSpec


def own_gpus(spec: RunSpec) -> int:
    """Return how many GPUs a generator takes on its own machine, one for each rank of its engine there."""
    return max(0, spec.generator.gpus - spec.placement.engine_ranks.elsewhere)


@dataclass(frozen=True)
class DealtGpus:
    """The GPUs of one machine, and how many processes take one before the run's own generators do.

    `shared`: where there are too few, processes share them. `turns`: engines and learner share them anyhow.
    `each`: how many a generator takes, one for each rank of its engine; 0 if its engine is elsewhere. Without
    GPUs nothing is set: then all compute on the CPU. `taken`: GPUs of the machine that other commands have.
    """

    gpus: tuple[str, ...]
    ranks: int = 0
    at_sites: int = 0
    shared: bool = False
    turns: bool = False
    each: int = 1
    taken: tuple[str, ...] = ()

    @classmethod
    def of_run(cls, spec: RunSpec, gpus: Sequence[str] = ()) -> DealtGpus:
        """Return those of the machine on which a run's trainer is; without `gpus` they are to be found."""
        placement = spec.placement
        at_sites = sum(one.generators for one in placement.sites.values() if not one.elsewhere)
        ranks = spec.trainer.ranks - placement.ranks.elsewhere
        each = own_gpus(spec)
        return cls(tuple(gpus), ranks, at_sites, placement.share_gpus, placement.takes_turns, each)

    def for_ranks(self) -> dict[str, str]:
        """Return the variable that shows the ranks of this machine their GPUs: rank n takes the n-th."""
        return self._shown(*range(self.ranks)) if self.ranks else {}

    def for_engine_ranks(self, first: int) -> dict[str, str]:
        """Return the variable for the last of the ranks, from `first` on, which are of an engine."""
        return self._shown(*range(first, self.ranks))

    def for_site_generator(self, place: int) -> dict[str, str]:
        """Return the variable for a generator of a site; `place`: its number among those."""
        return self._for_engine(place)

    def for_generator(self, place: int) -> dict[str, str]:
        """Return the variable for a generator of the run's own; `place`: its number among those."""
        return self._for_engine(self.at_sites + place)

    def dealt(self, generators: int) -> int:
        """Return how many GPUs, from the first one on, ranks and so many generators of the run's own take."""
        return min(self._needed(generators), len(self.gpus))

    def problem(self, generators: int) -> str:
        """Return why so many generators of the run's own can't have their GPUs; empty if they can."""
        count = self.at_sites + generators
        if not self.gpus and not self.taken:
            return ""
        if count and self.each > max(1, len(self.gpus)):
            return (
                f"generator.tensor_parallel: an engine of {self.each} ranks needs as many GPUs of one "
                f"machine (tensor_parallel × pipeline_parallel), and this one has {self._named}"
            )
        if self.ranks > len(self.gpus):
            return (
                f"placement: {self.ranks} ranks need a GPU each, also where others share them, and this "
                f"machine has {self._named}: take fewer"
            )
        needed = self._needed(generators)
        if (self.shared and self.gpus) or needed <= len(self.gpus):
            return ""
        of_each = f" of {self.each} GPUs each" if self.each > 1 else ""
        return (
            f"placement: {self.ranks} ranks and {count} generators{of_each} need {needed} GPUs, "
            f"and this machine has {self._named}: take fewer, let them take "
            "turns (placement.kind: colocated), or let several share one (placement.share_gpus: true)"
        )

    @property
    def _named(self) -> str:
        if not self.taken:
            return f"{len(self.gpus)} ({', '.join(self.gpus)})"
        free = f"{len(self.gpus)} free ones ({', '.join(self.gpus)})" if self.gpus else "no free one"
        return f"{free}, beside those that other commands use ({', '.join(self.taken)})"

    def _needed(self, generators: int) -> int:
        return max(self.ranks, self._first + (self.at_sites + generators) * self.each)

    @property
    def _first(self) -> int:
        return 0 if self.turns else self.ranks

    def _for_engine(self, place: int) -> dict[str, str]:
        """Return the variable for an engine; shared GPUs are dealt out again from the first one on."""
        first = self._first + place * self.each
        return self._shown(*range(first, first + self.each)) if self.each else {}

    def _shown(self, *numbers: int) -> dict[str, str]:
        if not self.gpus:
            return {}
        return {VISIBLE: ",".join(dict.fromkeys(self.gpus[one % len(self.gpus)] for one in numbers))}
