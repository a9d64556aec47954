"""Speculation in vLLM: the same samples with and without drafts, side by side in one engine.

An iteration of the counting task, on one generator with the demo's slots: its seconds, those of its tail (the
last quarter of the slots, with nothing waiting), tokens a step and accepted drafts there, and the share of
samples with the same bits. Then small batches of constant size, in which a group's samples are made one after
the other, by drafters that begin with nothing. All by how far the model is trained: one that has learned to
count is nearly sure of each token, and drafts are right more often than in chains of thought. So `nats` says
how sure the model is: the mean of -log π of the drawn tokens. Seconds are processor time, since others use
the machine, too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from flows.run.start_model import prepare_model
from schemas.loading import load_run_file
from tests.bench._runs import ROOT, RUNFILE

_TAIL = 0.25  # of the slots, as generators report it
_BATCHES = (1, 4, 16, 64)
_DRAFTERS = ("off", "ngram", "history")
_HALF_TRAINED = 100  # steps of the warm start, of the demo's 500


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench speculation")
    parser.add_argument("--rounds", type=int, default=2 if quick else 5, help="iterations with other seeds")
    parser.add_argument("--groups", type=int, default=32 if quick else 64)
    parser.add_argument("--seed", type=int, default=11)
    given = parser.parse_args(argv)
    os.environ.setdefault("STREAMRL_HOME", str(ROOT / ".streamrl"))
    result = {}
    for name, model in _models():
        done = subprocess.run(
            [
                sys.executable, "-m", "tests.bench.speculation", str(model),
                *map(str, (given.groups, given.rounds, given.seed)),
            ],
            cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, check=False,
        )  # fmt: skip
        lines = [line for line in done.stdout.decode().splitlines() if line.startswith("RESULT ")]
        if done.returncode or not lines:
            raise RuntimeError(f"the engine failed:\n{done.stderr.decode()[-3000:]}")
        result[name] = json.loads(lines[-1].removeprefix("RESULT "))
        _print(name, result[name])
    return result


def _models() -> Iterator[tuple[str, Path]]:
    """Yield models from untrained to trained, each built once."""
    folder = Path(os.environ["STREAMRL_HOME"]) / "models"
    for name, steps in (("untrained", 0), ("half trained", _HALF_TRAINED)):
        found = folder / f"count-{steps}-steps"
        if not found.exists():
            _warm_start(found, steps)
        yield name, found
    yield "trained", Path(prepare_model(load_run_file(RUNFILE), lambda share, text: None))


def _warm_start(folder: Path, steps: int) -> None:
    code = (
        "import sys, pathlib; sys.path.insert(0, 'examples'); import count_model as made; "
        f"made.STEPS = {steps}; made.build(pathlib.Path(sys.argv[1]), 1, lambda share, text: None)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True, capture_output=True)


@dataclass
class _Sums:
    seconds: float = 0.0
    tail_s: float = 0.0
    tail_steps: int = 0
    tail_sample_steps: int = 0
    tail_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    same: list[bool] = field(default_factory=list)


def measure(model: str, groups: int, rounds: int, seed: int) -> dict[str, Any]:
    """Measure one model, in a process of its own."""
    bench = _Bench(model, groups, seed)
    for name in _DRAFTERS:  # the first ones warm up
        bench.iteration(name, seed - 1, _Sums())
    bench.fresh()
    sums = {name: _Sums() for name in _DRAFTERS}
    later = {name: _Sums() for name in _DRAFTERS}
    for number in range(rounds):
        for name in np.roll(_DRAFTERS, number).tolist():
            bench.iteration(name, seed + number, (later if number else sums)[name])
    found: dict[str, Any] = {
        "nats": round(bench.nats, 3),
        "longest": bench.longest,
        "tail": {},
        "batches": {},
    }
    for name in _DRAFTERS:
        for epoch, one in (("first epoch", sums[name]), ("later epochs", later[name])):
            found["tail"][f"{name}, {epoch}"] = _tail(
                one, (later if epoch == "later epochs" else sums)["off"]
            )
    for size in _BATCHES:
        found["batches"][size] = bench.constant(size, seed + 1000 * size, rounds)
    return found


class _Bench:
    """One engine, and a drafter of each kind that is put into it in turn."""

    def __init__(self, model: str, groups: int, seed: int) -> None:
        from producers.engines.ngram_drafter import NgramDrafter
        from producers.engines.speculation import Speculation
        from producers.engines.vllm_in_process import VllmEngine

        spec = load_run_file(RUNFILE)
        self._spec, self._groups = spec, groups
        self._engine = VllmEngine(
            model, slots=spec.generator.slots, max_model_len=spec.longest_sample, kv_cache_mib=256,
            drafter=NgramDrafter(),
        )  # fmt: skip
        self._engine.profile()
        self._pace = self._engine.pace()
        self._speculation = Speculation
        self.fresh()
        self._expected: dict[str, bytes] = {}
        self._prompts = _prompts(model, groups, seed)
        self.nats, self.longest = 0.0, 0

    def fresh(self) -> None:
        """Begin with drafters that know nothing."""
        from producers.engines.history_drafter import HistoryDrafter
        from producers.engines.ngram_drafter import NgramDrafter

        makes: dict[str, Callable[[], Any]] = {
            "ngram": NgramDrafter, "history": HistoryDrafter
        }  # fmt: skip
        engine = self._engine
        self._kinds: dict[str, Any] = {"off": None}
        for name, make in makes.items():
            made = self._speculation(engine._runner, engine._scheduler, engine._sampler, make())
            made.learn(self._pace)
            self._kinds[name] = made

    def iteration(self, drafter: str, seed: int, sums: _Sums) -> None:
        """Make all samples of an iteration."""
        size = self._spec.algorithm.group_size
        requests = [
            self._request(group, index, seed) for group in range(self._groups) for index in range(size)
        ]
        self._run(drafter, requests, len(requests), sums)

    def constant(self, size: int, seed: int, rounds: int) -> dict[str, Any]:
        """Make samples of the prompts with the longest answers, so many at once."""
        groups = sorted(range(self._groups), key=lambda group: -int(self._prompts[group][1]))[
            : max(2, size // 4)
        ]
        sums = {name: _Sums() for name in _DRAFTERS}
        for number in range(-1, rounds):
            self.fresh()
            requests = [self._request(group, index, seed + number) for group in groups for index in range(8)]
            for name in np.roll(_DRAFTERS, number).tolist():
                self._run(
                    name, requests, size, sums[name] if number >= 0 else _Sums()
                )  # the first one warms up
        off = sums["off"].seconds
        return {
            name: {
                "speedup": round(off / one.seconds, 3), "same_bits": float(np.mean(one.same)),
                "accepted": round(one.accepted / max(1, one.drafted), 3), "drafted": one.drafted,
            }
            for name, one in sums.items() if name != "off"
        }  # fmt: skip

    def _request(self, group: int, index: int, seed: int) -> Any:
        from producers.engines.engine import SampleRequest

        prompt, length = self._prompts[group]
        number = (seed << 32) + group * 64 + index
        name = f"{number:07d}-00"
        return SampleRequest(name, prompt, self._spec.sampling.max_tokens, number, float(length))

    def _run(self, drafter: str, requests: Sequence[Any], at_once: int, sums: _Sums) -> None:
        engine = self._engine
        speculation = engine._speculation = self._kinds[drafter]
        before = speculation.counts() if speculation else (0, 0)
        waiting, slots = list(requests[::-1]), self._spec.generator.slots
        answers: list[Any] = []
        running, began = 0, time.process_time()
        made: dict[str, int] = {}
        while running or waiting:
            while waiting and running < at_once:
                engine.submit(waiting.pop())
                running += 1
            tail = running < _TAIL * slots and not waiting
            at = time.process_time()
            ended = engine.step()
            if tail:
                sums.tail_s += time.process_time() - at
                sums.tail_steps += 1
                sums.tail_sample_steps += running
            if tail or (running - len(ended) < _TAIL * slots and not waiting):
                now = engine.unfinished() | {one.id: one.tokens.size for one in ended}
                if tail:
                    sums.tail_tokens += sum(count - made.get(name, 0) for name, count in now.items())
                made |= now
            running -= len(ended)
            answers += ended
        sums.seconds += time.process_time() - began
        if speculation:
            after = speculation.counts()
            sums.drafted += after[0] - before[0]
            sums.accepted += after[1] - before[1]
        for one in answers:
            bits = one.tokens.tobytes() + one.logprobs.tobytes() + one.finish.encode()
            sums.same.append(self._expected.setdefault(one.id, bits) == bits)
        self.nats = -float(np.concatenate([one.logprobs for one in answers]).mean())
        self.longest = max(self.longest, *(one.tokens.size for one in answers))


def _prompts(model: str, groups: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts of the counting task, with how far they count: as long as a ranker would know it."""
    from transformers import AutoTokenizer

    sys.path.insert(0, str(ROOT / "examples"))
    module = importlib.import_module("count_task")
    tokenizer = AutoTokenizer.from_pretrained(model)
    problems = list(module.problems("train"))
    chosen = np.random.default_rng(seed).permutation(len(problems))[:groups]
    return [(tokenizer.encode(problems[n]["prompt"]), int(problems[n]["kind"])) for n in chosen]


