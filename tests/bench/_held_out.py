"""Runs of the counting example that differ in what decides their throughput, and how fast each really was.

A trial is a setting: mode and staleness, slots, lengths, groups, a link to the generators' site, and how many
generators. Those that differ in the last alone are a family: the splits that a plan can choose from. All are
drawn from one seed, before anything is measured.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from examples.count_task import LONGEST, draw_count, draw_word, make_answer, make_prompt
from infra.bus import read_all
from infra.runs import runs_of
from infra.stack import local
from infra.stores.opening import open_store
from schemas.messages import StepRecord
from schemas.topics import Topics
from schemas.wire import decode
from tests.bench._link import DELAY_S, Link
from tests.bench._runs import ROOT, RUNFILE, bus_of, finish, start

GENERATORS = (1, 2, 3)  # of a family
# Iterations of a run: those that count, and those before and after that do not. At a run's end nothing is
# drawn ahead any more, so that the last iterations are quicker than all others.
WARM, COUNTED, LAST = 8, 16, 3
PLAIN = 40  # iterations of the run that tells the overheads of a task
_PROBLEMS = 4096
_RATE = 1e-7  # of learning: so little that lengths stay as they are, while each weight changes
_START_S = 300.0
_MODES = {
    "sync": ("algorithm.mode=sync", "algorithm.staleness=0"),
    "async 1": ("algorithm.mode=async", "algorithm.staleness=1"),
    "async 2": ("algorithm.mode=async", "algorithm.staleness=2"),
    "arrival 2": ("algorithm.mode=async", "algorithm.staleness=2", "algorithm.order=arrival"),
}
LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "tail": draw_count,
    "even": lambda rng: rng.randint(1, LONGEST // 2),
    "two": lambda rng: rng.randint(50, LONGEST) if rng.random() < 0.15 else rng.randint(1, 4),
}


@dataclass(frozen=True)
class Family:
    """A setting, but for the number of generators."""

    mode: str
    slots: int
    lengths: str
    groups: int
    mbit: int  # a second, to the generators' site; 0: they are beside the trainer


@dataclass(frozen=True)
class Trial:
    """One setting."""

    family: Family
    generators: int

    @property
    def name(self) -> str:
        """Its name in tables."""
        one = self.family
        link = f", {one.mbit} Mbit/s" if one.mbit else ""
        return f"{one.mode}, {self.generators} × {one.slots}, {one.lengths}, {one.groups} groups{link}"

    def settings(self, folder: Path) -> list[str]:
        """Return the run file's settings."""
        one, place = self.family, [f"placement.generators={self.generators}"]
        if one.mbit:
            place = [
                "placement.generators=0", f"placement.sites.far.generators={self.generators}",
                f"placement.sites.far.link_gbit_s={one.mbit / 1000}",
                f"placement.sites.far.link_latency_ms={2000 * DELAY_S}",
            ]  # fmt: skip
        return [
            *_MODES[one.mode], *place, f"generator.slots={one.slots}", f"algorithm.groups={one.groups}",
            f"algorithm.iterations={WARM + COUNTED + LAST}", *task_settings(one.lengths, folder),
        ]  # fmt: skip


def families(count: int, seed: int) -> list[Family]:
    """Draw settings; each value of each is about as frequent."""
    rng = random.Random(seed)
    choices: list[list[Any]] = [[*_MODES], [16, 64, 256], [*LENGTHS], [32, 64], [0, 0, 0, 100, 0, 20]]
    decks: list[list[Any]] = [[] for _ in choices]
    found: list[Family] = []
    while len(found) < count:
        for deck, values in zip(decks, choices, strict=True):
            if not deck:
                deck += rng.sample(values, len(values))
        drawn = Family(*(deck.pop() for deck in decks))
        if drawn not in found:
            found.append(drawn)
    return found


def task_settings(lengths: str, folder: Path) -> list[str]:
    """Return the settings of a task with one distribution of lengths. Its problems are written if need be."""
    file = folder / f"{lengths}.jsonl"
    if not file.exists():
        file.write_text("".join(json.dumps(one) + "\n" for one in _problems(lengths)))
    return [
        f"algorithm.learning_rate={_RATE}", "evaluation.problems=0", "task.python=null", f"task.jsonl={file}",
        f"task.reward={ROOT}/examples/count_task.py:reward", f"report={folder}/runs",
    ]  # fmt: skip


def _problems(lengths: str) -> Iterator[dict[str, str]]:
    rng = random.Random(lengths)
    for number in range(_PROBLEMS):
        count, word = LENGTHS[lengths](rng), draw_word(rng)
        yield {
            "id": f"{lengths}-{number:05d}", "prompt": make_prompt(count, word),
            "answer": make_answer(count, word), "kind": f"{count:02d}",
        }  # fmt: skip


def measured(trial: Trial, stack: local.Stack, folder: Path, link: Link | None) -> float:
    """Run it; return samples a second, of the iterations that count."""
    settings, store = trial.settings(folder), f"file://{stack.paths.home}/store"
    if link is not None:
        assert stack.s3 is not None, "the far site reads weights over the link"
        store = f"{stack.s3.url}/held-out"
        settings += [f"placement.store={store}", "placement.sites.far.elsewhere=true"]
    before = set(runs_of(open_store(store)))
    flow = start(str(RUNFILE), settings, stack)
    with ExitStack() as ended:
        ended.callback(_end, flow)
        if link is not None:
            new = _new_run(flow, stack, store, before)
            ended.callback(_end, _joined(link, stack, folder, store, new))
        run = finish(flow, stack, store)
    bus, topics = bus_of(stack), Topics(run.id, run.spec.lengths.classes)
    try:
        steps = [decode(one.value, StepRecord) for one in read_all(bus, topics.ledger, deadline_s=60)]
    finally:
        bus.close()
    return counted_rate([(step.iteration, step.finished_at, step.groups.size) for step in steps])


def _end(process: subprocess.Popen[bytes] | psutil.Popen) -> None:
    with suppress(psutil.NoSuchProcess):  # it has ended
        process.terminate()
    process.wait()


def _new_run(flow: psutil.Popen, stack: local.Stack, store: str, before: set[str]) -> str:
    """Return the id of the run that was started, as soon as there is one."""
    until = time.monotonic() + _START_S
    while not (new := set(runs_of(open_store(store))) - before):
        if flow.poll() is not None:
            finish(flow, stack, store)  # raises with what it said
        if time.monotonic() > until:
            raise RuntimeError(f"no run within {_START_S:.0f} s")
        time.sleep(0.2)
    return new.pop()


def _joined(link: Link, stack: local.Stack, folder: Path, store: str, run: str) -> subprocess.Popen[bytes]:
    """Start the generators at the far site."""
    words = [sys.executable, "-m", "flows.cli", "join", run, "--store", store, "--site", "far"]
    env = {**os.environ, **stack.env(), "STREAMRL_HOME": str(folder / "far")}
    with (folder / "far.log").open("ab") as log:
        return subprocess.Popen(link.at_far(words), cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)


def counted_rate(steps: list[tuple[int, float, int]]) -> float:
    """Return samples a second, of (iteration, when it ended, samples) of each step."""
    begun = max(ended for iteration, ended, _ in steps if iteration < WARM)
    counted = [(end, samples) for iteration, end, samples in steps if 0 <= iteration - WARM < COUNTED]
    return sum(samples for _, samples in counted) / (max(ended for ended, _ in counted) - begun)
