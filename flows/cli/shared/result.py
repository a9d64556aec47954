"""Prints the result of a run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from flows.run.request import RunResult
from flows.view.live import number, share, tiny


def show_result(console: Console, result: RunResult) -> None:
    """Print the rewards before and after, time and other figures of the run, and where the report is."""
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
        console.print(
            f"run {result.run}: reward of the first step {number(summary['reward_first'], 3)}, "
            f"of the last {number(summary['reward_last'], 3)} (evaluation.problems compares more)",
            highlight=False,
        )
    facts = [
        f"{summary['iterations']} iterations, {summary['samples']} samples",
        f"{number(summary['training_s'], 0)} s, {number(summary['samples_per_s'], 0)} samples/s",
        f"staleness {number(summary['staleness'], 2)}, at most {summary['staleness_max']}",
        f"logprob gap {tiny(summary['logprob_gap'])}",
        f"idle: trainer {share(summary['trainer_idle'])}, generators {share(summary['generator_idle'])}",
    ]
    console.print("; ".join(facts), highlight=False)
    if summary["rewards_failed"]:
        console.print(f"{summary['rewards_failed']} samples had no reward", style="yellow", highlight=False)
    if summary["dead_letters"]:
        reasons = "; ".join(summary["dead_letter_reasons"])
        console.print(
            f"{summary['dead_letters']} dead letters: {reasons}",
            style="yellow",
            highlight=False,
            markup=False,
        )
    console.print(f"report: {result.report}", highlight=False, soft_wrap=True)
