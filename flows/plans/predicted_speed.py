"""The speed that a run is expected to have, as one process tells it to another.

A run imports this alone; the simulation that it comes from is `prediction`, a process beside it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from flows.planning.profile_file import profiles_folder
from flows.plans.interval import Interval
from schemas.runspec import RunSpec


@dataclass(frozen=True)
class Prediction:
    """A run's speed, as it is expected."""

    step_s: Interval
    samples_per_s: Interval
    simulated: bool  # else by a formula

    @property
    def words(self) -> str:
        """The prediction in a line."""
        rate, step = self.samples_per_s, self.step_s
        return (
            f"predicted: {rate.value:,.3g} samples/s ({rate.low:,.3g} to {rate.high:,.3g}), "
            f"{step.value:,.3g} s a step"
        )

    def beside(self, measured: float) -> str:
        """Return the prediction beside what was measured, in a line."""
        rate = self.samples_per_s
        off = rate.value / measured - 1
        inside = "inside" if rate.low <= measured <= rate.high else "outside"
        return (
            f"predicted {rate.value:,.3g} samples/s ({rate.low:,.3g} to {rate.high:,.3g}), measured "
            f"{measured:,.3g}: {off:+.1%}, {inside} the range"
        )

    @classmethod
    def read(cls, line: str) -> Prediction:
        """Return the prediction in a line of JSON. Raises ValueError, KeyError or TypeError."""
        found = json.loads(line)
        ranges = [
            Interval(*(float(found[name][end]) for end in ("value", "low", "high"))) for name in _RANGES
        ]
        return cls(ranges[0], ranges[1], bool(found["simulated"]))


_RANGES = ("step_s", "samples_per_s")


def has_profile(spec: RunSpec) -> bool:
    """Whether there may be a profile of a run file: a quick look at names."""
    folder = profiles_folder()
    return folder.is_dir() and any(folder.glob(f"{spec.run}-*.yaml"))
