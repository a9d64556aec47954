"""How the bare loop learns: `python -m tests.bench._bare_curve RUNFILE MODEL EVERY A.B=C ...`.

Like a run, it measures its first weights, its last, and those in between on the held-out problems.
"""

from __future__ import annotations

import json
import sys
import time

from producers.engines.measured_steps import measure_steps
from producers.engines.vllm_engine import VllmSettings
from producers.tasks import load_problems
from schemas.loading import load_run_file
from tests.bench._bare_loop import BareLoop
from tests.bench._references import BARE_THREADS
from tests.bench.learning import point


def main(runfile: str, model: str, every: str, *changes: str) -> None:
    """Learn, and print one line."""
    spec = load_run_file(runfile, changes)
    assert isinstance(spec.generator, VllmSettings)
    engine = spec.generator.own_engine(model, spec)
    measure_steps(engine, spec.generator.slots)
    loop = BareLoop(spec, model, engine, threads=BARE_THREADS)
    problems = load_problems(spec, spec.task.held_out_split)[: spec.evaluation.problems]
    points = []
    began = time.perf_counter()
    for number in range(spec.algorithm.iterations + 1):
        if number % int(every) == 0 or number == spec.algorithm.iterations:
            samples = loop.evaluate(number, problems)
            rewards = {sample.problem_id: sample.reward for sample in samples}
            points.append(point(number, time.perf_counter() - began, rewards, problems))
        if number < spec.algorithm.iterations:
            loop.iterate(number)
    print("RESULT", json.dumps(points))


if __name__ == "__main__":
    main(*sys.argv[1:])
