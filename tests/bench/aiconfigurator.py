"""Our roofline and AIConfigurator beside what was measured: H100 rows of its `silicon_sample.csv`.

AIConfigurator interpolates in tables of kernels that were measured on the same GPUs; our roofline has a data
sheet. One constant, `Efficiency.layer_s`, was fitted on the rows of Llama-3.1-8B, which count apart. Rows are
printed with both errors, those with our largest error of a further token first.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from flows.planning.hardware import hardware_of
from flows.planning.model_shape import shape_of
from flows.planning.roofline import RooflineEngine
from flows.planning.serving import serving_times
from tests.bench._charts import ChartPoint, draw_pairs
from tests.bench._silicon_models import CONFIGS, precision_of

DATA = Path(__file__).parents[1] / "data" / "aiconfigurator"
FITTED_ON = "meta-llama/Llama-3.1-8B-Instruct"
_WORST = 10  # rows that are printed with --quick


@dataclass(frozen=True)
class SiliconTime:
    """Milliseconds as they were measured, and as both predict them."""

    measured: float
    ours: float
    theirs: float  # NaN: AIConfigurator has no prediction for it

    @property
    def error(self) -> float:
        """Ours over measured, less 1."""
        return self.ours / self.measured - 1

    @property
    def theirs_error(self) -> float:
        """Theirs over measured, less 1."""
        return self.theirs / self.measured - 1


@dataclass(frozen=True)
class SiliconRow:
    """A measured row: a server under a load, with the time of a further token and of the first one."""

    kind: tuple[str, str, str]  # model, backend, precision
    tp: int
    batch: int
    isl: int  # tokens of a prompt
    osl: int  # tokens of an answer
    tpot: SiliconTime
    ttft: SiliconTime
    held_out: bool


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench aiconfigurator")
    parser.add_argument(
        "--rows", type=int, default=_WORST if quick else None,
        help="print so many rows, the worst first; all by default, with --quick 10",
    )  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write all rows, as CSV")
    parser.add_argument("--draw", type=Path, help="draw both predictions of a further token into this file")
    given = parser.parse_args(argv)
    rows, left_out = read_rows()
    console = Console(width=170)
    console.print(_medians(rows))
    worst = sorted(rows, key=lambda row: -abs(row.tpot.error))[: given.rows]
    if worst:
        console.print(_by_row(worst, len(rows)))
    if given.output:
        write_rows(rows, given.output)
    if given.draw:
        _draw([row for row in rows if row.held_out and not np.isnan(row.tpot.theirs)], given.draw)
    return {
        "held_out": _figures([row for row in rows if row.held_out]), "all": _figures(rows),
        "left_out": dict(left_out),
    }  # fmt: skip


def _medians(rows: Sequence[SiliconRow]) -> Table:
    table = Table(title="median error: time of a further token (tpot), of the first one (ttft)")
    for column in (
        "model", "backend", "precision", "rows", "theirs", "tpot ours", "… theirs", "ttft ours", "… theirs",
    ):  # fmt: skip
        table.add_column(column)
    kinds = defaultdict(list)
    for row in rows:
        kinds[row.kind].append(row)
    for kind, mine in sorted(kinds.items()):
        figures = _figures(mine)
        table.add_row(
            *kind, str(len(mine)), str(figures["rows_both"]),
            *(f"{figures[key]:.3f}" for key in ("tpot_ours", "tpot_theirs", "ttft_ours", "ttft_theirs")),
        )  # fmt: skip
    return table


def _figures(rows: Sequence[SiliconRow]) -> dict[str, Any]:
    """Median errors of all rows, and on those that both predict."""
    both = [row for row in rows if not np.isnan(row.tpot.theirs)]

    def median(rows: Sequence[SiliconRow], error: Callable[[SiliconRow], float]) -> float:
        return round(float(np.median(np.abs([error(row) for row in rows]))), 3) if rows else float("nan")

    return {
        "rows": len(rows), "tpot_ours": median(rows, lambda row: row.tpot.error),
        "ttft_ours": median(rows, lambda row: row.ttft.error), "rows_both": len(both),
        "tpot_ours_on_both": median(both, lambda row: row.tpot.error),
        "tpot_theirs": median(both, lambda row: row.tpot.theirs_error),
        "ttft_ours_on_both": median(both, lambda row: row.ttft.error),
        "ttft_theirs": median(both, lambda row: row.ttft.theirs_error),
        "tpot_ours_nearer": sum(abs(row.tpot.error) < abs(row.tpot.theirs_error) for row in both),
        "ttft_ours_nearer": sum(abs(row.ttft.error) < abs(row.ttft.theirs_error) for row in both),
    }  # fmt: skip


_ROW = ("model", "engine", "precision", "TP", "batch", "ISL", "OSL")
_TIME = ("measured", "ours", "theirs", "our error", "their error")  # milliseconds, and shares of them


def _by_row(rows: Sequence[SiliconRow], of: int) -> Table:
    title = f"{len(rows)} of {of} rows, ms: a further token (tpot), the first one (ttft)"
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for column in _ROW:
        table.add_column(column, no_wrap=True)
    for column in (*("tpot", *_TIME[1:]), *("ttft", *_TIME[1:])):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_names(row), *_cells(row.tpot), *_cells(row.ttft))
    return table


def _cells(time: SiliconTime) -> list[str]:
    figures = [f"{ms:.1f}" for ms in (time.measured, time.ours, time.theirs)]
    errors = [f"{error:+.0%}" for error in (time.error, time.theirs_error)]
    return [cell.replace("+nan%", "–").replace("nan", "–") for cell in (*figures, *errors)]


def _names(row: SiliconRow) -> list[str]:
    return [*row.kind, *(str(one) for one in (row.tp, row.batch, row.isl, row.osl))]


def _draw(rows: Sequence[SiliconRow], file: Path) -> None:
    kinds = {
        "ours": [ChartPoint(row.tpot.measured, row.tpot.ours) for row in rows],
        "AIConfigurator's": [ChartPoint(row.tpot.measured, row.tpot.theirs) for row in rows],
    }
    title = f"A further token, ms: {len(rows)} held-out rows of both, on H100"
    draw_pairs(file, title, kinds, "measured", "predicted")


def write_rows(rows: Sequence[SiliconRow], file: Path) -> None:
    """Write all rows with both errors, as CSV. A cell of theirs is empty where they predict nothing."""
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        times = [f"{name}, {column}" for name in ("tpot", "ttft") for column in _TIME]
        writer.writerow([*_ROW, *times, "held out"])
        for row in rows:
            figures = [
                one for time in (row.tpot, row.ttft)
                for one in (time.measured, time.ours, time.theirs, time.error, time.theirs_error)
            ]  # fmt: skip
            cells = ["" if np.isnan(one) else f"{one:.4f}" for one in figures]
            writer.writerow([*_names(row), *cells, "yes" if row.held_out else "no"])


def read_rows() -> tuple[list[SiliconRow], Counter[str]]:
    """Return the rows with both predictions, and how many are left out by reason."""
    with (DATA / "predicted_h100.csv").open(newline="") as file:
        theirs = {row["id"]: row for row in csv.DictReader(file)}
    rows, left_out = [], Counter[str]()
    with (DATA / "silicon_sample_h100.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["attention_dp_size"] not in ("", "1"):
                left_out["attention in data parallel"] += 1
                continue
            rows.append(_row(row, theirs.get(row["id"])))
    return rows, left_out


def _row(row: dict[str, str], theirs: dict[str, str] | None) -> SiliconRow:
    model, backend = row["model_path"], row["backend"]
    engine = RooflineEngine(
        shape_of(CONFIGS[model]), hardware_of("H100"), int(row["tp_size"]),
        precision_of(model, row["gemm_quant_mode"]),
    )  # fmt: skip
    ours = serving_times(
        engine, prompt=int(row["isl"]), answer=int(row["osl"]), in_flight=int(row["batch_size"]),
        prefill_first=backend == "sglang",  # its scheduler's default, for batches without chunks in common
    )  # fmt: skip
    nan = {"ttft_ms": "nan", "tpot_ms": "nan"}
    return SiliconRow(
        (model.split("/")[-1], backend, row["precision"] or "bf16"),
        int(row["tp_size"]), int(row["batch_size"]), int(row["isl"]), int(row["osl"]),
        tpot=SiliconTime(
            float(row["silicon_tpot_ms"]), ours.token_s * 1000, float((theirs or nan)["tpot_ms"])
        ),
        ttft=SiliconTime(
            float(row["silicon_ttft_ms"]), ours.first_token_s * 1000, float((theirs or nan)["ttft_ms"])
        ),
        held_out=model != FITTED_ON,
    )  # fmt: skip
