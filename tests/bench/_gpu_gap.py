"""How far the logprobs of an engine's samples are from those that the learner computes, in bf16 and in fp32.

A process of its own: `python -m tests.bench._gpu_gap FOLDER`. The engine has left samples beside the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from consumers.batches.micro_batches import micro_batch
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner
from tests.bench._gpu_engine import DRAWN, prompts
from tests.factories import make_sample, make_spec

_TOGETHER = 8  # samples of a micro-batch


def measure(folder: str) -> dict[str, dict[str, float]]:
    """Absolute differences by the dtype that the learner computes in: mean, 99 of 100, and largest."""
    with np.load(Path(folder).with_name(DRAWN)) as file:
        drawn = [(file[f"tokens{n}"], file[f"logprobs{n}"]) for n in range(len(file.files) // 2)]
    texts = prompts(len(drawn))
    longest = max(tokens.size for tokens, _ in drawn)
    found = {}
    for dtype in ("bfloat16", "float32"):
        spec = make_spec(
            model={"path": folder, "dtype": dtype}, sampling={"max_tokens": longest, "max_prompt_tokens": 64},
            trainer={"microbatch_tokens": _TOGETHER * (longest + 64), "exact_sums": False},
        )  # fmt: skip
        learner, rows = TorchLearner(folder, spec), []
        for number, (text, (tokens, logprobs)) in enumerate(zip(texts, drawn, strict=True)):
            sample = make_sample(
                spec, 0, 0, prompt_tokens=np.array(text, np.int32), tokens=tokens, logprobs=logprobs
            )
            rows.append(TrainingRow(sample, 0, number))
        gaps = []
        for start in range(0, len(rows), _TOGETHER):
            batch = micro_batch(rows[start : start + _TOGETHER], None, learner.loss, 0).to(learner._device)
            with torch.no_grad():
                ours = learner._forward.logprobs(learner._model, batch)
            gaps.append((ours.float() - batch.behaviour).abs().cpu().numpy())
        every = np.concatenate(gaps)
        found[dtype] = {
            "tokens": every.size, "mean": float(every.mean()), "p99": float(np.quantile(every, 0.99)),
            "largest": float(every.max()),
        }  # fmt: skip
    return found


if __name__ == "__main__":
    print("RESULT", json.dumps(measure(sys.argv[1])))
