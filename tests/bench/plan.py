"""How near a plan comes to real runs of this machine that no profile was made of.

a run and a profile of each task ──► predictions of all trials, written down ──► the trials as runs ──► errors

A trial is a run of the counting example with a mode, slots, lengths, groups, a link and a number of
generators (`_held_out.py`). Of each task there is one run with the run file's own settings, which no trial
has, and a profile with the overheads of that run. A prediction is the one that `streamrl run` prints, with
its range. Where the machine drifts, predict and run the trials of one task at a time (`--lengths`), with the
same files: each prediction is then not much older than its trial.

median_error, worst_error  |predicted / measured - 1| of the throughput
coverage                   share of the trials whose throughput lies in its 90 % interval
same_trial                 by how much two runs of one trial differ, the median: no prediction can be nearer
machine_slower             how many times longer the machine took for the same work of engine and learner
                           (`_fixed_work.py`) after a trial than at its task's profile, the median
median_at_its_speed        median_error if each throughput is multiplied by that, for the trials around it
regret                     time of the number of generators that was predicted to be best, over the best one's
                           of those measured, less 1: the mean of the families
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsspec import asyn
from rich.console import Console
from rich.table import Table
from s3fs import S3FileSystem

from flows.plans.given_split import given_split
from flows.plans.planning_inputs import planning_inputs
from flows.plans.predicted_speed import Prediction
from flows.plans.prediction import prediction_of
from flows.run.start_model import prepare_model
from schemas.loading import load_run_file
from tests.bench._charts import ChartPoint, draw_pairs
from tests.bench._fixed_work import FixedWork, fixed_work
from tests.bench._held_out import GENERATORS, LENGTHS, PLAIN, Trial, families, measured, task_settings
from tests.bench._link import Link, two_sites
from tests.bench._runs import ROOT, RUNFILE, finish, own_stack, start

_AROUND = 2  # trials before and after one: the machine's speed is the median of theirs
_FIXED_WORK = "fixed work, seconds"  # an entry of both files


@dataclass(frozen=True)
class _Tried:
    trial: Trial
    predicted: Prediction
    rate: float
    slower: float  # the machine was so many times slower than at the profiles

    @property
    def error(self) -> float:
        return abs(self.predicted.samples_per_s.value / self.rate - 1)

    @property
    def error_at_its_speed(self) -> float:
        return abs(self.predicted.samples_per_s.value / (self.rate * self.slower) - 1)

    @property
    def inside(self) -> bool:
        return self.predicted.samples_per_s.low <= self.rate <= self.predicted.samples_per_s.high


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench plan", description=__doc__)
    parser.add_argument("--trials", type=int, default=8 if quick else 42)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--lengths", choices=LENGTHS, help="only trials of the task with these lengths")
    parser.add_argument("--predictions", type=Path, help="a file to take them from, or to write")
    parser.add_argument("--only-predict", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, help="a file that each trial's samples/s are written to")
    parser.add_argument("--again", type=int, default=0 if quick else 6, help="so many trials run once more")
    parser.add_argument("--draw", type=Path, help="draw predictions and measurements into this file")
    given = parser.parse_args(argv)
    os.environ.setdefault("STREAMRL_HOME", str(ROOT / ".streamrl"))  # the warm-started model is built once
    console = Console(stderr=True)
    count = -(-given.trials // len(GENERATORS))
    drawn = [Trial(one, many) for one in families(count, given.seed) for many in GENERATORS][: given.trials]
    drawn = [one for one in drawn if given.lengths in (None, one.family.lengths)]
    spec = load_run_file(str(RUNFILE), [])
    model = prepare_model(spec, lambda share, text: None)
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        work = stack.enter_context(fixed_work(spec, model, folder))
        said = _Predictions(given.predictions)
        for lengths in LENGTHS:
            if mine := [one for one in drawn if one.family.lengths == lengths and one.name not in said.rows]:
                said.add(lengths, *_predictions(mine, folder, console, work))
        predictions = {one: said.of(one) for one in drawn}
        if given.only_predict:
            return {one.name: p.samples_per_s.value for one, p in predictions.items()}
        results = _Results(given.results)
        again = drawn[:: max(1, len(drawn) // given.again)][: given.again] if given.again else []
        for times, some in enumerate((drawn, again), start=1):
            left = [one for one in some if len(results.rates.get(one.name, ())) < times]
            _run(left, folder, console, results, work)
    around = results.around()
    tried = [
        _Tried(
            one, predictions[one], results.rates[one.name][0],
            around[one.name] / statistics.median(said.work_s[one.family.lengths]),
        )
        for one in drawn
    ]  # fmt: skip
    console.print(_table(tried))
    if given.draw:
        _draw(tried, given.draw)
    errors = [one.error for one in tried]
    return {
        "trials": len(tried), "median_error": statistics.median(errors), "worst_error": max(errors),
        "coverage": statistics.mean(one.inside for one in tried), "regret": _regret(tried),
        "same_trial": results.same_trial, "machine_slower": statistics.median(one.slower for one in tried),
        "median_at_its_speed": statistics.median(one.error_at_its_speed for one in tried),
    }  # fmt: skip


class _Predictions:
    """Predictions by trial, and the seconds of fixed work at the profile of each task; also in a file."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.rows: dict[str, Any] = json.loads(file.read_text()) if file and file.exists() else {}
        self.work_s: dict[str, list[float]] = self.rows.pop(_FIXED_WORK, {})

    def add(self, lengths: str, found: dict[Trial, Prediction], work_s: list[float]) -> None:
        self.rows |= {one.name: asdict(said) for one, said in found.items()}
        self.work_s[lengths] = work_s
        if self._file:
            self._file.write_text(json.dumps({_FIXED_WORK: self.work_s} | self.rows, indent=1) + "\n")

    def of(self, trial: Trial) -> Prediction:
        return Prediction.read(json.dumps(self.rows[trial.name]))


