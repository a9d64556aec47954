"""How much faster groups are drawn if an engine computes the prompt of each once (generator.prefix_caching).

The same groups of the same prompts, with it and without, in turn in processes of their own, on one thread.
Beside it: the share of prompts that was not computed again, and whether all samples have the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
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

from tests.bench._own_process import result_of
from tests.bench._sized import SIZES, make_model

_SLOTS = 32

Asked = dict[str, Any]


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench prefix_caching")
    parser.add_argument("--model", choices=SIZES, default="30M")
    parser.add_argument("--rounds", type=int, default=1 if quick else 4)
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048], help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--samples", type=int, default=64)
    given = parser.parse_args(argv)
    found: dict[int, list[dict[bool, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder:
        model = str(
            make_model(Path(folder) / "model", given.model, "float32", max(given.prompts) + given.answer)
        )
        turns = [(prompt, turn) for prompt in given.prompts for turn in range(given.rounds)]
        for prompt, turn in track(turns, "prefix caching", console=Console(stderr=True)):
            asked = {
                "model": model, "prompt": prompt, "answer": given.answer, "group": given.group,
                "samples": given.samples,
            }  # fmt: skip
            ways = (True, False) if turn % 2 else (False, True)  # neither always comes first
            both = {on: result_of("prefix_caching", json.dumps({**asked, "on": on})) for on in ways}
            found.setdefault(prompt, []).append(both)
    title = f"{given.model}, groups of {given.group}, answers of up to {given.answer} tokens, one thread"
    return _report(found, title)


def measure(asked: Asked) -> dict[str, Any]:
    """In a process of its own: draw the groups."""
    from producers.engines.engine import DrawnAnswer, SampleRequest
    from producers.engines.vllm_in_process import VllmEngine

    prompt, group = asked["prompt"], asked["group"]
    engine = VllmEngine(
        asked["model"], slots=_SLOTS, max_model_len=prompt + asked["answer"], kv_cache_mib=1024,
        prefix_caching=None if asked["on"] else False,
    )  # fmt: skip
    draw = np.random.default_rng(0)
    words = json.loads((Path(asked["model"]) / "config.json").read_text())["vocab_size"]

    def made(first: int, count: int) -> list[DrawnAnswer]:
        for number in range(first, first + count // group):
            tokens = draw.integers(2, words, prompt).tolist()
            for index in range(group):
                name = f"{number:07d}-{index:02d}"
                seed = 1000 * number + index
                engine.submit(SampleRequest(name, tokens, asked["answer"], seed, float(asked["answer"])))
        found = []
        while engine.unfinished():
            found += engine.step()
        return sorted(found, key=lambda one: one.id)

    made(0, group)  # the first ones warm up
    shared, began = engine.pace().shared, time.perf_counter()
    answers = made(1, asked["samples"])
    seconds = time.perf_counter() - began
    bits = hashlib.blake2b(b"".join(one.tokens.tobytes() + one.logprobs.tobytes() for one in answers))
    return {
        "rate": sum(one.tokens.size for one in answers) / seconds, "bits": bits.hexdigest(),
        "shared": (engine.pace().shared - shared) / (prompt * len(answers)),
    }  # fmt: skip


def _report(found: dict[int, list[dict[bool, Any]]], title: str) -> dict[str, Any]:
    table = Table(title=title)
    for column in ("prompt", "tokens/s without", "with", "times as fast", "not computed again", "same bits"):
        table.add_column(column, justify="right")
    result: dict[str, Any] = {}
    for prompt, rounds in found.items():
        rates = {on: float(np.median([one[on]["rate"] for one in rounds])) for on in (True, False)}
        ratios = [one[True]["rate"] / one[False]["rate"] for one in rounds]
        same = len({one[on]["bits"] for one in rounds for on in one}) == 1
        shared = rounds[0][True]["shared"]
        table.add_row(
            str(prompt), f"{rates[False]:.0f}", f"{rates[True]:.0f}",
            f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", f"{shared:.0%}",
            "all" if same else "NO",
        )  # fmt: skip
        speedup = round(float(np.median(ratios)), 3)
        result[str(prompt)] = {"speedup": speedup, "shared": round(shared, 3), "same_bits": same}
    Console().print(table)
    return result


if __name__ == "__main__":
    print("RESULT", json.dumps(measure(json.loads(sys.argv[1]))))
