"""A report folder and topic facts of a made-up run, for tests of its page."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from flows.page.page_data import PageData
from flows.page.run_files import RunFiles
from flows.page.sample_texts import ReadSample
from flows.page.topic_facts import ProcessState, TopicFacts
from infra.runs import RunRecord
from tests.factories import make_spec

BEGAN = 1_750_000_000.0
HOSTILE = (
    "<script>document.title='taken'</script><img src=x onerror=alert(1)> & \"quoted\" \x1b[31m\u202eevil"
)


def make_record(folder: Path, run: str = "test-1") -> RunRecord:
    """The record of a run whose report folder is in `folder`."""
    spec = make_spec(report=str(folder), algorithm={"iterations": 60, "mode": "async", "staleness": 2})
    return RunRecord(
        id=run,
        spec=spec,
        bootstrap_servers="127.0.0.1:1",
        store="none",
        model=str(folder / "model"),
        created_at=BEGAN,
    )


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a file, one a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        opened.writelines(json.dumps(row) + "\n" for row in rows)


def step_line(step: int, **fields: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    luck = random.Random(step)
    return {
        "iteration": step,
        "step": step,
        "version": step + 1,
        "trainer_epoch": 0,
        "samples": 512,
        "tokens": 14_000,
        "reward": 0.95 - 0.3 * math.exp(-step / 15) + luck.gauss(0, 0.015),
        "reward_deviation": 0.1 + 0.2 * math.exp(-step / 20),
        "rewards_failed": 0,
        "length": 20 + step / 4 + luck.gauss(0, 1),
        "length_p50": 9,
        "length_max": 150 + luck.randint(0, 60),
        "staleness": 1.4 + luck.gauss(0, 0.1),
        "staleness_max": 2,
        "finished_at": BEGAN + 12 + 2.2 * step,
        "gap_tokens": 40,
        "logprob_gap": 2e-5 * math.exp(luck.gauss(0, 0.4)),
        "logprob_drift": 3e-3,
        "entropy": 0.5 - step / 300,
        "grad_norm": 0.4 + luck.random() / 5,
        "samples_per_s": 230 + luck.gauss(0, 20),
        "tokens_per_s": 6400.0,
        "idle": 0.2,
    } | fields


def process_line(process: str, at: float, causes: dict[str, float], **fields: Any) -> dict[str, Any]:
    """A line of processes.jsonl."""
    return {
        "at": at,
        "process": process,
        "step": 1,
        "idle": 0.1,
        "cpu": 0.5,
        "pid": 7,
        "host": "here",
        "counters": {},
        "causes": causes,
    } | fields


def make_folder(folder: Path, steps: int = 60) -> Path:
    """Write the files of a run of so many steps."""
    write_lines(folder / "metrics.jsonl", [step_line(step) for step in range(steps)])
    notes, spent = [], {"trainer-0": dict[str, float](), "generator-0": {}, "generator-1": {}, "feeder-0": {}}
    mixes = {
        "trainer-0": {
            "training": 0.9,
            "stepping": 0.25,
            "recording": 0.1,
            "wait: samples": 0.6,
            "publishing": 0.1,
        },
        "generator-0": {
            "generating": 1.3,
            "generating the long tail": 0.4,
            "wait: assignments": 0.25,
            "installing weights": 0.02,
        },
        "generator-1": {"generating": 1.1, "generating the long tail": 0.3, "wait: weights": 0.5},
        "feeder-0": {"admitting": 0.1, "wait: optimizer steps": 1.5, "wait: held-out samples": 0.3},
    }
    for tick in range(steps + 6):
        for name, mix in mixes.items():
            luck = random.Random(f"{name}{tick}")
            weights = (
                {"starting": 1.0}
                if tick < 4
                else {cause: part * luck.random() for cause, part in mix.items()}
            )
            for cause, part in weights.items():
                spent[name][cause] = spent[name].get(cause, 0.0) + 2.2 * part / sum(weights.values())
            counters = {"version": tick, "installs": tick, "pause_s": tick * 0.0009 + luck.random() / 5000}
            if name == "trainer-0":
                counters = {
                    "published": tick,
                    "published_bytes": tick * 61_000 + luck.randint(0, 9000),
                    "whole_bytes": 3_440_000,
                }
            notes.append(process_line(name, BEGAN + 2.2 * (tick + 1), dict(spent[name]), counters=counters))
    write_lines(folder / "processes.jsonl", notes)
    lags = [
        {
            "at": BEGAN + step,
            "step": step,
            "lag": [random.Random(step + 99 * n).randint(0, 40 * n + 9) for n in range(4)],
        }
        for step in range(steps)
    ]
    write_lines(folder / "queues.jsonl", lags)
    evaluations = [
        {"version": version, "reward": 0.93 - 0.25 * math.exp(-version / 15), "reward_error": 0.012}
        for version in range(0, steps + 1, 10)
    ]
    write_lines(folder / "evaluations.jsonl", evaluations)
    return folder


def make_facts(**fields: Any) -> TopicFacts:
    """Topic facts with lengths and samples."""
    luck = random.Random(1)
    lengths = [
        (said, max(1, round(said * math.exp(luck.gauss(0, 0.4)))))
        for said in (luck.uniform(3, 200) for _ in range(900))
    ]
    sample = ReadSample(
        "best",
        59,
        "236-1-0",
        "train-7",
        "kzm 07:",
        "kzm 07 06 05",
        12,
        10.5,
        "stop",
        1.0,
        "",
        58,
        {"word": 0.2, "length": 0.8},
    )
    given: dict[str, Any] = {
        "at": BEGAN + 140,
        "lengths": lengths,
        "edges": [12.0, 40.0, 90.0],
        "samples": [sample],
        "processes": [ProcessState("trainer-0", "here", "training", True)],
    }
    return TopicFacts(**given | fields)


def make_page(folder: Path, steps: int = 60, **facts: Any) -> PageData:
    """The data of a page of a made-up run."""
    record = make_record(folder)
    files = RunFiles(make_folder(folder / record.id, steps))
    files.refresh()
    return PageData(record, files, make_facts(**facts), made_at=BEGAN + 150)
