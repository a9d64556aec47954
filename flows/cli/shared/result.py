"""Prints the result of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from flows.page.page_file import PAGE_FILE
from flows.run.request import RunResult
from flows.view.live import number, share, tiny

if TYPE_CHECKING:
    from flows.plans.predicted_speed import Prediction


def show_result(console: Console, result: RunResult, prediction: Prediction | None = None) -> None:
    """Print the rewards before and after, time and other figures of the run, and where the report is.

    `prediction`: of the run's speed; it is printed beside the measured one.
    """
    summary = result.summary
    if summary["result"]:
        table = Table("held-out reward", "problems", "before", "after", "gain", title=f"run {result.run}")
        for row in summary["result"]:
            error = row.get("gain_error")
            gain = f"{row['gain']:+.3f}" + (f" ± {error:.3f}" if error is not None else "")
            table.add_row(
                row["what"], str(row["problems"]), number(row["before"], 3), number(row["after"], 3), gain
            )
        console.print(table)
    else:
        first, last = number(summary["reward_first"], 3), number(summary["reward_last"], 3)
        steps = f"only step {first}" if summary["steps"] == 1 else f"first step {first}, of the last {last}"
        console.print(
            f"run {result.run}: reward of the {steps} (evaluation.problems compares more)", highlight=False
        )
    many = "1 iteration" if summary["iterations"] == 1 else f"{summary['iterations']} iterations"
    facts = [f"{many}, {summary['samples']} samples"]
    if summary["samples_per_s"] is not None:  # it takes two steps to measure
        facts.append(f"{number(summary['training_s'], 0)} s, {number(summary['samples_per_s'], 0)} samples/s")
    facts += [
        f"staleness {number(summary['staleness'], 2)}, at most {summary['staleness_max']}",
        f"logprob gap {tiny(summary['logprob_gap'])}",
        f"idle: trainer {share(summary['trainer_idle'])}, generators {share(summary['generator_idle'])}",
    ]
    console.print("; ".join(facts), highlight=False)
    if prediction is not None and summary["samples_per_s"]:
        console.print(
            prediction.beside(summary["samples_per_s"]), highlight=False, markup=False, soft_wrap=True
        )
    for line in _about_rewards(summary):
        console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if summary["dead_letters"]:
        reasons = "; ".join(summary["dead_letter_reasons"])
        console.print(
            f"{summary['dead_letters']} dead letters: {reasons}",
            style="yellow",
            highlight=False,
            markup=False,
        )
    console.print(f"report: {result.report}", highlight=False, soft_wrap=True)
    page = result.report / PAGE_FILE
    if page.is_file():
        console.print(f"page: {page}", highlight=False, soft_wrap=True)


def _about_rewards(summary: dict[str, Any]) -> Iterator[str]:
    """Yield what was wrong with the rewards of a run."""
    if failed := summary["rewards_failed"]:
        yield f"{failed} of {summary['samples']} samples had no reward"
    if none := summary.get("steps_without_gradient"):
        last = summary["steps_without_gradient_at_end"]
        at_end = f", {last} of them at the end" if last else ""
        yield f"{none} of {summary['steps']} steps had no gradient{at_end}, and left the weights as they were"
    yield from summary.get("told", ())