class _Results:
    """Samples a second by trial, and the seconds of fixed work after it, in a file after each of them.

    An hour's work may be cut off: with the same file it goes on after the trials that are in it.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.rates: dict[str, list[float]] = {}
        self._work_s: list[tuple[str, float]] = []
        if file is not None and file.exists():
            told = json.loads(file.read_text())
            self.rates = told["samples a second"]
            self._work_s = [(name, seconds) for name, seconds in told[_FIXED_WORK]]

    def add(self, name: str, rate: float, work_s: float) -> None:
        self.rates.setdefault(name, []).append(rate)
        self._work_s.append((name, work_s))
        if self._file is not None:
            told = {"samples a second": self.rates, _FIXED_WORK: self._work_s}
            self._file.write_text(json.dumps(told, indent=1) + "\n")

    def around(self) -> dict[str, float]:
        """Return the seconds of fixed work around each trial, when it was run first."""
        every = [seconds for _, seconds in self._work_s]
        found: dict[str, float] = {}
        for number, (name, _) in enumerate(self._work_s):
            near = every[max(0, number - _AROUND) : number + _AROUND + 1]
            found.setdefault(name, statistics.median(near))
        return found

    @property
    def same_trial(self) -> float | None:
        """By how much two runs of a trial differ, as a share; None if none was run twice."""
        found = [abs(twice[1] / twice[0] - 1) for twice in self.rates.values() if len(twice) > 1]
        return statistics.median(found) if found else None


def _predictions(
    drawn: Sequence[Trial], folder: Path, console: Console, work: FixedWork
) -> tuple[dict[Trial, Prediction], list[float]]:
    """Predict the trials of one task from a profile of it, made with the run file's own settings.

    Also return the seconds of fixed work before and after the profile.
    """
    work_s: list[float] = []
    lengths = drawn[0].family.lengths
    console.print(f"run and profile of the task {lengths} …")
    profile = _profiled(lengths, folder, work, work_s)
    found = {}
    for trial in drawn:
        spec = load_run_file(str(RUNFILE), trial.settings(folder))
        inputs = planning_inputs(spec, runfile=str(RUNFILE), profile=profile)
        said = prediction_of(inputs, given_split(inputs))
        if said is None:
            raise RuntimeError(f"nothing can be predicted of {trial.name}")
        found[trial] = said
        console.print(f"{trial.name}: {said.words}")
    return found, work_s


def _profiled(lengths: str, folder: Path, work: FixedWork, work_s: list[float]) -> Path:
    file = folder / f"{lengths}.yaml"
    reports = folder / f"of-{lengths}"
    plain = [*task_settings(lengths, folder), f"algorithm.iterations={PLAIN}", f"report={reports}"]
    with own_stack() as stack:
        finish(start(str(RUNFILE), plain, stack), stack)
    settings = [part for one in task_settings(lengths, folder) for part in ("--set", one)]
    words = [
        sys.executable, "-m", "flows.cli", "profile", str(RUNFILE), "-o", str(file), *settings,
        "--set", f"report={reports}",
    ]  # fmt: skip
    work_s.append(work.seconds())
    subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    work_s.append(work.seconds())
    return file


def _run(drawn: Sequence[Trial], folder: Path, console: Console, results: _Results, work: FixedWork) -> None:
    """Run trials, those with the same link one after the other."""
    for mbit in sorted({one.family.mbit for one in drawn}):
        with _linked(mbit) as link, own_stack(s3=bool(mbit)) as stack:
            os.environ |= stack.s3.env() if stack.s3 else {}
            for trial in (one for one in drawn if one.family.mbit == mbit):
                rate = measured(trial, stack, folder, link)
                results.add(trial.name, rate, work.seconds())
                console.print(f"{trial.name}: {rate:.0f} samples/s")


@contextmanager
def _linked(mbit: int) -> Iterator[Link | None]:
    if not mbit:
        yield None
        return
    with two_sites(mbit * 1e6 / 8) as link:
        # s3fs works in a thread, and a thread stays in the network in which it began.
        S3FileSystem.clear_instance_cache()
        asyn.iothread[0] = asyn.loop[0] = None
        os.environ["STREAMRL_LISTEN"] = link.near_address
        try:
            yield link
        finally:
            del os.environ["STREAMRL_LISTEN"]


def _regret(tried: Sequence[_Tried]) -> float:
    """Return how much longer the predicted best of a family takes than its best: a mean over families."""
    found = []
    for family in {one.trial.family for one in tried}:
        mine = [one for one in tried if one.trial.family == family]
        if len(mine) == len(GENERATORS):
            chosen = max(mine, key=lambda one: one.predicted.samples_per_s.value)
            found.append(max(one.rate for one in mine) / chosen.rate - 1)
    return statistics.mean(found) if found else float("nan")


def _draw(tried: Sequence[_Tried], file: Path) -> None:
    points = [
        ChartPoint(one.rate, said.value, said.low, said.high)
        for one in tried for said in [one.predicted.samples_per_s]
    ]  # fmt: skip
    title = "Held-out runs: samples a second, with the range of nine in ten"
    draw_pairs(file, title, {"a trial": points}, "measured", "predicted")


def _table(tried: Sequence[_Tried]) -> Table:
    table = Table("trial", "predicted", "range", "measured", "error")
    for one in tried:
        rate = one.predicted.samples_per_s
        table.add_row(
            one.trial.name, f"{rate.value:.0f}", f"{rate.low:.0f} to {rate.high:.0f}", f"{one.rate:.0f}",
            f"{rate.value / one.rate - 1:+.1%}", style="" if one.inside else "red",
        )  # fmt: skip
    return table
