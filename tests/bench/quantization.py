"""What weights in eight bits save, how fast they draw, and how far their logprobs are from the trainer's.

Each way (plain, int8, fp8) draws for the same prompts with the same seeds, in turn, in processes of its own,
on one thread. The trainer's learner then computes the logprobs of what was drawn, with the plain weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flows.run.start_model import prepare_model
from schemas.loading import load_run_file
from tests.bench._own_process import result_of
from tests.bench._runs import ROOT, RUNFILE
from tests.bench._sized import SIZES, make_model

_WAYS = {"plain": "", "int8": "int8", "fp8": "fp8"}
_PROMPT, _ANSWER = 16, 96  # tokens
_LEARNED = 64  # samples whose logprobs are compared

Asked = dict[str, Any]


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench quantization")
    parser.add_argument("--model", choices=["demo", *SIZES], default="demo")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=1 if quick else 3)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--ways", nargs="+", choices=list(_WAYS), default=list(_WAYS))
    given = parser.parse_args(argv)
    os.environ.setdefault("STREAMRL_HOME", str(ROOT / ".streamrl"))
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder:
        model = _model(given.model, given.dtype, Path(folder))
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in given.ways}
        turns = [way for _ in range(given.rounds) for way in given.ways]
        for way in track(turns, "quantization", console=Console(stderr=True)):
            asked = {"model": model, "dtype": given.dtype, "samples": given.samples, "slots": given.slots}
            found[way].append(_measured({**asked, "eight_bits": _WAYS[way]}))
    return _report(found, f"{given.model}, {given.dtype}, {given.slots} slots, one thread")


def _model(name: str, dtype: str, folder: Path) -> str:
    if name == "demo":
        return str(prepare_model(load_run_file(RUNFILE), lambda share, text: None))
    return str(make_model(folder / "model", name, dtype))


def _measured(asked: Asked) -> dict[str, Any]:
    return dict(result_of("quantization", json.dumps(asked)))


def measure(asked: Asked) -> dict[str, Any]:
    """In a process of its own: draw, and compute again what was drawn."""
    from producers.engines.engine import DrawnAnswer, SampleRequest
    from producers.engines.vllm_in_process import VllmEngine

    engine = VllmEngine(
        asked["model"], dtype=asked["dtype"], slots=asked["slots"], max_model_len=128, kv_cache_mib=512,
        eight_bits=asked["eight_bits"],
    )  # fmt: skip
    draw = np.random.default_rng(0)
    words = json.loads((Path(asked["model"]) / "config.json").read_text())["vocab_size"]
    prompts = [draw.integers(2, words, _PROMPT) for _ in range(asked["samples"])]

    def made(count: int) -> dict[str, DrawnAnswer]:
        for number in range(count):
            name = f"{number:07d}-00"
            engine.submit(SampleRequest(name, prompts[number].tolist(), _ANSWER, number, 0.0, endless=True))
        found: dict[str, DrawnAnswer] = {}
        while engine.unfinished():
            found |= {one.id: one for one in engine.step()}
        return found

    made(asked["slots"])  # the first ones warm up
    began = time.perf_counter()
    drawn = made(asked["samples"])
    seconds = time.perf_counter() - began
    held = sum(one.nbytes for one in engine._runner.model.parameters())
    gaps = _gaps(asked, [(prompts[int(name[:7])], one) for name, one in sorted(drawn.items())[:_LEARNED]])
    tokens = sum(one.tokens.size for one in drawn.values())
    return {"rate": tokens / seconds, "bytes": held, "gaps": gaps.tolist()}


def _gaps(asked: Asked, drawn: Sequence[tuple[np.ndarray, Any]]) -> np.ndarray:
    """Return how far the learner's logprobs are from those that samples came with."""
    import torch

    from consumers.batches.micro_batches import micro_batch
    from consumers.batches.training_rows import TrainingRow
    from consumers.learners.learner import TorchLearner
    from tests.factories import make_sample, make_spec

    spec = make_spec(
        model={"dtype": asked["dtype"]}, sampling={"max_tokens": _ANSWER, "max_prompt_tokens": _PROMPT},
        trainer={"microbatch_tokens": 4096},
    )  # fmt: skip
    learner = TorchLearner(asked["model"], spec)
    rows = [
        TrainingRow(
            make_sample(
                spec, 0, 0, prompt_tokens=prompt.astype(np.int32), tokens=one.tokens, logprobs=one.logprobs
            ),
            0, 0,
        )
        for prompt, one in drawn
    ]  # fmt: skip
    found = []
    for first in range(0, len(rows), 16):
        batch = micro_batch(rows[first : first + 16], None, learner.loss, 0)
        with torch.no_grad():
            logprobs = learner._forward.logprobs(learner._model, batch)
        found.append((logprobs.float() - batch.behaviour).abs().numpy())
    return np.concatenate(found)


def _report(found: dict[str, list[dict[str, Any]]], title: str) -> dict[str, Any]:
    table, result = Table(title=title), dict[str, Any]()
    for column in ("weights", "MB held", "tokens/s", "spread", "mean gap", "99 %", "largest"):
        table.add_column(column)
    for way, rounds in found.items():
        rates, gaps = [one["rate"] for one in rounds], np.concatenate([one["gaps"] for one in rounds])
        held = rounds[0]["bytes"] / 1e6
        numbers = [float(gaps.mean()), float(np.quantile(gaps, 0.99)), float(gaps.max())]
        table.add_row(
            way, f"{held:.2f}", f"{np.median(rates):.0f}", f"{min(rates):.0f} to {max(rates):.0f}",
            *(f"{number:.2g}" for number in numbers),
        )  # fmt: skip
        result[way] = {"megabytes": round(held, 3), "rate": round(float(np.median(rates)), 1), "gap": numbers}
    Console().print(table)
    return result


if __name__ == "__main__":
    print("RESULT", json.dumps(measure(json.loads(sys.argv[1]))))
