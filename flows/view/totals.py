"""Sums over the steps of a run. The steps themselves are not held."""

from __future__ import annotations

from typing import Any


class Totals:
    """Sums over the lines of `metrics.jsonl`. Rates leave out the time in which no trainer ran."""

    def __init__(self) -> None:
        self._iterations, self._last_iteration, self._steps = 0, -1, 0
        self._no_gradient = self._no_gradient_last = 0  # steps; those at the end in a row
        self._samples = self._tokens = self._failed = self._stalest = 0
        self._seconds = self._timed_samples = self._timed_tokens = self._waited = self._staleness = 0.0
        self._gap: float | None = None
        self._first: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None

    def add(self, row: dict[str, Any]) -> None:
        """Add the line of the next step."""
        samples, tokens = row.get("samples") or 0, row.get("tokens") or 0
        self._first, self._last = self._first or row, row
        if (iteration := row.get("iteration") or 0) > self._last_iteration:
            self._iterations, self._last_iteration = self._iterations + 1, iteration
        self._steps += 1
        self._samples, self._tokens = self._samples + samples, self._tokens + tokens
        self._failed += row.get("rewards_failed") or 0
        skipped = bool(row.get("skipped"))
        self._no_gradient += skipped
        self._no_gradient_last = self._no_gradient_last + 1 if skipped else 0
        self._staleness += (row.get("staleness") or 0) * samples
        self._stalest = max(self._stalest, row.get("staleness_max") or 0)
        if row.get("gap_tokens", row.get("logprob_gap")):
            self._gap = max(self._gap or 0.0, row.get("logprob_gap") or 0.0)
        if rate := row.get("samples_per_s"):
            self._seconds += samples / rate
            self._timed_samples, self._timed_tokens = (
                self._timed_samples + samples,
                self._timed_tokens + tokens,
            )
            self._waited += (row.get("idle") or 0) * samples / rate

    def summary(self) -> dict[str, Any]:
        """Return the figures for `summary.json`."""
        seconds = self._seconds
        return {
            "iterations": self._iterations,
            "steps": self._steps,
            "samples": self._samples,
            "tokens": self._tokens,
            "rewards_failed": self._failed,
            "steps_without_gradient": self._no_gradient,
            "steps_without_gradient_at_end": self._no_gradient_last,
            "training_s": seconds,
            "samples_per_s": self._timed_samples / seconds if seconds else None,
            "tokens_per_s": self._timed_tokens / seconds if seconds else None,
            "staleness": self._staleness / max(1, self._samples),
            "staleness_max": self._stalest,
            "logprob_gap": self._gap,
            "trainer_idle": self._waited / seconds if seconds else None,
            "reward_first": self._first["reward"] if self._first else None,
            "reward_last": self._last["reward"] if self._last else None,
        }
