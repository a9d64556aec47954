"""The learner on one GPU beside a plain loop over padded batches: tokens a second, MFU, memory.

A process of its own: `python -m tests.bench._gpu_learner FOLDER SIZE DEVICE SAMPLES LONGEST`.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from consumers.batches.micro_batches import plan
from consumers.batches.training_rows import TrainingRow
from consumers.learners.fixed_point import FixedPointSum
from consumers.learners.learner import TorchLearner
from consumers.learners.peak_memory import peak_memory_gib
from consumers.losses.loss import loss_of
from infra.weights.folder import ModelFolder
from schemas.runspec import RunSpec
from tests.bench._gpu_model import PROMPT, SHAPES, drawn_lengths, flops_of
from tests.factories import make_sample, make_spec

Settings = Mapping[str, Any]

_PEAK_FLOPS = 989e12  # of an H100 in bf16, dense: the figure that MFU is usually given by
_GROUP = 8
_REPEATS = 3  # steps, of which the first does not count
_CHUNK = 4096  # tokens whose logits the plain loop has in memory


class Work:
    """The same sequences for both."""

    def __init__(self, folder: str, size: str, device: str, samples: int, longest: int) -> None:
        self.folder, self.shape, self.device = folder, SHAPES[size], torch.device(device)
        self.longest = longest
        self.before_steps_gib = 0.0  # the most memory that was taken before steps are timed
        self.lengths = drawn_lengths(samples, longest)
        self.tokens = sum(self.lengths) + PROMPT * samples
        sizes = [length + PROMPT for length in self.lengths]
        self._flops = flops_of(self.shape, sizes, sum(self.lengths))

    def spec(self, budget: int, *, exact: bool, model: Settings = {}, trainer: Settings = {}) -> RunSpec:  # noqa: B006
        return make_spec(
            model={"path": self.folder, "dtype": "bfloat16", **model},
            sampling={"max_tokens": self.longest, "max_prompt_tokens": PROMPT},
            algorithm={"groups": len(self.lengths) // _GROUP, "group_size": _GROUP, "learning_rate": 1e-6},
            trainer={"microbatch_tokens": budget, "bundle_tokens": 512, "exact_sums": exact, **trainer},
        )

    def rows(self, spec: RunSpec) -> list[TrainingRow]:
        found = []
        pairs = itertools.product(range(spec.algorithm.groups), range(_GROUP))
        for number, (group, index) in enumerate(pairs):
            draw, length = np.random.default_rng(number), self.lengths[number]
            sample = make_sample(
                spec, group, index, length=length,
                prompt_tokens=self._drawn(draw, PROMPT), tokens=self._drawn(draw, length),
                logprobs=(0.1 * draw.standard_normal(length) - 6).astype(np.float32),
            )  # fmt: skip
            found.append(TrainingRow(sample, 0, number))
        return found

    def _drawn(self, draw: np.random.Generator, count: int) -> np.ndarray:
        return draw.integers(2, self.shape["vocab_size"], count).astype(np.int32)

    def timed(self, step: Callable[[], object]) -> dict[str, float]:
        """Run some steps; return the figures of the best one that counts."""
        self.before_steps_gib = peak_memory_gib()
        self.freed()
        seconds = []
        for _ in range(_REPEATS):
            self.synchronize()
            began = time.perf_counter()
            step()
            self.synchronize()
            seconds.append(time.perf_counter() - began)
        best = min(seconds[1:])
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return {
            "step_s": best, "tokens_per_s": self.tokens / best, "mfu": self._flops / best / _PEAK_FLOPS,
            "first_over_best": seconds[0] / best, "peak_gb": peak / 1e9,
        }  # fmt: skip

    def freed(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def ours(work: Work, budget: int, spec: RunSpec) -> dict[str, float]:
    """TorchLearner; `made_ms`: until the weights are copied, on the GPU where they fit, and hashed."""
    _switch_back()
    rows, loss = work.rows(spec), loss_of(spec)
    learner = TorchLearner(work.folder, spec)
    batches, total = plan(rows, loss, budget, 0).batches, loss.total([row.sample for row in rows])

    def step() -> None:
        learner.accumulate(batches)
        learner.step(total)

    found = work.timed(step)
    learner.made()
    began = time.perf_counter()
    learner.made()
    return found | {"made_ms": (time.perf_counter() - began) * 1e3}


def exact_sum(work: Work) -> dict[str, float]:
    """Milliseconds to add a gradient of the model's size to an exact sum, and by torch's operations alone."""
    size = sum(math.prod(shape) for shape in ModelFolder(work.folder).shapes.values())
    gradient = torch.randn(size, device=work.device)
    total, by_torch = (
        FixedPointSum(size, work.device),
        torch.zeros(size, dtype=torch.int64, device=work.device),
    )

    def plainly() -> None:
        gradient.abs().max()
        by_torch.add_((gradient * 2.0**32).round_().to(torch.int64))
        gradient.zero_()

    return {
        "exact_sum_ms": 1e3 * work.timed(lambda: total.add(gradient))["step_s"],
        "exact_sum_by_torch_ms": 1e3 * work.timed(plainly)["step_s"],
    }


def padded(work: Work, budget: int) -> dict[str, float]:
    """Batches sorted by length and padded, SDPA, autocast on fp32 weights, AdamW: as short scripts do it."""
    from transformers import AutoModelForCausalLM

    _switch_back()
    model = AutoModelForCausalLM.from_pretrained(
        work.folder, dtype=torch.float32, attn_implementation="sdpa"
    ).to(work.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batches = _padded_batches(work, budget)

    def summed(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(states).float()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

    def step() -> None:
        for tokens, answers in batches:
            with torch.autocast(work.device.type, dtype=torch.bfloat16):
                states = model.model(input_ids=tokens, use_cache=False).last_hidden_state
                drawn = answers[:, 1:]
                chunks = zip(states[:, :-1][drawn].split(_CHUNK), tokens[:, 1:][drawn].split(_CHUNK),
                             strict=True)  # fmt: skip
                parts = [checkpoint(summed, *chunk, use_reentrant=False) for chunk in chunks]
            torch.stack(parts).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return work.timed(step)


def _switch_back() -> None:
    """Switch off what exact sums of a learner before switched on: it would slow down all that come later."""
    torch.use_deterministic_algorithms(False)


def _padded_batches(work: Work, budget: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = sorted(work.rows(work.spec(budget, exact=False)), key=lambda row: row.size)
    groups: list[list[TrainingRow]] = [[]]
    for row in rows:
        if groups[-1] and row.size * (len(groups[-1]) + 1) > budget:
            groups.append([])
        groups[-1].append(row)
    found = []
    for group in groups:
        tokens = torch.zeros(len(group), group[-1].size, dtype=torch.long)
        answers = torch.zeros(tokens.shape, dtype=torch.bool)
        for place, row in enumerate(group):
            whole = np.concatenate([row.sample.prompt_tokens, row.sample.tokens]).astype(np.int64)
            tokens[place, : whole.size] = torch.from_numpy(whole)
            answers[place, PROMPT : whole.size] = True
        found.append((tokens.to(work.device), answers.to(work.device)))
    return found


def _if_it_fits(work: Work, budget: int, spec: RunSpec) -> dict[str, float] | None:
    """TorchLearner; None: the GPU's memory is too small for these settings."""
    with suppress(torch.OutOfMemoryError):
        return ours(work, budget, spec)
    return None


