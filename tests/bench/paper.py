"""The StreamRL paper's results from its hardware, models and lengths, figure by figure, and beyond.

Nothing is run on a GPU: stages come from the roofline, samples from the paper's histogram. Two constants are
fitted, on eight figures at 20K (Figure 8's six ratios, Figure 10's two shares): `--fit` prints that grid.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.bench._charts import ChartPoint, draw_pairs
from tests.bench._paper_figures import GPUS, LONGEST, MODELS, THROUGHPUT
from tests.bench._paper_ours import OurCell, ours
from tests.bench._paper_rows import ALL, H800, PaperRow, absolute, end_to_end, scaling, splits, step_curve
from tests.bench._paper_stages import Stages
from tests.bench._paper_systems import colocated_s

LAYER_S = 100e-6  # fitted: what a step of decoding takes for each layer besides its bytes and FLOPs
MFU = 0.4  # fitted: the share of the FLOPs that training reaches
_GRID = ((60e-6, 80e-6, 100e-6, 120e-6), (0.2, 0.25, 0.3, 0.35, 0.4, 0.45))


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench paper")
    parser.add_argument("--fit", action="store_true", help="fit the two constants, and print how well all do")
    parser.add_argument("--draws", type=int, default=1 if quick else 3, help="of an iteration's lengths")
    parser.add_argument("--draw", type=Path, help="draw the paper's ratios and ours into this file")
    given = parser.parse_args(argv)
    seeds = tuple(range(given.draws))
    console = Console(width=120)
    if given.fit:
        return _fit(seeds, console)
    stages = _stages(LAYER_S, seeds)
    rows = [row for figure in ALL for row in figure(stages)]
    _print(console, "ratios", rows)
    if given.draw:
        _draw(rows, given.draw)
    checks = {"scaling": scaling(stages), "step": step_curve(), "seconds": absolute(stages)}
    for name, checked in checks.items():
        _print(console, f"not counted: {name}", checked)
    policy, shares = ("longest_first", (0.375, 0.5)) if quick else ("deadline", (0.25, 0.375, 0.5, 0.625))
    beyond = _beyond(stages, LONGEST[2:] if quick else LONGEST, policy, shares, console)
    return {
        **_errors(rows),
        "figure_8": _errors([row for row in rows if row.figure == "8"]),
        "rows": len(rows),
        "fitted": {"layer_s": LAYER_S, "mfu": MFU},
        **{f"{name}_median_error": _errors(checked)["median_error"] for name, checked in checks.items()},
        "beyond_paper": beyond,
    }


def _stages(layer_s: float, seeds: Sequence[int], mfu: float = MFU) -> dict[str, Stages]:
    return {model: Stages(model, layer_s, mfu, seeds) for model in MODELS}


def _errors(rows: Sequence[PaperRow]) -> dict[str, float]:
    errors = np.abs([row.error for row in rows])
    return {
        "median_error": round(float(np.median(errors)), 3), "worst_error": round(float(errors.max()), 3),
        "within_10": round(float((errors <= 0.1).mean()), 3),
    }  # fmt: skip


def _print(console: Console, title: str, rows: Sequence[PaperRow]) -> None:
    table = Table(title=title)
    for column in ("figure", "row", "paper", "ours", "error"):
        table.add_column(column)
    for row in rows:
        digits = 1 if row.paper > 10 else 2
        table.add_row(
            row.figure, row.name, f"{row.paper:.{digits}f}", f"{row.ours:.{digits}f}", f"{row.error:+.1%}"
        )
    console.print(table)


def _draw(rows: Sequence[PaperRow], file: Path) -> None:
    """Draw each ratio. Counts of GPUs, which are far larger, are left out."""
    shown = {"8": "Figure 8", "T3": "Table 3", "9": "Figure 9", "10": "Figure 10", "12": "Figure 12"}
    kinds = {
        name: [ChartPoint(row.paper, row.ours) for row in rows if row.figure == figure]
        for figure, name in shown.items()
    }
    draw_pairs(file, "The paper's ratios, row by row", kinds, "the paper's", "ours")


def _fit(seeds: Sequence[int], console: Console) -> dict[str, Any]:
    table, found = Table(title="fitted at 20K, judged on all"), []
    for column in ("layer_s", "MFU", "rms at 20K", "median of all", "worst", "within 10 %"):
        table.add_column(column)
    for layer_s in _GRID[0]:
        stages = _stages(layer_s, seeds)
        for mfu in _GRID[1]:
            for one in stages.values():
                one.mfu = mfu
            near = [*end_to_end(stages, (20_000,)), *[row for row in splits(stages) if "share" in row.name]]
            rms = float(np.sqrt(np.mean([np.log1p(row.error) ** 2 for row in near])))
            judged = _errors([row for figure in ALL for row in figure(stages)])
            found.append((rms, layer_s, mfu))
            table.add_row(
                f"{layer_s * 1e6:.0f} µs",
                f"{mfu:.2f}",
                f"{rms:.3f}",
                *(f"{judged[key]:.3f}" for key in judged),
            )
    console.print(table)
    rms, layer_s, mfu = min(found)
    return {"layer_s": layer_s, "mfu": mfu, "rms": round(rms, 3)}


def _beyond(
    stages: Mapping[str, Stages],
    lengths: Sequence[int],
    policy: str,
    shares: Sequence[float],
    console: Console,
) -> dict[str, dict[str, float]]:
    """Set our own scheduling, deltas and balancing beside the paper's systems, all over ColocationRL."""
    table, found = Table(title="beyond the paper: samples/s over ColocationRL"), {}
    for column in ("cell", "Sync, paper", "ours, sync", "Async, paper", "ours, async", "GPUs that generate"):
        table.add_column(column)
    for longest, model in itertools.product(lengths, MODELS):
        base = colocated_s(stages[model], H800, GPUS[model], longest, "random")
        cells: dict[str, OurCell] = {
            mode: ours(stages[model], H800, GPUS[model], longest, policy, mode, shares)
            for mode in ("sync", "async")
        }
        colocated, sync, asynchronous = THROUGHPUT[model, longest]
        row = {mode: round(base / cell.seconds, 2) for mode, cell in cells.items()}
        name = f"{model}, {longest // 1000}K"
        found[name] = row | {"over_paper": round(row["async"] / (asynchronous / colocated), 2)}
        table.add_row(
            name, f"{sync / colocated:.2f}", f"{row['sync']:.2f}", f"{asynchronous / colocated:.2f}",
            f"{row['async']:.2f}", f"{cells['async'].generating} (TP {cells['async'].devices})",
        )  # fmt: skip
    console.print(table)
    return found
