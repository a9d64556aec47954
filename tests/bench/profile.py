"""A profile of the demo: how long it takes, and how wrong its curves are at points that were held out.

decode_error, train_error   median of the relative errors at held-out batches, contexts and bundles
decode_worst, train_worst   the largest
spread                      what the profile itself says of its decode steps
disturbed                   share of the time in which something else had the cores: beyond a tenth, no
                            figure is to be relied on
seconds                     that it took, with the starts of engine and learner
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from flows.planning.measuring import measure
from flows.planning.profile_times import held_out_errors, measured_engine
from flows.planning.profile_view import profile_rows
from flows.run.locations import Places
from flows.run.start_model import prepare_model
from schemas.loading import load_run_file
from tests.bench._runs import ROOT, RUNFILE


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench profile")
    parser.add_argument("--runfile", default=str(RUNFILE))
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="changes")
    parser.add_argument("--seconds", type=float, default=40.0 if quick else 120.0)
    given = parser.parse_args(argv)
    os.environ.setdefault("STREAMRL_HOME", str(ROOT / ".streamrl"))
    spec, console = load_run_file(given.runfile, given.changes), Console(stderr=True)
    model = prepare_model(spec, lambda share, text: None)
    told: list[str] = []

    def tell(share: float, text: str) -> None:
        if text not in told:
            told.append(text)
            console.print(f"{text} …")

    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder:
        places = Places("", f"file://{Path(folder)}/store")
        found = measure(spec, model, places, tell, seconds=given.seconds)
    table = Table("part", "measured", "")
    for row in profile_rows(found):
        table.add_row(*row)
    console.print(table)
    errors = held_out_errors(found)
    return {
        "decode_error": round(errors.decode_error, 4),
        "train_error": round(errors.train_error, 4),
        "decode_worst": round(float(np.abs(errors.decode).max(initial=0.0)), 4),
        "train_worst": round(float(np.abs(errors.train).max(initial=0.0)), 4),
        "spread": round(measured_engine(found).spread, 4),
        "disturbed": round(max(found.generation.disturbed, found.training.disturbed), 4),
        "seconds": round(found.took_s, 1),
    }
