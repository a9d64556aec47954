"""Makes lines of `metrics.jsonl` from records of the ledger."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from producers.ranker.ranker import recall_of_longest
from schemas.messages import Evaluation, StepRecord

MetricRow = dict[str, float | int | None]
_T = TypeVar("_T")


class Thinned(Generic[_T]):
    """Keeps at most `most` of any number of things, evenly: each one, then every second, every fourth, ..."""

    def __init__(self, most: int = 4000) -> None:
        self.kept: list[_T] = []
        self._most, self._every, self._count = most, 1, 0

    def add(self, thing: _T) -> None:
        """Add the next thing."""
        if self._count % self._every == 0:
            if len(self.kept) >= self._most:
                self.kept, self._every = self.kept[::2], 2 * self._every
            if self._count % self._every == 0:
                self.kept.append(thing)
        self._count += 1


def step_row(record: StepRecord) -> MetricRow:
    """Return the row of one optimizer step: figures of its samples, and the trainer's own metrics."""
    rewards = record.rewards[~np.isnan(record.rewards)]
    lengths, staleness = record.lengths, record.version_in - record.versions
    row: MetricRow = {
        "iteration": record.iteration,
        "step": record.step,
        "version": record.version_out,
        "trainer_epoch": record.trainer_epoch,
        "samples": int(record.groups.size),
        "tokens": int(lengths.sum()),
        "reward": _mean(rewards),
        "reward_deviation": float(rewards.std()) if rewards.size else None,
        "rewards_failed": int(record.rewards.size - rewards.size),
        "length": _mean(lengths),
        "length_p50": float(np.median(lengths)) if lengths.size else None,
        "length_max": int(lengths.max(initial=0)),
        "staleness": _mean(staleness),
        "staleness_max": int(staleness.max(initial=0)),
        "finished_at": record.finished_at,
    }
    row |= _ranked(record)
    return row | {name: value for name, value in record.metrics.items() if name not in row}


def _ranked(record: StepRecord) -> MetricRow:
    """Return how well the step's groups were ranked before they were generated; empty if not known."""
    groups, place = np.unique(record.groups, return_inverse=True)
    if not groups.size or record.predicted.size != place.size:
        return {}
    counts = np.bincount(place)
    true = np.bincount(place, lengths := np.maximum(record.lengths, 1)) / counts
    said = np.bincount(place, record.predicted) / counts
    logs = np.bincount(place, np.log(lengths)) / counts
    return {
        "ranker_recall": recall_of_longest(said, true, 0.2),
        "ranker_error": float(np.sqrt(np.mean((np.log(np.maximum(said, 1)) - logs) ** 2))),
    }


def with_rates(rows: list[MetricRow]) -> list[MetricRow]:
    """Add to each row, in place, its samples and tokens a second and its idle share since the step before.

    Each is None where it is not known, as after a new start of the trainer.
    """
    for before, row in zip([None, *rows], rows, strict=False):
        seconds = (row["finished_at"] or 0) - (before["finished_at"] or 0) if before else 0
        usable = before is not None and seconds > 0 and before["trainer_epoch"] == row["trainer_epoch"]
        row["samples_per_s"] = (row["samples"] or 0) / seconds if usable else None
        waited = row.get("waited_s")
        row["idle"] = min(1.0, waited / seconds) if usable and waited is not None else None
        row["tokens_per_s"] = (row["tokens"] or 0) / seconds if usable else None
    return rows


def evaluation_row(record: Evaluation) -> MetricRow:
    """Return the row of one evaluation."""
    rewards = record.rewards[~np.isnan(record.rewards)]
    return {
        "version": record.version,
        "samples": int(record.rewards.size),
        "failed": record.failed,
        "newest": record.newest,
        "reward": _mean(rewards),
        "reward_error": _standard_error(record),
        "length": _mean(record.lengths),
    }


def _standard_error(record: Evaluation) -> float | None:
    """Return the standard error of the mean reward. A problem's samples count as one: they are alike."""
    scored = ~np.isnan(record.rewards)
    if not scored.any():
        return None
    names = np.asarray(record.problem_ids, dtype=object)[scored].tolist()
    _, place = np.unique(names, return_inverse=True)
    means = np.bincount(place, record.rewards[scored]) / np.bincount(place)
    return float(means.std(ddof=1) / np.sqrt(means.size)) if means.size > 1 else None


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None
