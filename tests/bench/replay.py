"""Replays: whether all steps of runs whose processes were killed come to the same bits, and what that costs.

    python -m tests.bench replay              60 steps of each run; --quick: 10, with wider error

Two runs of the demo's task, sync and async with updates in flight, have two generators each; random processes
are killed on the way. Each step is then taken again from Kafka, from the archive alone, and from single step
files in a clean folder, the last two in a process without any network (`unshare -n`).

bit_equal            by run and source: steps with equal bits in all stages, of how many
recorder_over_bare   processor time of a step with all that is computed for its record, over without
replay_over_step     seconds to take a step again, over those of the whole trainer with all samples there
ledger_over_samples  bytes of the ledger over those of the samples, where answers have 1,000 tokens in the
                     mean; ledger_over_100: where they have 100; ledger_over_demo: in the async run, whose
                     answers have some 13
ledger_us            by rows of a step: microseconds to write and to read its record, and the same unpacked
bundle_over_samples  bytes of step files without weights, state and tokenizer, over the samples', in that run
sql_s                the slower of two aggregates over 100,000 archived samples (`archive.py`)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from msgspec import structs
from rich.console import Console

from flows.run.bundling import make_step_file
from flows.run.replaying import replaying
from infra.bus import read_all
from infra.run_handle import RunHandle
from infra.runs import RunRecord
from infra.stack import local
from schemas.messages import Sample, StepRecord
from schemas.wire import decode, encode
from tests.bench import archive
from tests.bench._arrivals import model_of, samples_of, spec_of
from tests.bench._killed_runs import killed_run
from tests.bench._record_codec import codec_us
from tests.bench._recorder import recorder_over_bare, replay_over_step
from tests.bench._runs import ROOT, own_stack

_CUT_OFF = ("unshare", "-rn")
_LONG, _MIDDLE = 1_000, 100  # tokens
_ROWS = (512, 8_192)


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench replay")
    parser.add_argument("--steps", type=int, default=10 if quick else 60)
    parser.add_argument("--kills", type=int, default=2 if quick else 8, help="of each run's processes")
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args(argv)
    found: dict[str, Any] = {"steps": given.steps, "bit_equal": {}, "killed": {}}
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as name, own_stack() as stack:
        for mode in ("sync", "async"):
            folder = Path(name) / mode
            console.print(f"{mode} run of {given.steps} steps, {given.kills} kills …")
            record, killed = killed_run(
                stack, folder, mode, steps=given.steps, kills=given.kills, seed=given.seed
            )
            console.print(f"its replays, {', '.join(killed)} were killed …")
            found["killed"][mode] = killed
            found["bit_equal"][mode] = _from_all_sources(record, stack, folder, given.steps)
            if mode == "async":
                found |= _sizes(record, stack, folder / "files")
        console.print("prices …")
        spec = spec_of(8 if quick else 12)
        model = model_of(spec)
        iterations = samples_of(spec, model)
        found["recorder_over_bare"] = recorder_over_bare(spec, model, iterations, pairs=12 if quick else 60)
        found |= replay_over_step(spec, model, stack, iterations)
    found["sql_s"] = archive.main(quick=quick, argv=["--seed", str(given.seed)])["sql_s"]
    return found


def _from_all_sources(
    record: RunRecord, stack: local.Stack, folder: Path, steps: int
) -> dict[str, list[int]]:
    """Take all steps again from each source; return by source how many are equal, and of how many."""
    store, span = f"{stack.paths.home}/store", f"0-{steps - 1}"
    found = {"kafka": _replayed(_streamrl(stack, "replay", record.id, "--step", span, "--json"))}
    _streamrl(stack, "archive", record.id)
    clean = folder / "clean"
    for part in ("runs", "archive"):
        shutil.copytree(Path(store) / part, clean / "store" / part)
    words = ("replay", record.id, "--step", span, "--json", "--archive", "--store", f"file://{clean}/store")
    found["archive"] = _replayed(_cut_off(clean, "-m", "flows.cli", *words))
    files = folder / "files"
    files.mkdir()
    with replaying(record.id, f"file://{store}", lambda done, total: None) as opened:
        for step in range(steps):
            make_step_file(
                opened.again, opened.handle, files / f"{step:03}.tar.zst", step, step, failed=False,
                regenerate=False, written=lambda done, total: None,
            )  # fmt: skip
    said = json.loads(_cut_off(clean, "-m", "tests.bench._cut_off", str(files), record.bootstrap_servers))
    if said["reaches_broker"]:
        raise RuntimeError("a process that should be cut off reaches the broker")
    found["step files"] = said["equal"]
    return found


def _replayed(lines: str) -> list[int]:
    rows = [json.loads(line) for line in lines.splitlines()]
    return [sum(row["equal"] for row in rows), len(rows)]


def _streamrl(stack: local.Stack, *words: str) -> str:
    return _done([sys.executable, "-m", "flows.cli", *words], {**os.environ, **stack.env()}, ROOT)


def _cut_off(clean: Path, *words: str) -> str:
    """Run Python without network, in a folder and home in which nothing of the run is."""
    names = ("PATH", "LANG", "LD_LIBRARY_PATH")
    env = {name: os.environ[name] for name in names if name in os.environ}
    env |= {"PYTHONPATH": str(ROOT), "HOME": str(clean), "STREAMRL_HOME": str(clean / "home")}
    return _done([*_CUT_OFF, sys.executable, *words], env, clean)


def _done(argv: Sequence[str], env: dict[str, str], folder: Path) -> str:
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def _sizes(record: RunRecord, stack: local.Stack, files: Path) -> dict[str, Any]:
    with replaying(record.id, f"file://{stack.paths.home}/store", lambda done, total: None) as opened:
        ledger, samples = (_values(opened.handle, name) for name in ("ledger", "samples"))
    trained = sum(decode(raw, StepRecord).groups.size for raw in ledger)
    step_bytes = sum(map(len, ledger)) / trained
    found = [decode(raw, Sample) for raw in samples]
    found = [one for one in found if one.purpose == "train"]
    mean = sum(one.true_length for one in found) / len(found)

    def over(length: int) -> float:
        return step_bytes * len(found) / sum(_stretched(one, length / mean) for one in found)

    newest = decode(ledger[-1], StepRecord)
    return {
        "ledger_over_samples": over(_LONG), "ledger_over_100": over(_MIDDLE),
        "ledger_over_demo": step_bytes * len(found) / sum(len(encode(one)) for one in found),
        "bundle_over_samples": sum(map(_without_tensors, files.iterdir()))
        / (sum(len(encode(one)) for one in found) / len(found) * trained),
        "ledger_us": {str(rows): codec_us(newest, rows) for rows in _ROWS},
    }  # fmt: skip


def _values(handle: RunHandle, topic: str) -> list[bytes]:
    return [one.value for one in read_all(handle.bus, getattr(handle.topics, topic), deadline_s=60)]


def _stretched(sample: Sample, by: float) -> int:
    """Return the bytes of a sample whose answer is longer."""
    length = max(1, round(sample.true_length * by))
    tokens, logprobs = np.resize(sample.tokens, length), np.resize(sample.logprobs, length)
    return len(encode(structs.replace(sample, tokens=tokens, logprobs=logprobs)))


def _without_tensors(file: Path) -> int:
    """Return the bytes of a step file but for its tensors, compressed as it is."""
    rest = zstandard.ZstdCompressor(3).compressobj()
    size = 0
    with (
        file.open("rb") as raw,
        zstandard.ZstdDecompressor().stream_reader(raw) as stream,
        tarfile.open(fileobj=stream, mode="r|") as tar,
    ):
        for member in tar:
            content = tar.extractfile(member)
            if content is not None and not member.name.startswith("tensors/"):
                size += len(rest.compress(content.read()))
    return size + len(rest.flush())
