"""Writes a run's report folder: `python -m flows.run.report --store URL --run ID --folder runs/ID`.

    report.html     all of it on one page
    metrics.jsonl   one line for each optimizer step       run.yaml   the run file as it was used
    curves.png      reward, length, staleness and so on    model/     the trained model, for transformers
    summary.json    the result, before and after           logs/      of the run's processes

A process of its own writes the report, because it needs matplotlib and the flow does not. The report is made
of the store and the topics, and can be made again at any time. `metrics.jsonl` has grown while the run went
on: only the rest of the ledger is read, unless lines are missing. Memory does not grow with the number of
steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from flows.checkpoints.export_run import export_run
from flows.page.page_data import ENDED, SaidState
from flows.page.page_file import write_page
from flows.page.run_files import SUMMARY_FILE
from flows.view.curves import draw
from flows.view.held_out_results import comparison
from flows.view.line_files import METRICS_FILE, MetricsFile, complete, lines_of
from flows.view.metric_rows import MetricRow, Thinned, evaluation_row
from flows.view.plain_json import plain_json
from flows.view.process_notes import LEFT_OUT_FILE, PROCESSES_FILE
from flows.view.reward_trouble import told
from flows.view.totals import Totals
from infra.bus import Bus, BusError, clamp, ends_of, near_ends, read_all, read_until
from infra.files.private import make_private
from infra.gate import Gate, passed_over
from infra.logs import set_up
from infra.run_bus import connect
from infra.runs import RunError, RunRecord, find
from infra.stores.opening import open_store
from infra.stores.store import Missing, StoreError
from infra.supervise.last_words import leave_last_words
from infra.weights.versions import WeightStore
from schemas.messages import DeadLetter, Evaluation
from schemas.topics import Topics

READ_DEADLINE_S = 60.0
_NEWEST_LETTERS = 200


def write_report(record: RunRecord, folder: Path) -> dict[str, Any]:
    """Write the whole report. Returns the summary."""
    make_private(folder)
    (folder / "run.yaml").write_text(yaml.safe_dump(record.spec.model_dump(mode="json"), sort_keys=False))
    bus, topics = connect(record, "streamrl-report"), Topics(record.id, record.spec.lengths.classes)
    complete(MetricsFile(folder / METRICS_FILE), bus, topics, record.id)
    totals, shown = Totals(), Thinned[MetricRow]()
    for row in lines_of(folder / METRICS_FILE):
        totals.add(row)
        shown.add(row)
    evaluated, ends = _evaluations(bus, topics, record.id)
    letters, reasons = _dead_letters(bus, topics, record.id)
    notes = folder / PROCESSES_FILE
    draw(shown.kept, evaluated, notes, folder / "curves.png")
    version = export_model(record, folder / "model")
    summary = {
        "run": record.id,
        **({"fork": record.fork.model_dump()} if record.fork else {}),
        "result": comparison(ends, _held_out(record)),
        "evaluations": evaluated,
        **totals.summary(),
        "told": told(folder),
        "version": version,
        "dead_letters": letters,
        "dead_letter_reasons": reasons,
        "left_out": _left_out(folder / LEFT_OUT_FILE),
        "generator_idle": _generators_idle(notes),
        "processes": _last_counters(notes),
    }
    (folder / SUMMARY_FILE).write_text(plain_json(summary, indent=1) + "\n")
    _write_page(record, folder)
    return summary


def _write_page(record: RunRecord, folder: Path) -> None:
    try:
        write_page(record, open_store(record.store), folder, said=SaidState(ENDED))
    except Exception as error:  # the rest of the report is written: it is not lost with the page
        set_up(record.id, "report").warning("the page can't be written: %s: %s", type(error).__name__, error)


def export_model(record: RunRecord, target: Path) -> int | None:
    """Write the newest weights for transformers. Returns their version; None if none are published."""
    store = open_store(record.store)
    if not WeightStore(store, record.id).versions():
        return None
    return export_run(record, store, target, replace=True).version


def _evaluations(bus: Bus, topics: Topics, run: str) -> tuple[list[MetricRow], list[Evaluation]]:
    """Return a row of each evaluation, and in full those of the first and of the last version."""
    gate = Gate(Evaluation, run, passed_over)
    rows: list[MetricRow] = []
    first: Evaluation | None = None
    last: Evaluation | None = None
    reader = bus.reader(topics.evals)
    try:
        clamp(reader)
        records = read_until(reader, reader.end_offsets(), topics.evals, deadline_s=READ_DEADLINE_S)
        for _, one in gate.take(records):  # one by one: a long run has too many to hold in full
            rows.append(evaluation_row(one))
            first = one if first is None or one.version <= first.version else first
            last = one if last is None or one.version >= last.version else last
    finally:
        reader.close()
    return rows, [one for one in (first, last) if one is not None]


def _dead_letters(bus: Bus, topics: Topics, run: str) -> tuple[int, list[str]]:
    """Return how many dead letters there have been, and some of the newest reasons."""
    gate = Gate(DeadLetter, run, passed_over)
    start = near_ends(bus, topics.dead, _NEWEST_LETTERS)
    letters = gate.messages(read_all(bus, topics.dead, start, deadline_s=READ_DEADLINE_S))
    return sum(ends_of(bus, topics.dead).values()), sorted({letter.reason for letter in letters})[:5]


def _held_out(record: RunRecord) -> Sequence[dict[str, Any]]:
    """Return the problems that are evaluated: only the user's task knows how long their right answers are."""
    if not record.spec.evaluation.problems:
        return []
    from producers.tasks import load_problems

    try:
        problems: Sequence[dict[str, Any]] = load_problems(record.spec, record.spec.task.held_out_split)
    except Exception as error:  # the user's code failed: the report is written without the problems
        set_up(record.id, "report").warning("the held-out problems can't be read: %s", error)
        return []
    return problems


def _generators_idle(path: Path) -> float | None:
    """Return the share of training in which generators waited, by their heartbeats; None if not known."""
    total, count = 0.0, 0
    for note in lines_of(path):
        of_generator = str(note.get("process")).startswith("generator") and note.get("step")
        if of_generator and isinstance(idle := note.get("idle"), int | float):
            total, count = total + idle, count + 1
    return total / count if count else None


def _last_counters(path: Path) -> dict[str, Any]:
    return {str(note.get("process")): note.get("counters") for note in lines_of(path)}


def _left_out(path: Path) -> dict[str, str]:
    """Return the processes that could not be kept alive, with the reason."""
    found = {str(note.get("process")): str(note.get("why")) for note in lines_of(path)}
    return {name: why for name, why in found.items() if why}


def main() -> int:
    """Write the report of one run. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.run.report", description="Write a run's report folder."
    )
    parser.add_argument("--store", required=True, help="object store of the run: s3://… or file://…")
    parser.add_argument("--run", required=True, help="id of the run, such as count-1")
    parser.add_argument("--folder", required=True, type=Path, help="where the report goes")
    given = parser.parse_args()
    log = set_up(given.run, "report")
    try:
        write_report(find(open_store(given.store), given.run), given.folder)
    except (BusError, StoreError, RunError, Missing, RuntimeError, OSError) as error:
        log.exception("the report can't be written")
        leave_last_words(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