def measure(folder: str, size: str, device: str, samples: int, longest: int) -> dict[str, Any]:
    """Figures of both, and their ratios, with micro-batches of four and of eight longest answers.

    Ours also with half as many tokens, in bf16 and in fp32, and with twice as many and checkpointing.
    """
    work = Work(folder, size, device, samples, longest)
    found: dict[str, Any] = dict(exact_sum(work))
    for budget in (4 * longest, 8 * longest):
        plain, own = padded(work, budget), ours(work, budget, work.spec(budget, exact=True))
        inexact = ours(work, budget, work.spec(budget, exact=False))
        named = {"padded": plain, "ours": own, "ours_inexact": inexact}
        found |= {f"{name}_{budget}": figures for name, figures in named.items()}
        found[f"tokens_over_padded_{budget}"] = own["tokens_per_s"] / plain["tokens_per_s"]
        found[f"memory_over_padded_{budget}"] = (
            own["peak_gb"] / plain["peak_gb"] if plain["peak_gb"] else None
        )
        found[f"exact_sums_cost_{budget}"] = inexact["tokens_per_s"] / own["tokens_per_s"] - 1
    rows: tuple[tuple[str, int, Settings, Settings], ...] = (
        ("ours", 2 * longest, {}, {}),
        ("ours_checkpointed", 16 * longest, {}, {"gradient_checkpointing": True}),
        ("ours_float32", 2 * longest, {"dtype": "float32"}, {}),
    )
    for name, budget, model, trainer in rows:
        spec = work.spec(budget, exact=True, model=model, trainer=trainer)
        found[f"{name}_{budget}"] = _if_it_fits(work, budget, spec)
    return found


if __name__ == "__main__":
    result = measure(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    print("RESULT", json.dumps(result))
