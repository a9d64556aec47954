"""The overheads of a run, from the notes that it left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.planning.profile_times import cores_for_work, measured_engine, measured_learner
from flows.planning.profiled_learner import ProfilingFailed
from flows.planning.run_overheads import newest_overheads, overheads_of
from flows.planning.stage_times import share_filled
from tests.factories import make_spec
from tests.profiles import known_profile

OTHER_S = 1e-5 + 0.002 / 64  # to read and record a sample


def note(
    process: str, at: float, causes: dict[str, float] | None = None, **counters: float
) -> dict[str, Any]:
    return {"process": process, "at": at, "host": "here", "counters": counters, "causes": causes or {}}


def notes(seconds: int, *, machine: bool = True) -> list[dict[str, Any]]:
    """A run in which others need 0.3 cores, a generator 0.1, its engine 0.8, and training 0.6."""
    found = []
    for at in range(seconds):
        own = {"recording": 0.01 * at, "publishing": 0.03 * at, "training": 0.8 * at}
        whole = {"machine_cpu_s": 500 + 1.8 * at} if machine else {}
        found += [
            note("feeder-0", at + 0.0, cpu_s=3 + 0.05 * at),
            note("generator-0", at + 0.0, cpu_s=5 + 0.1 * at, work_s=15 + 0.9 * at, made=10 * at,
                 tokens=200 * at, slot_s=6 * at, busy_s=0.75 * at),
            note("trainer-0", at + 0.0, own, weights_cpu_s=0.02 * at, published=at // 2, step=at // 2,
                 work_s=4 + 0.66 * at, **whole),
        ]  # fmt: skip
    return found


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "processes.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_what_others_need_is_what_engines_and_training_leave(tmp_path: Path) -> None:
    found = overheads_of(written(tmp_path, notes(80)))
    assert found.generator_cores == pytest.approx(0.1)
    assert found.steady_cores == pytest.approx(1.8 - 0.9 - 0.66 + 0.02)
    assert found.iteration_s == pytest.approx(0.08, rel=0.05)
    assert found.seconds == 79.0


def test_where_the_machine_is_not_ours_known_processes_are_counted(tmp_path: Path) -> None:
    found = overheads_of(written(tmp_path, notes(80, machine=False)))
    assert found.steady_cores == pytest.approx(0.05 + 0.02)
    assert found.generator_cores == pytest.approx(0.1)


def test_what_was_drawn_and_trained_is_counted_with_its_seconds(tmp_path: Path) -> None:
    rows = [
        {"step": step, "trained_tokens": 300.0, "microbatches": 2.0, "informative_groups": 4.0}
        for step in range(60)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = overheads_of(written(tmp_path, notes(80)))
    assert found.drawn is not None and found.trained is not None
    assert found.drawn.cpu_s == pytest.approx(0.8 * 79)
    assert (found.drawn.tokens, found.drawn.samples, found.drawn.at_once) == (200 * 79, 790, 8.0)
    assert (found.trained.answer_tokens, found.trained.groups) == (300 * 39, 4 * 39)
    assert found.trained.seconds == pytest.approx(0.8 * 79)
    assert found.trained.cpu_s == pytest.approx((0.66 - 0.02 - 0.04) * 79)


def test_torn_lines_and_lines_twice_do_not_count(tmp_path: Path) -> None:
    rows = [row for row in notes(80) for _ in range(2)]
    odd = [{"process": 3}, {"at": "x", "counters": {}}, note("generator-0", 81.0, made=float("nan"))]
    folder = written(tmp_path, [*odd[:2], *rows])
    with (folder / "processes.jsonl").open("a") as file:
        file.write('{"process": "feeder-0", "at": 9')
    assert overheads_of(folder).generator_cores == pytest.approx(0.1)


def test_the_newest_run_that_has_notes_is_taken(tmp_path: Path) -> None:
    spec = make_spec(report=str(tmp_path))
    assert newest_overheads(spec) is None
    for number, seconds in ((1, 80), (2, 5)):
        folder = tmp_path / f"{spec.run}-{number}"
        folder.mkdir()
        written(folder, notes(seconds))
    (tmp_path / f"{spec.run}-other-3").mkdir()
    found = newest_overheads(spec)
    assert found is not None and found[0].name == f"{spec.run}-1" and found[1].seconds == 79.0


@pytest.mark.parametrize("rows", [[], notes(5)])
def test_a_folder_without_enough_notes_is_refused(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ProfilingFailed, match=str(tmp_path.name)):
        overheads_of(written(tmp_path, rows))
    with pytest.raises(ProfilingFailed, match="report folder"):
        overheads_of(tmp_path / "none")


OVERHEADS: dict[str, Any] = {
    "steady_cores": 0.3, "generator_cores": 0.1, "iteration_s": 0.07, "samples": 1, "seconds": 1.0,
}  # fmt: skip


def test_overheads_take_cores_from_engines_and_learner() -> None:
    plain, found = known_profile(), known_profile(overheads=OVERHEADS)
    assert cores_for_work(plain) == 2
    assert cores_for_work(found) == pytest.approx(1.7)
    assert measured_engine(found).cores == pytest.approx(measured_engine(plain).cores + 0.1)
    assert measured_learner(found).step_s == pytest.approx(measured_learner(plain).step_s + 0.07)


def test_a_run_in_which_all_took_twice_as_long_makes_times_twice_as_long() -> None:
    plain = known_profile()
    engine, learner = measured_engine(plain), measured_learner(plain, trained=1.0)
    steps, samples = 1000, 1000 * 32 / 25
    attended = 7 + 25 / 2
    drawn_s = steps * engine.beside(32) * engine.batch_s[32] + samples * 1.1 * 7 * engine.prefill_s
    drawn_s += steps * 1.1 * engine.context_s * 32 * attended
    drawn_s += steps * 1.1 * engine.fill_s * share_filled(samples / steps)
    trained_s = 1.2 * (64 * learner.microbatch_s + 640 * 32 * (learner.token_s - OTHER_S / 32))
    again = known_profile(
        overheads=OVERHEADS
        | {
            "drawn": {"cpu_s": 2 * drawn_s, "tokens": 32_000, "samples": round(samples), "at_once": 32.0},
            "trained": {
                "cpu_s": 2 * trained_s, "seconds": 3 * trained_s, "answer_tokens": 640 * 25, "groups": 320,
                "micro_batches": 64,
            },
        }
    )  # fmt: skip
    assert measured_engine(again).beside(32) == pytest.approx(2 * engine.beside(32), rel=0.02)
    assert measured_learner(again).beside == pytest.approx(2 * 1.2, rel=0.02)
    assert measured_learner(again).cores == learner.cores
    # engines were slowed only while the learner computed: here half of the time
    assert again.overheads is not None
    rarely = again.overheads.model_copy(update={"seconds": 6 * trained_s})
    found = measured_engine(again.model_copy(update={"overheads": rarely}))
    assert found.beside(32) - 1 == pytest.approx(2 * (2 * engine.beside(32) - 1), rel=0.04)