def _tail(one: _Sums, off: _Sums) -> dict[str, Any]:
    return {
        "iteration_speedup": round(off.seconds / one.seconds, 3),
        "tail_share": round(one.tail_s / one.seconds, 3),
        "tail_speedup": round(off.tail_s / one.tail_s, 3),
        "tail_seconds": round(one.tail_s, 3),
        "tokens_a_step": round(one.tail_tokens / max(1, one.tail_sample_steps), 3),
        "drafted": one.drafted,
        "accepted": round(one.accepted / max(1, one.drafted), 3),
        "same_bits": float(np.mean(one.same)),
    }


def _print(name: str, found: dict[str, Any]) -> None:
    console = Console(width=130, stderr=True)
    table = Table(title=f"{name}: {found['nats']} nats a token, longest {found['longest']} tokens")
    rows = found["tail"].items()
    for column in ("drafter", *next(iter(found["tail"].values()))):
        table.add_column(column.replace("_", " "), justify="right")
    for drafter, row in rows:
        table.add_row(drafter, *map(str, row.values()))
    console.print(table)
    table = Table(title=f"{name}: constant batches")
    for column in ("batch", "drafter", "speedup", "same bits", "accepted", "drafted"):
        table.add_column(column, justify="right")
    for size, kinds in found["batches"].items():
        for drafter, row in kinds.items():
            table.add_row(str(size), drafter, *map(str, row.values()))
    console.print(table)


if __name__ == "__main__":
    print("RESULT", json.dumps(measure(sys.argv[1], *map(int, sys.argv[2:]))))
