"""The bug zoo: what `streamrl explain` says of planted faults, and of healthy runs.

Each fault is planted in a small real run (`tests/zoo/`). `found` counts those whose step, stage, sample and
cause are named first; `alarms` counts healthy runs, of other seeds, losses and modes, in which anything is
found. `seconds` is the median time of an explanation.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.factories import make_tiny_model
from tests.zoo.faults import FAULTS
from tests.zoo.healthy import healthy_runs
from tests.zoo.trying import missed, tried


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench zoo")
    parser.add_argument("--seed", type=int, default=100, help="of all runs")
    parser.add_argument("--model-seed", type=int, default=0, help="of the weights that all runs begin with")
    parser.add_argument("--fault", help="only faults whose name has this in it, and no healthy run")
    given = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    faults = [fault for fault in FAULTS if given.fault in (None, "") or given.fault in fault.name]
    healthy = {} if given.fault else healthy_runs(given.seed)
    if quick:
        healthy = dict(list(healthy.items())[::4])
    table = Table("fault", "modelled on", "step", "stage", "sample", "cause named first", "s")
    rows, alarms, seconds = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny_model(Path(folder) / "model", seed=given.model_seed, layers=2, width=32))
        console = Console(stderr=True)
        for number, fault in enumerate(track(faults, "faults", console=console)):
            one = tried(Path(folder) / f"fault-{number}", model, fault, seed=given.seed)
            first, lacks = one.first, missed(fault, one.first)
            seconds.append(one.seconds)
            rows.append({"fault": fault.name, "missed": lacks, "seconds": round(one.seconds, 2)})
            said = ("", "", "", "nothing") if first is None else (
                str(first.step), first.stage, ", ".join(first.samples[:1]), first.cause,
            )  # fmt: skip
            table.add_row(
                fault.name, fault.after, *said, f"{one.seconds:.1f}", style="red" if lacks else "green"
            )
        for number, (name, spec) in enumerate(track(healthy.items(), "healthy runs", console=console)):
            found = tried(Path(folder) / f"healthy-{number}", model, None, spec).found
            alarms += [{"run": name, "detector": who, "cause": one.cause} for who, one in found.findings]
    console.print(table)
    for alarm in alarms:
        console.print(f"false alarm: {alarm}")
    return {
        "rows": rows, "faults": len(faults), "found": sum(not row["missed"] for row in rows),
        "healthy": len(healthy), "alarms": len({alarm["run"] for alarm in alarms}), "said": alarms,
        "seconds": round(float(np.median(seconds)), 2), "seconds_worst": round(max(seconds), 2),
    }  # fmt: skip
