"""Speculation in vLLM: the same samples with and without drafts, side by side in one engine.

An iteration of the counting task, on one generator with the demo's slots: its seconds, those of its tail (the
last quarter of the slots, with nothing waiting), tokens a step and accepted drafts there, and the share of
samples with the same bits. In the second epoch the same prompts have come before. Then small batches of
constant size, in which a group's samples are made one after the other.

All by how far the model is trained: one that has learned to count is nearly sure of each token, and drafts
are right more often than in chains of thought. So `nats` says how sure the model is: the mean of -log π of
the drawn tokens. Seconds are processor time, since others use the machine, too.
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
from tests.bench._own_process import result_of
from tests.bench._runs import ROOT, RUNFILE

_TAIL = 0.25  # of the slots, as generators report it
_BATCHES = (1, 4, 16, 64)
_DRAFTERS = ("off", "ngram", "history")
_HALF_TRAINED = 100  # steps of the warm start, of the demo's 500


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench speculation")
    parser.add_argument("--rounds", type=int, default=3 if quick else 7, help="each with other seeds")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--seed", type=int, default=11)
    given = parser.parse_args(argv)
    os.environ.setdefault("STREAMRL_HOME", str(ROOT / ".streamrl"))
    result = {}
    for name, model in _models(quick):
        result[name] = result_of(
            "speculation", str(model), *map(str, (given.groups, given.rounds, given.seed))
        )
        _print(name, result[name])
    return result


def _models(quick: bool) -> Iterator[tuple[str, Path]]:
    """Yield models from untrained to trained, each built once; in haste not the untrained one."""
    folder = Path(os.environ["STREAMRL_HOME"]) / "models"
    for name, steps in (("untrained", 0), ("half trained", _HALF_TRAINED))[quick:]:
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


_Round = dict[str, _Sums]  # by drafter
_Prompt = tuple[list[int], int]  # with its number


def measure(model: str, groups: int, rounds: int, seed: int) -> dict[str, Any]:
    """Measure one model, in a process of its own."""
    bench = _Bench(model, groups)
    bench.iteration(seed - 1, epoch=0, turn=0)  # warms up
    first, second = list[_Round](), list[_Round]()
    for number in range(rounds):
        first.append(bench.iteration(seed + number, epoch=0, turn=number))
        second.append(bench.iteration(seed + number, epoch=1, turn=number))
    found: dict[str, Any] = {
        "nats": round(bench.nats, 3),
        "longest": bench.longest,
        "tail": {},
        "batches": {},
    }
    for name in _DRAFTERS[1:]:
        for epoch, its in (("first epoch", first), ("second epoch", second)):
            found["tail"][f"{name}, {epoch}"] = _tail(name, its)
    for size in _BATCHES:
        found["batches"][size] = bench.constant(size, 1000 * (seed + size), rounds)
    return found


class _Bench:
    """One engine, and a drafter of each kind that is put into it in turn."""

    def __init__(self, model: str, groups: int) -> None:
        from producers.engines.history_drafter import HistoryDrafter
        from producers.engines.measured_steps import measure_steps
        from producers.engines.speculation import Speculation
        from producers.engines.vllm_in_process import VllmEngine
        from tests.bench._ngram_drafter import NgramDrafter

        self._spec = spec = load_run_file(RUNFILE)
        self._engine = engine = VllmEngine(
            model, slots=spec.generator.slots, max_model_len=spec.longest_sample, kv_cache_mib=256
        )
        measure_steps(engine, spec.generator.slots)
        self._kinds: dict[str, Any] = {"off": None}
        for name, make in (("ngram", NgramDrafter), ("history", HistoryDrafter)):
            made = Speculation(engine._runner, engine._scheduler, engine._sampler, make())
            made.learn(engine.pace())
            self._kinds[name] = made
        self._groups, self._problems = groups, _problems(model)
        self._expected: dict[str, bytes] = {}
        self._logprobs = list[np.ndarray]()
        self.longest = 0

    @property
    def nats(self) -> float:
        """The mean of -log π of all tokens so far."""
        return -float(np.concatenate(self._logprobs).mean())

    def iteration(self, seed: int, *, epoch: int, turn: int) -> _Round:
        """Make all samples of an iteration, with each drafter in turn. Other seeds have other prompts."""
        size = self._spec.algorithm.group_size
        requests = self._requests(self._drawn(seed), size, seed + 1_000_000 * epoch)
        return self._in_turn(requests, len(requests), turn)

    def constant(self, size: int, seed: int, rounds: int) -> dict[str, Any]:
        """Make samples of the prompts with the longest answers, so many at once."""
        its = list[_Round]()
        for number in range(rounds):
            prompts = sorted(self._drawn(seed + number), key=lambda one: -one[1])[: max(2, size // 4)]
            its.append(self._in_turn(self._requests(prompts, 8, seed + number), size, number))
        return {
            name: {
                "speedup": _ratio(its, name, lambda one: one.seconds),
                "same_bits": float(np.mean([same for one in its for same in one[name].same])),
                **_drafts(its, name),
            }
            for name in _DRAFTERS[1:]
        }

    def _drawn(self, seed: int) -> list[_Prompt]:
        chosen = np.random.default_rng(seed).permutation(len(self._problems))[: self._groups]
        return [self._problems[number] for number in chosen]

    def _requests(self, prompts: Sequence[_Prompt], size: int, seed: int) -> list[Any]:
        """Return requests for groups of so many samples. The longest come first, as a ranker would say."""
        from producers.engines.engine import SampleRequest

        return [
            SampleRequest(
                f"{seed}:{group}:{index}", prompt, self._spec.sampling.max_tokens,
                (seed << 24) + 256 * group + index, float(length),
            )
            for group, (prompt, length) in enumerate(prompts) for index in range(size)
        ]  # fmt: skip

    def _in_turn(self, requests: Sequence[Any], at_once: int, turn: int) -> _Round:
        """Make the samples with each drafter; which one is first depends on the turn."""
        found: _Round = {}
        for name in np.roll(_DRAFTERS, turn).tolist():
            self._run(name, requests, at_once, found.setdefault(name, _Sums()))
        return found

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
        self._logprobs.append(np.concatenate([one.logprobs for one in answers]))
        self.longest = max(self.longest, *(one.tokens.size for one in answers))


def _problems(model: str) -> list[_Prompt]:
    """Return all prompts of the counting task, with how far they count."""
    from transformers import AutoTokenizer

    sys.path.insert(0, str(ROOT / "examples"))
    module = importlib.import_module("count_task")
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [(tokenizer.encode(one["prompt"]), int(one["kind"])) for one in module.problems("train")]


def _ratio(its: Sequence[_Round], name: str, seconds: Callable[[_Sums], float]) -> float:
    """Return how much faster a drafter made it than none: the median of the rounds."""
    return round(float(np.median([seconds(one["off"]) / seconds(one[name]) for one in its])), 3)


def _drafts(its: Sequence[_Round], name: str) -> dict[str, Any]:
    drafted = sum(one[name].drafted for one in its)
    accepted = sum(one[name].accepted for one in its)
    return {"accepted": round(accepted / drafted, 3) if drafted else None, "drafted": drafted}


def _tail(name: str, its: Sequence[_Round]) -> dict[str, Any]:
    tokens = sum(one[name].tail_tokens for one in its)
    return {
        "iteration_speedup": _ratio(its, name, lambda one: one.seconds),
        "tail_speedup": _ratio(its, name, lambda one: one.tail_s),
        "fewer_tail_steps": round(
            sum(1 - one[name].tail_steps / one["off"].tail_steps for one in its) / len(its), 3
        ),
        "tokens_a_step": round(tokens / max(1, sum(one[name].tail_sample_steps for one in its)), 3),
        **_drafts(its, name),
        "same_bits": float(np.mean([same for one in its for same in one[name].same])),
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
