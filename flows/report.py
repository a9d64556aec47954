"""Writes a run's report folder: `python -m flows.report --store URL --run ID --folder runs/ID`.

    metrics.jsonl   one line for each optimizer step       run.yaml   the run file as it was used
    curves.png      reward, length, staleness and so on    model/     the trained model, for transformers
    summary.json    the result, before and after           logs/      of the run's processes

It is a process of its own because it needs matplotlib, which the flow has no other use for. All
it needs is the store and the log: it can be made again at any time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from flows.curves import draw
from flows.export import export
from flows.results import comparison
from flows.rows import Row, evaluation_row, first_of_each_step, step_row, with_rates
from flows.watch import PROCESSES_FILE
from infra.bus import Bus, BusError, read_all
from infra.logs import set_up
from infra.private import make_private
from infra.process import connect
from infra.runs import RunError, RunRecord, find
from infra.store import Missing, StoreError, open_store
from infra.weights.versions import WeightStore
from schemas.messages import DeadLetter, Evaluation, StepRecord
from schemas.topics import Topic, Topics
from schemas.wire import MessageT, Unreadable, decode

READ_DEADLINE_S = 60.0


def write_report(record: RunRecord, folder: Path) -> dict[str, Any]:
    """Write it all; returns the summary."""
    make_private(folder)
    (folder / "run.yaml").write_text(yaml.safe_dump(record.spec.model_dump(mode="json"), sort_keys=False))
    bus, topics = connect(record, "streamrl-report"), Topics(record.id, record.spec.lengths.classes)
    steps = first_of_each_step(_messages(bus, topics.ledger, StepRecord))
    evaluations = _messages(bus, topics.evals, Evaluation)
    dead = _messages(bus, topics.dead, DeadLetter)
    rows = with_rates([step_row(step) for step in steps])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluated = [evaluation_row(record) for record in evaluations]
    draw(rows, evaluated, folder / PROCESSES_FILE, folder / "curves.png")
    version = export_model(record, folder / "model")
    summary = {
        "run": record.id,
        "result": comparison(evaluations, _held_out(record)),
        "evaluations": evaluated,
        **_totals(rows),
        "version": version,
        "dead_letters": len(dead),
        "dead_letter_reasons": sorted({letter.reason for letter in dead})[:5],
        "generator_idle": _generators_idle(folder / PROCESSES_FILE),
        "processes": _last_counters(folder / PROCESSES_FILE),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def export_model(record: RunRecord, target: Path) -> int | None:
    """The newest weights as transformers reads them; none if the run has published none."""
    store = open_store(record.store)
    if not WeightStore(store, record.id).versions():
        return None
    return export(record, store, target, replace=True).version


def _messages(bus: Bus, topic: Topic, kind: type[MessageT]) -> list[MessageT]:
    found = []
    for entry in read_all(bus, topic, deadline_s=READ_DEADLINE_S):
        try:
            found.append(decode(entry.value, kind))
        except Unreadable:
            continue  # it is on the dead-letter topic if it mattered to anyone
    return found


def _held_out(record: RunRecord) -> Sequence[dict[str, Any]]:
    """The problems that are evaluated: only the user's own task knows how long their answers are."""
    if not record.spec.evaluation.problems:
        return []
    from producers.tasks import load_problems

    try:
        problems: Sequence[dict[str, Any]] = load_problems(record.spec, record.spec.task.held_out_split)
    except Exception as error:  # a user's code: the report is written without it
        set_up(record.id, "report").warning("the held-out problems can't be read: %s", error)
        return []
    return problems


def _totals(rows: Sequence[Row]) -> dict[str, Any]:
    """Sums over the run. Rates leave out the time in which no trainer ran."""
    timed = [row for row in rows if row["samples_per_s"]]
    seconds = sum((row["samples"] or 0) / (row["samples_per_s"] or 1) for row in timed)
    samples, tokens = sum(row["samples"] or 0 for row in rows), sum(row["tokens"] or 0 for row in rows)
    gaps = [row["logprob_gap"] or 0 for row in rows if row.get("gap_tokens", row.get("logprob_gap"))]
    waited = sum((row["idle"] or 0) * (row["samples"] or 0) / (row["samples_per_s"] or 1) for row in timed)
    return {
        "iterations": len({row["iteration"] for row in rows}),
        "steps": len(rows),
        "samples": samples,
        "tokens": tokens,
        "rewards_failed": sum(row["rewards_failed"] or 0 for row in rows),
        "training_s": seconds,
        "samples_per_s": sum(row["samples"] or 0 for row in timed) / seconds if seconds else None,
        "tokens_per_s": sum(row["tokens"] or 0 for row in timed) / seconds if seconds else None,
        "staleness": sum((row["staleness"] or 0) * (row["samples"] or 0) for row in rows) / max(1, samples),
        "staleness_max": max((row["staleness_max"] or 0 for row in rows), default=0),
        "logprob_gap": max(gaps, default=None),
        "trainer_idle": waited / seconds if seconds else None,
        "reward_first": rows[0]["reward"] if rows else None,
        "reward_last": rows[-1]["reward"] if rows else None,
    }


def _generators_idle(path: Path) -> float | None:
    """Share of the time in training in which the generators waited, as their heartbeats said."""
    if not path.is_file():
        return None
    notes = [json.loads(line) for line in path.read_text().splitlines()]
    of_generators = [note for note in notes if note["process"].startswith("generator") and note["step"]]
    found = [note["idle"] for note in of_generators if note["idle"] is not None]
    return sum(found) / len(found) if found else None


def _last_counters(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    notes = (json.loads(line) for line in path.read_text().splitlines())
    return {note["process"]: note["counters"] for note in notes}


def main() -> int:
    """Write the report of one run."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.report", description="Write a run's report folder."
    )
    parser.add_argument("--store", required=True, help="object store of the run: s3://… or file://…")
    parser.add_argument("--run", required=True, help="id of the run, such as count-1")
    parser.add_argument("--folder", required=True, type=Path, help="where the report goes")
    given = parser.parse_args()
    log = set_up(given.run, "report")
    try:
        write_report(find(open_store(given.store), given.run), given.folder)
    except (BusError, StoreError, RunError, Missing, RuntimeError, OSError) as error:
        log.exception("the report can't be written: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
