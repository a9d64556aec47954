"""Steps of the learner with some settings, in a process of its own, which says how much memory they took.

`python -m tests.bench._peak_memory FOLDER SIZE DEVICE SAMPLES LONGEST MODEL TRAINER`: the last two are
sections of a run file in JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from consumers.learners.peak_memory import peak_memory_gib
from tests.bench._gpu_learner import Work, ours


def measure(work: Work, budget: int, model: dict[str, Any], trainer: dict[str, Any]) -> dict[str, Any]:
    """The peak from the start on, with loading; tokens a second. Nothing but a note if memory ends."""
    spec = work.spec(budget, exact=True, model=model, trainer=trainer)
    try:
        found = ours(work, budget, spec)
    except torch.OutOfMemoryError:
        return {"peak_gib": None}
    peak = max(work.before_steps_gib, peak_memory_gib())
    return {"peak_gib": peak, "tokens_per_s": found["tokens_per_s"]}


if __name__ == "__main__":
    folder, size, device, samples, longest, model, trainer = sys.argv[1:8]
    work = Work(folder, size, device, int(samples), int(longest))
    print("RESULT", json.dumps(measure(work, 4 * int(longest), json.loads(model), json.loads(trainer))))
