"""Our roofline and AIConfigurator beside what was measured: H100 rows of its `silicon_sample.csv`.

AIConfigurator interpolates in tables of kernels that were measured on the same GPUs; our roofline has a data
sheet. One constant, `Efficiency.layer_s`, was fitted on the rows of Llama-3.1-8B, which count apart.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from flows.planning.hardware import hardware_of
from flows.planning.model_shape import shape_of
from flows.planning.roofline import RooflineEngine
from flows.planning.serving import serving_times
from tests.bench._silicon_models import CONFIGS, precision_of

DATA = Path(__file__).parents[1] / "data" / "aiconfigurator"
FITTED_ON = "meta-llama/Llama-3.1-8B-Instruct"


@dataclass(frozen=True)
class SiliconRow:
    """A measured row, with both predictions as errors: predicted over measured, less 1."""

    kind: tuple[str, str, str]  # model, backend, precision
    ttft: float
    tpot: float
    theirs_ttft: float  # NaN: AIConfigurator has no prediction for it
    theirs_tpot: float
    held_out: bool


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    argparse.ArgumentParser(prog="python -m tests.bench aiconfigurator").parse_args(argv)
    rows, left_out = read_rows()
    table = Table(title="median error: time of a further token (tpot), of the first one (ttft)")
    for column in (
        "model",
        "backend",
        "precision",
        "rows",
        "theirs",
        "tpot ours",
        "… theirs",
        "ttft ours",
        "…",
    ):
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
    Console(width=120).print(table)
    return {
        "held_out": _figures([row for row in rows if row.held_out]), "all": _figures(rows),
        "left_out": dict(left_out),
    }  # fmt: skip


def _figures(rows: Sequence[SiliconRow]) -> dict[str, Any]:
    """Median errors of all rows, and on those that both predict."""
    both = [row for row in rows if not np.isnan(row.theirs_tpot)]

    def median(values: Sequence[float]) -> float:
        return round(float(np.median(np.abs(values))), 3) if values else float("nan")

    return {
        "rows": len(rows), "tpot_ours": median([row.tpot for row in rows]),
        "ttft_ours": median([row.ttft for row in rows]), "rows_both": len(both),
        "tpot_ours_on_both": median([row.tpot for row in both]),
        "tpot_theirs": median([row.theirs_tpot for row in both]),
        "ttft_ours_on_both": median([row.ttft for row in both]),
        "ttft_theirs": median([row.theirs_ttft for row in both]),
    }  # fmt: skip


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
    ttft_s, tpot_s = float(row["silicon_ttft_ms"]) / 1000, float(row["silicon_tpot_ms"]) / 1000
    return SiliconRow(
        (model.split("/")[-1], backend, row["precision"] or "bf16"),
        ours.first_token_s / ttft_s - 1, ours.token_s / tpot_s - 1,
        float(theirs["ttft_ms"]) / 1000 / ttft_s - 1 if theirs else float("nan"),
        float(theirs["tpot_ms"]) / 1000 / tpot_s - 1 if theirs else float("nan"),
        model != FITTED_ON,
    )  # fmt: skip
