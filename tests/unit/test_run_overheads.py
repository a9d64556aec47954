"""The overheads of a run, from the notes that it left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.planning.profile_times import cores_for_work, measured_engine, measured_learner
from flows.planning.profiled_learner import ProfilingFailed
from flows.planning.run_overheads import overheads_of
from tests.profiles import known_profile


def note(
    process: str, at: float, causes: dict[str, float] | None = None, **counters: float
) -> dict[str, Any]:
    return {"process": process, "at": at, "counters": counters, "causes": causes or {}}


def notes(seconds: int) -> list[dict[str, Any]]:
    """A run with 0.05 cores all the time and 2 ms a sample; it makes 10 or 50 samples a second."""
    found, made = [], 0.0
    for at in range(seconds):
        made += 10 if at % 8 < 4 else 50
        own = {"recording": 0.01 * at, "publishing": 0.03 * at, "training": 0.9 * at}
        found += [
            note("feeder-0", at + 0.0, cpu_s=3 + 0.05 * at),
            note("generator-0", at + 0.0, cpu_s=5 + 0.0015 * made, made=made),
            note("trainer-0", at + 0.0, own, weights_cpu_s=0.0005 * made, published=at // 2, cpu_s=9.0 * at),
        ]
    return found


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "processes.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_seconds_by_time_and_by_sample_are_told_apart(tmp_path: Path) -> None:
    found = overheads_of(written(tmp_path, notes(80)))
    assert found.steady_cores == pytest.approx(0.05, rel=0.05)
    assert found.sample_cpu_s == pytest.approx(0.002, rel=0.05)
    assert found.iteration_s == pytest.approx(0.08, rel=0.05)
    assert found.seconds == 79.0


def test_torn_lines_and_lines_twice_do_not_count(tmp_path: Path) -> None:
    rows = [row for row in notes(80) for _ in range(2)]
    odd = [{"process": 3}, {"at": "x", "counters": {}}, note("generator-0", 81.0, made=float("nan"))]
    folder = written(tmp_path, [*odd[:2], *rows])
    with (folder / "processes.jsonl").open("a") as file:
        file.write('{"process": "feeder-0", "at": 9')
    assert overheads_of(folder).sample_cpu_s == pytest.approx(0.002, rel=0.05)


def test_a_process_that_was_started_again_counts_from_there(tmp_path: Path) -> None:
    rows = notes(120)
    for row in rows:
        if row["process"] == "feeder-0" and row["at"] >= 60:
            row["counters"]["cpu_s"] -= 5.0
    found = overheads_of(written(tmp_path, rows))
    assert found.steady_cores + found.sample_cpu_s * 30 == pytest.approx(0.05 + 0.06, rel=0.3)


@pytest.mark.parametrize("rows", [[], notes(5)])
def test_a_folder_without_enough_notes_is_refused(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ProfilingFailed, match=str(tmp_path.name)):
        overheads_of(written(tmp_path, rows))
    with pytest.raises(ProfilingFailed, match="report folder"):
        overheads_of(tmp_path / "none")


def test_overheads_take_cores_from_engines_and_learner() -> None:
    overheads = {
        "steady_cores": 0.3,
        "sample_cpu_s": 0.002,
        "iteration_s": 0.07,
        "samples": 1,
        "seconds": 1.0,
    }
    plain = known_profile()
    found = plain.model_validate({**plain.model_dump(), "overheads": overheads})
    assert cores_for_work(plain) == 2
    assert cores_for_work(found) == pytest.approx(1.7)
    assert measured_engine(found).cores > measured_engine(plain).cores > 1.0
    assert measured_learner(found).step_s == pytest.approx(measured_learner(plain).step_s + 0.07)
