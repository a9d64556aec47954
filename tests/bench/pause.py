"""How long an engine makes no token while it takes new weights, by model and share of weights that change.

    pause_ms    between two decode steps: only what is prepared is put in its place
    before_ms   the same weights with everything in the pause: read, loaded by vLLM, packed, hashed
    patch_ms    in the generator's process, beside steps
    prepare_ms, verify_ms   in a thread of the engine's, beside steps
    first_over_alone, beside_over_alone   the step behind the pause, and those beside that thread, over others

In turn in the same process, while eight samples are decoded on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.run.start_model import prepare_model
from schemas.loading import load_run_file
from tests.bench._own_process import result_of
from tests.bench._runs import ROOT, RUNFILE
from tests.bench._sized import make_model

_SHARES = (0.01, 0.03, 1.0)
_COLUMNS = (
    "pause_ms", "before_ms", "patch_ms", "prepare_ms", "verify_ms", "first_over_alone", "beside_over_alone",
)  # fmt: skip


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench pause")
    parser.add_argument("--rounds", type=int, default=2 if quick else 5)
    parser.add_argument("--models", nargs="*", default=["demo", "30M bfloat16", *_most(quick)])
    given = parser.parse_args(argv)
    os.environ.setdefault("STREAMRL_HOME", str(ROOT / ".streamrl"))
    console, rows = Console(stderr=True), []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.models:
            console.print(f"{name} …")
            size, _, dtype = name.partition(" ")
            if size == "demo":
                model, dtype = prepare_model(load_run_file(RUNFILE), lambda share, text: None), "float32"
            else:
                model = make_model(Path(folder) / name, size, dtype)
            rows += [{"model": name} | row for row in _measured(model, dtype, given.rounds)]
    console.print(_table(rows))
    return {"rows": rows}


def _most(quick: bool) -> list[str]:
    return [] if quick else ["30M float32", "100M bfloat16", "100M float32"]


def _measured(model: Path, dtype: str, rounds: int) -> list[dict[str, Any]]:
    return list(result_of("_paused", str(model), dtype, json.dumps(_SHARES), str(rounds)))


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="new weights in an engine")
    for column in ("model", "changed", *_COLUMNS):
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(row["model"], f"{row['changed']:.0%}", *(f"{row[column]:.2f}" for column in _COLUMNS))
    return table
