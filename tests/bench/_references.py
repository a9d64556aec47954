"""What ours is compared with: `python -m tests.bench._references RUNFILE MODEL FOLDER WARM A.B=C ...`.

The bare loop, then how fast the samples in FOLDER are generated and trained, each alone on one core. One
process and one engine for all: vLLM takes longer to start than to be measured.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from producers.engines.measured_steps import measure_steps
from producers.engines.vllm_engine import VllmSettings
from producers.engines.vllm_in_process import VllmEngine
from schemas.loading import load_run_file
from schemas.messages import Sample
from schemas.runspec import RunSpec
from schemas.wire import decode
from tests.bench._bare_loop import BareLoop
from tests.bench._limit import generation_s, training_s

BARE_THREADS = 2


def main(runfile: str, model: str, folder: str, warm: str, *changes: str) -> None:
    """Measure, and print one line."""
    spec = load_run_file(runfile, changes)
    samples = [
        [decode(file.read_bytes(), Sample) for file in sorted(iteration.iterdir())]
        for iteration in sorted(Path(folder).iterdir())
    ]
    assert isinstance(spec.generator, VllmSettings)
    engine = spec.generator.own_engine(model, spec)
    measure_steps(engine, spec.generator.slots)
    bare = _bare(
        load_run_file(runfile, [*changes, "algorithm.mode=sync", "algorithm.staleness=0"]),
        model,
        engine,
        int(warm),
    )
    torch.set_num_threads(1)
    bounded, unbounded = generation_s(spec, engine, samples)
    limit = {"generate_s": bounded, "unbounded_s": unbounded, "train_s": training_s(spec, model, samples)}
    print("RESULT", json.dumps({"bare": bare, "limit": limit}))


def _bare(spec: RunSpec, model: str, engine: VllmEngine, warm: int) -> dict[str, float]:
    loop = BareLoop(spec, model, engine, threads=BARE_THREADS)
    for number in range(warm):
        loop.iterate(number)
    began, cpu = time.perf_counter(), time.process_time()
    done = [loop.iterate(number) for number in range(warm, spec.algorithm.iterations)]
    return {
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        "samples": sum(i.samples for i in done),
        "tokens": sum(i.tokens for i in done),
        "generate_s": sum(i.generate_s for i in done),
        "train_s": sum(i.train_s for i in done),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
