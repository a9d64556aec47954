"""Every reader of foreign bytes against mutated inputs: only errors that explain themselves, memory bounded.

Each reader has a process of its own, and its peak of memory is what it took beyond what it began with.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench._fuzz_targets import Target, targets
from tests.bench._mutations import mutated

_SHOWN = 3  # unexpected errors of a reader that are shown


@dataclass
class Fuzzed:
    """How one reader did."""

    name: str
    inputs: int = 0
    taken: int = 0
    explained: int = 0
    others: Counter[str] = field(default_factory=Counter)  # errors that nobody has foreseen
    longest_s: float = 0.0
    peak: int = 0  # bytes


def fuzz(target: Target, inputs: int, seed: int = 0) -> Fuzzed:
    """Read so many inputs in this process. The good ones have to be taken."""
    good, draw = list(target.make_valid()), np.random.default_rng([seed, *target.name.encode()])
    for data in good[:1]:
        target.read(data)
    found, before = Fuzzed(target.name, inputs), _reset_peak()
    for _ in range(inputs):
        data, began = mutated(good, draw), time.perf_counter()
        try:
            target.read(data)
            found.taken += 1
        except target.explained:
            found.explained += 1
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # what else there may be is what is looked for
            found.others[f"{type(error).__name__}: {str(error)[:200]}"] += 1
        found.longest_s = max(found.longest_s, time.perf_counter() - began)
    found.peak = _said("VmHWM") - before
    return found


def main(*, quick: bool = False, argv: Sequence[str] = ()) -> dict[str, Any]:
    """All readers; two at once."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=5_000 if quick else 100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    names = [target.name for target in targets()]
    print(
        f"{'reader':24} {'inputs':>9} {'taken':>9} {'explained':>9} {'others':>7} {'longest':>9} {'peak':>9}"
    )
    rows = []
    tasks = [(name, given.inputs, given.seed) for name in names]
    with multiprocessing.get_context("fork").Pool(min(2, os.cpu_count() or 1), maxtasksperchild=1) as pool:
        for row in pool.imap(_one, tasks, chunksize=1):
            rows.append(row)
            others = sum(row.others.values())
            print(
                f"{row.name:24} {row.inputs:9,} {row.taken:9,} {row.explained:9,} {others:7,} "
                f"{row.longest_s * 1e3:6,.0f} ms {row.peak / 1e6:6,.0f} MB",
                flush=True,
            )
            for said, count in row.others.most_common(_SHOWN):
                print(f"    {count:,} × {said}")
        pool.close()
        pool.join()  # each ends by itself: told to end, they would say that they were interrupted
    return {
        "readers": len(rows), "inputs": sum(row.inputs for row in rows),
        "other_errors": sum(sum(row.others.values()) for row in rows),
        "longest_ms": round(max(row.longest_s for row in rows) * 1e3),
        "peak_mb": round(max(row.peak for row in rows) / 1e6),
    }  # fmt: skip


def _one(task: tuple[str, int, int]) -> Fuzzed:
    name, inputs, seed = task
    return fuzz(next(target for target in targets() if target.name == name), inputs, seed)


def _reset_peak() -> int:
    """From now on the kernel counts the peak of this process anew; bytes that it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _said("VmRSS")


def _said(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) << 10
