"""What it costs that a sample's bits don't depend on its batch: generation with and without.

The same requests, in turn in processes of their own (vLLM allows one engine a process), on one thread. Beside
it: how many of the samples have the same bits when they are made alone as among 256 others.
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

Asked = dict[str, Any]

_ALONE = 24  # samples that are made again by themselves


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench invariance")
    parser.add_argument("--rounds", type=int, default=2 if quick else 6)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--model", choices=["demo", *SIZES], default="demo")
    parser.add_argument("--prompt", type=int, default=3, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=200, help="most tokens of an answer")
    given = parser.parse_args(argv)
    os.environ.setdefault("STREAMRL_HOME", str(ROOT / ".streamrl"))
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder:
        model = _model(given.model, Path(folder), given.prompt + given.answer)
        asked = {"model": model, "samples": given.samples, "prompt": given.prompt, "answer": given.answer}
        for number in track(range(2 * given.rounds), "invariance", console=Console(stderr=True)):
            invariant = bool((number + number // 2) % 2)  # on off off on on off: neither always comes first
            found[invariant].append(_measured({**asked, "invariant": invariant}))
    return _report(found, f"{given.model}, prompts of {given.prompt} tokens")


def _model(name: str, folder: Path, longest: int) -> str:
    if name == "demo":
        return str(prepare_model(load_run_file(RUNFILE), lambda share, text: None))
    return str(make_model(folder / "model", name, "float32", longest))


def _measured(asked: Asked) -> dict[str, float]:
    return dict(result_of("invariance", json.dumps(asked)))


def measure(asked: Asked) -> None:
    """In a process of its own: print seconds, tokens, and how many samples are the same alone."""
    from producers.engines.engine import DrawnAnswer, SampleRequest
    from producers.engines.vllm_in_process import VllmEngine

    samples, answer = asked["samples"], asked["answer"]
    engine = VllmEngine(
        asked["model"], slots=256, max_model_len=asked["prompt"] + answer, kv_cache_mib=1024, threads=1,
        batch_invariant=asked["invariant"], prefix_caching=False,
    )  # fmt: skip
    steps = (1, 7, 11, *range(13, 10 + asked["prompt"]))[: asked["prompt"]]

    def made(numbers: Sequence[int]) -> dict[str, DrawnAnswer]:
        for number in numbers:
            prompt = [2 + (number * step) % 36 for step in steps]
            engine.submit(SampleRequest(f"{number:07d}-00", prompt, answer, number, 0.0))
        found: dict[str, DrawnAnswer] = {}
        while engine.unfinished():
            found |= {one.id: one for one in engine.step()}
        return found

    made(range(min(256, samples)))  # the first ones warm up
    began = time.perf_counter()
    together = made(range(samples))
    seconds = time.perf_counter() - began
    same = 0
    for number in list(range(0, samples, max(1, samples // _ALONE)))[:_ALONE]:
        ((name, alone),) = made([number]).items()
        same += alone.logprobs.tobytes() == together[name].logprobs.tobytes()
    tokens = sum(one.tokens.size for one in together.values())
    print("RESULT", json.dumps({"seconds": seconds, "tokens": tokens, "same": same, "alone": _ALONE}))


def _report(found: dict[bool, list[dict[str, float]]], title: str) -> dict[str, Any]:
    rates = {on: np.array([one["tokens"] / one["seconds"] for one in rounds]) for on, rounds in found.items()}
    same = {on: [one["same"] / one["alone"] for one in rounds] for on, rounds in found.items()}
    cost = float(np.median(rates[False]) / np.median(rates[True]) - 1)
    table = Table(title=f"generation with {title}, {len(rates[True])} processes each")
    for column in ("bits don't depend on the batch", "tokens/s", "spread", "same bits alone"):
        table.add_column(column)
    for on in (True, False):
        table.add_row(
            "on" if on else "off", f"{np.median(rates[on]):.0f}",
            f"{rates[on].min():.0f} to {rates[on].max():.0f}", f"{np.mean(same[on]):.0%}",
        )  # fmt: skip
    Console().print(table)
    return {
        "cost": round(cost, 4),
        "same_on": float(np.mean(same[True])),
        "same_off": float(np.mean(same[False])),
    }


if __name__ == "__main__":
    measure(json.loads(sys.argv[1]))
