"""Runs a fault of the zoo, or a healthy run, and asks for an explanation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from flows.explain.detector import FaultFound
from flows.explain.explanation import Explanation, explain_run
from flows.explain.run_evidence import RunEvidence
from schemas.runspec import RunSpec
from tests.zoo.faults import Fault
from tests.zoo.world import ZooWorld, zoo_spec


@dataclass(frozen=True)
class Tried:
    """The explanation of a run of the zoo."""

    found: Explanation
    seconds: float  # that the explanation took

    @property
    def first(self) -> FaultFound | None:
        """What is blamed first."""
        return self.found.findings[0][1] if self.found.findings else None


def tried(
    folder: Path, model: str, fault: Fault | None, spec: RunSpec | None = None, *, seed: int = 7
) -> Tried:
    """Run a world with a fault, or without one, and explain it."""
    world = ZooWorld(folder, model, spec or zoo_spec(**(fault.sections if fault else {}), seed=seed))
    if fault is not None:
        fault.plant(world)
    world.live()
    began = time.monotonic()
    found = explain_run(RunEvidence(world.context))
    return Tried(found, time.monotonic() - began)


def missed(fault: Fault, first: FaultFound | None) -> str:
    """Return what the explanation of a fault lacks; empty if it names step, stage, sample and cause."""
    if first is None:
        return "nothing was found"
    lacks = []
    if not fault.step <= first.step <= fault.step + fault.slack:
        lacks.append(f"step {first.step}, not {fault.step}")
    if first.stage != fault.stage:
        lacks.append(f"stage {first.stage}, not {fault.stage}")
    if fault.sample and not any(fault.sample in one for one in first.samples[:4]):
        lacks.append(f"samples {', '.join(first.samples[:4]) or 'none'}, not {fault.sample}")
    if fault.cause not in first.cause:
        lacks.append(f"cause: {first.cause}")
    return "; ".join(lacks)
