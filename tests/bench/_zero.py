"""DeepSpeed ZeRO-1 on two ranks against torch's DistributedDataParallel with AdamW on two ranks.

Both in the same two processes, on the same packed micro-batches, taking turns: which one comes first changes
from round to round. A step is its micro-batches forward and backward, gradients over all ranks, clip, AdamW.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from consumers.batches.micro_batches import MicroBatch, deal, plan
from consumers.batches.training_rows import TrainingRow
from consumers.learners import collective, forward
from consumers.learners.learner import LocalLearner
from consumers.losses.objective import objective
from consumers.ranks.choose_learner import local_learner
from infra.ranks.rank_addresses import meeting_place
from infra.supervise import children
from schemas.runspec import RunSpec
from tests.bench._runs import ROOT
from tests.factories import make_sample, make_spec

RANKS = 2


def zero_against_ddp(
    model: str, *, stage: int = 1, rounds: int = 8, steps: int = 3, groups: int = 32, length: int = 60
) -> dict[str, Any]:
    """The ratio of step times (median over rounds), DeepSpeed's over DDP's, and what it is made of.

    `cpu_ratio` is that of rank 0's CPU time, which other work on the machine touches less.
    """
    place = meeting_place(RANKS)
    spec = _spec(stage, groups)
    given = {"model": model, "spec": spec.model_dump_json(), "rounds": rounds, "steps": steps}
    given["length"] = length
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "tests.bench._zero"]
    processes = [
        children.start_child(
            [*argv, json.dumps({**given, "rank": rank, "port": place.port})],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=ROOT,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        out, errors = processes[0].communicate()
        if processes[0].returncode:
            raise RuntimeError(f"rank 0 failed:\n{errors.decode()[-3000:]}")
    finally:
        for process in processes:
            children.kill(process)
    seconds = json.loads(out.decode().rpartition("RESULT ")[2])
    zero, ddp = np.array(seconds["zero"]), np.array(seconds["ddp"])
    return {
        "ratio": float(np.median(zero / ddp)),
        "spread": [float(np.min(zero / ddp)), float(np.max(zero / ddp))],
        "cpu_ratio": float(np.median(np.array(seconds["zero_cpu"]) / np.array(seconds["ddp_cpu"]))),
        "zero_step_ms": float(np.median(zero) * 1e3),
        "ddp_step_ms": float(np.median(ddp) * 1e3),
        "parameters": seconds["parameters"],
        "microbatches": seconds["microbatches"],
        "tokens": seconds["tokens"],
    }


def _spec(stage: int, groups: int) -> RunSpec:
    return make_spec(
        sampling={"max_tokens": 400, "max_prompt_tokens": 8},
        algorithm={"groups": groups, "group_size": 8},
        trainer={"learner": "deepspeed", "ranks": RANKS, "zero_stage": stage, "microbatch_tokens": 2048},
    )


class _Ddp:
    """What one would write: gradients are added up on the way back through the last micro-batch."""

    def __init__(self, model: str, spec: RunSpec, loss: Any) -> None:
        self._spec, self._loss = spec, loss
        policy = _Policy(forward.load_policy(model, spec, collective.device()), spec)
        self.parameters = list(policy.parameters())
        self._model = torch.nn.parallel.DistributedDataParallel(policy)
        algorithm = spec.algorithm
        self._adam = torch.optim.AdamW(
            self.parameters, lr=algorithm.learning_rate, betas=algorithm.betas,
            weight_decay=algorithm.weight_decay, fused=True,
        )  # fmt: skip

    def step(self, batches: list[MicroBatch], total: float) -> None:
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with nullcontext() if last else self._model.no_sync():
                loss, _ = objective(self._model(batch), batch, self._loss)
                (loss * (RANKS / total)).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self._spec.algorithm.max_grad_norm)
        self._adam.step()
        self._adam.zero_grad()


class _Policy(torch.nn.Module):
    def __init__(self, model: Any, spec: RunSpec) -> None:
        super().__init__()
        self.model, self._run = model, forward.Forward(spec, collective.device())

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return self._run.logprobs(self.model, batch)


def _rank(given: dict[str, Any]) -> None:
    """One of the two processes."""
    spec = RunSpec.model_validate_json(given["spec"])
    number = given["rank"]
    seat = collective.Seat(number, RANKS, number)
    collective.join_ranks(seat, ("127.0.0.1", given["port"]), spec.deadlines)
    zero: LocalLearner = local_learner(given["model"], spec)
    ddp = _Ddp(given["model"], spec, zero.loss)
    algorithm = spec.algorithm
    draw = np.random.default_rng(1)
    rows = [
        TrainingRow(make_sample(spec, g, i, length=int(draw.geometric(1 / given["length"])) % 400 + 1), 0, 0)
        for g in range(algorithm.groups)
        for i in range(algorithm.group_size)
    ]
    batches = plan(rows, zero.loss, spec.trainer.microbatch_tokens, 0, parts=RANKS).batches
    total = zero.loss.total([row.sample for row in rows])
    mine = [batches[n] for n in deal([batch.cost for batch in batches], RANKS)[given["rank"]]]

    def zero_step() -> None:
        zero.accumulate(mine)
        zero.step(total)

    ways = {"zero": zero_step, "ddp": lambda: ddp.step(mine, total)}
    seconds: dict[str, list[float]] = {key: [] for name in ways for key in (name, f"{name}_cpu")}
    for number in range(given["rounds"] + 1):  # the first one warms up
        for name in sorted(ways, reverse=bool(number % 2)):
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            for _ in range(given["steps"]):
                ways[name]()
            worked = time.process_time() - worked
            dist.barrier()
            if number:
                seconds[name].append((time.perf_counter() - began) / given["steps"])
                seconds[f"{name}_cpu"].append(worked / given["steps"])
    if given["rank"] == 0:
        parameters = sum(parameter.numel() for parameter in ddp.parameters)
        tokens = sum(batch.packing.tokens for batch in batches)
        found = {**seconds, "parameters": parameters, "microbatches": len(batches), "tokens": tokens}
        print("RESULT", json.dumps(found))
    collective.leave()


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
