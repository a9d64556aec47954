"""How far logprobs of a mixture of experts are apart in engine and trainer, with and without its routes.

A random model in bfloat16. The engine draws samples; the trainer computes their logprobs twice: once its
routers take the experts that the engine took (`model.follow_routes`), once those that they would choose.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.bench._own_process import result_of

_SHAPE = {"hidden_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 4, "head_dim": 64}
_PROMPT, _ANSWER = 16, 112  # tokens


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench mixture")
    parser.add_argument("--models", type=int, default=2 if quick else 5)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--taken", type=int, default=4)
    given = parser.parse_args(argv)
    found = [_measured(vars(given) | {"seed": seed}) for seed in range(given.models)]
    return _report(found)


def _measured(asked: dict[str, int]) -> dict[str, Any]:
    """Measure one random model in a process of its own: vLLM allows one engine a process."""
    return dict(result_of("mixture", json.dumps(asked)))


def measure(asked: dict[str, int], folder: Path) -> dict[str, Any]:
    """Draw samples, and compute their logprobs both ways."""
    import torch

    from consumers.batches.micro_batches import micro_batch
    from consumers.batches.training_rows import TrainingRow
    from consumers.learners import collective
    from consumers.learners.expert_routing import routers
    from consumers.learners.learner import TorchLearner
    from producers.engines.engine import DrawnAnswer, SampleRequest
    from producers.engines.vllm_in_process import GpuMemory, VllmEngine
    from schemas.expert_routes import pack_routes
    from tests.factories import make_sample, make_spec, make_tiny_mixture

    config = {"vocab_size": 4096, "num_hidden_layers": asked["layers"], "num_experts": asked["experts"]}
    shape = {**config, **_SHAPE, "num_experts_per_tok": asked["taken"]}
    model = make_tiny_mixture(folder / "model", "qwen3_moe", seed=asked["seed"], **shape)
    spec = make_spec(
        model={"dtype": "bfloat16"}, sampling={"max_tokens": _ANSWER, "max_prompt_tokens": _PROMPT},
        trainer={"microbatch_tokens": 4096},
    )  # fmt: skip
    engine = VllmEngine(
        str(model), dtype="bfloat16", slots=64, max_model_len=256, kv_cache_mib=256, routes=True,
        gpu=GpuMemory(0.3),
    )  # fmt: skip
    draw = np.random.default_rng(asked["seed"])
    prompts = {f"{number:07d}-00": draw.integers(2, 4096, _PROMPT) for number in range(asked["samples"])}
    for number, (name, prompt) in enumerate(prompts.items()):
        engine.submit(SampleRequest(name, prompt.tolist(), _ANSWER, number, 0.0))
    answers: dict[str, DrawnAnswer] = {}
    began = time.perf_counter()
    while engine.unfinished():
        answers |= {one.id: one for one in engine.step()}
    seconds = time.perf_counter() - began
    learner = TorchLearner(str(model), spec)
    rows = [
        TrainingRow(
            make_sample(
                spec, 0, 0, prompt_tokens=prompts[name].astype(np.int32), tokens=one.tokens,
                logprobs=one.logprobs, routes=pack_routes(one.routes),
            ), 0, 0,
        )
        for name, one in answers.items() if one.routes is not None
    ]  # fmt: skip
    batch = micro_batch(rows, None, learner.loss, 0).to(collective.device())
    chosen: list[torch.Tensor] = []
    for router in routers(learner._model):
        router.register_forward_hook(lambda module, given, out: chosen.append(out[2]))
    gaps, experts = {}, {}
    for way, one in (("followed", batch), ("free", replace(batch, routes=()))):
        chosen.clear()
        with torch.no_grad():
            logprobs = learner._forward.logprobs(learner._model, one)
        gaps[way] = (logprobs.float() - batch.behaviour).abs().cpu().numpy()
        experts[way] = torch.stack(chosen).sort(dim=-1).values[:, : batch.packing.tokens]
    other = (experts["followed"] != experts["free"]).any(-1)
    sizes = {"bytes": sum(len(row.sample.routes) for row in rows), "tokens": sum(row.size for row in rows)}
    return {
        "gaps": {way: gap.tolist() for way, gap in gaps.items()}, "other_routes": float(other.float().mean()),
        "other_tokens": float(other.any(0).float().mean()), "seconds": seconds, **sizes,
    }  # fmt: skip


def _report(found: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    table = Table(title=f"logprobs of engine and trainer in bfloat16, {len(found)} random models")
    for column in ("experts", "mean", "99 %", "largest"):
        table.add_column(column)
    for way, title in (("free", "each its own"), ("followed", "the engine's")):
        gaps = np.concatenate([one["gaps"][way] for one in found])
        numbers = [float(gaps.mean()), float(np.quantile(gaps, 0.99)), float(gaps.max())]
        table.add_row(title, *(f"{number:.4f}" for number in numbers))
        result[way] = [round(number, 5) for number in numbers]
    Console().print(table)
    for name in ("other_routes", "other_tokens"):
        result[name] = round(float(np.mean([one[name] for one in found])), 4)
    result["bytes_a_token"] = round(
        sum(one["bytes"] for one in found) / sum(one["tokens"] for one in found), 1
    )
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print("RESULT", json.dumps(measure(json.loads(sys.argv[1]), Path(place))))
