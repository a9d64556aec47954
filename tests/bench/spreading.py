"""When the last of several sites has a version: as planned, and with everyone fetching from the origin.

In virtual time, over links with a latency of 50 ms. `bound`: what no plan can beat (`_spreading_bound.py`).
A thousand chunks are about a fluid; few are not, and of their size the bound knows nothing. What is random is
drawn anew several times, and of ratios the mean is shown.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from infra.weights.manifest import Chunk
from infra.weights.spreading.plan import alone, spread
from tests.bench._spreading_bound import bound
from tests.bench._topologies import TOPOLOGIES

_MIB = 1 << 20


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = ArgumentParser(prog="python -m tests.bench spreading")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1000, 100, 25], help="of 8 to 12 MiB")
    parser.add_argument("--draws", type=int, default=2 if quick else 5)
    given = parser.parse_args(argv)
    _one(next(iter(TOPOLOGIES)), 1, 0)  # compiles it
    rows = []
    for count in given.chunks:
        for topology in TOPOLOGIES:
            drawn = [_one(topology, count, seed) for seed in range(given.draws)]
            means = {figure: float(np.mean([one[figure] for one in drawn])) for figure in drawn[0]}
            worst = max(one["ours_over_bound"] for one in drawn)
            rows.append({"topology": topology, "chunks": count, **means, "worst_over_bound": worst})
    Console(width=130).print(_table(rows))
    fluid = [row["ours_over_bound"] for row in rows if row["chunks"] == max(given.chunks)]
    rounded = [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    return {"rows": rounded, "ours_over_bound_worst": round(max(fluid), 4)}


def _one(topology: str, count: int, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    links = TOPOLOGIES[topology](rng)
    sizes = rng.integers(8 * _MIB, 12 * _MIB, count)
    chunks = [Chunk(hash=f"{number:064x}", size=int(size)) for number, size in enumerate(sizes)]
    given = chunks, {site: () for _, site in links.rates}, "origin", links
    began = time.process_time()
    ours = spread(*given).last
    took = time.process_time() - began
    simple, least = alone(*given).last, bound(*given)
    return {
        "ours_s": ours, "origin_only_s": simple, "bound_s": least, "ours_over_bound": ours / least,
        "origin_only_over_ours": simple / ours, "plan_s": took,
    }  # fmt: skip


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="seconds until the last site has everything")
    for figure in rows[0]:
        table.add_column(figure.replace("_", " "), justify="left" if figure == "topology" else "right")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    return table
