"""The whole loop: feeder, vLLM generator, Kafka, trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from flows.cli import app
from infra.supervise.children import kill
from infra.weights.versions import WeightStore
from schemas.identity import digest_of_seeds, sample_id
from schemas.messages import StepRecord, WeightsAnnouncement
from tests.factories import make_spec
from tests.harness import Run, running, trained_ids

ALGORITHM: dict[str, Any] = {"iterations": 4, "groups": 8, "group_size": 4, "learning_rate": 3e-3}
SYNC = make_spec(algorithm=ALGORITHM, evaluation={"problems": 8}, trainer={"bundle_tokens": 64})
ASYNC = make_spec(
    algorithm={**ALGORITHM, "mode": "async", "staleness": 1.5, "optimizer_steps": 2},
    loss={"correction": "decoupled", "kl": 0.01},
    placement={"generators": 2},
)


def test_a_sync_run_is_on_policy_and_its_ledger_complete(
    tmp_path: Path, kafka: str, tiny_model: Path
) -> None:
    with running(tmp_path, kafka, SYNC, tiny_model) as run:
        run.wait_for_end()
        steps, samples = run.steps(), run.samples()
        assert [step.iteration for step in steps] == [0, 1, 2, 3]
        expected = [(group, index) for group in range(32) for index in range(4)]
        assert sorted(trained_ids(steps)) == expected
        by_place = {}
        for sample in samples:
            by_place.setdefault((sample.group, sample.index), sample)
        for step in steps:
            assert (step.versions == step.iteration).all()
            assert step.metrics["logprob_gap"] < 1e-3, "trainer and generator disagree on the same weights"
            assert step.metrics["gap_tokens"] == step.metrics["trained_tokens"]
            assert int(step.microbatches.sum()) == len(step.groups)
            keys = zip(step.groups.tolist(), step.indexes.tolist(), strict=True)
            trained = [by_place[key] for key in keys]
            assert [sample.true_length for sample in trained] == step.lengths.tolist()
            assert digest_of_seeds(sample.seed for sample in trained) == step.seeds_digest
        weights = WeightStore(run.store, run.record.id)
        announced = run.read("weights", WeightsAnnouncement)
        assert [a.version for a in announced] == [0, 1, 2, 3, 4]
        for announcement, step in zip(announced[1:], steps, strict=True):
            assert weights.fetch(announcement.version, root=step.root_out)
        first, last = run.evaluations()
        assert (first.version, last.version) == (0, 4)
        assert len(last.rewards) == 8
        assert not run.dead_letters()
    trained_again(run, tmp_path / "again", kafka, tiny_model)


def trained_again(recorded: Run, folder: Path, kafka: str, model: Path) -> None:
    """Offline: with a trainer alone, which needs neither feeder nor generators."""
    spec = make_spec(
        algorithm={**ALGORITHM, "mode": "offline", "recorded": recorded.record.id},
        loss={"correction": "truncated", "kl": 0.05, "reference": "samples"},
    )
    run = Run(folder, kafka, spec, model, recorded.store.url)
    try:
        run.start("trainer")
        run.wait_for_end()
        assert sorted(trained_ids(run.steps())) == sorted(trained_ids(recorded.steps()))
        assert WeightStore(run.store, run.record.id).versions() == [0, 1, 2, 3, 4]
    finally:
        for process in run.processes.values():
            kill(process)


def test_an_async_run_overlaps_within_its_bound_and_drops_nothing(
    tmp_path: Path, kafka: str, tiny_model: Path
) -> None:
    with running(tmp_path, kafka, ASYNC, tiny_model, generators=2) as run:
        with run.standing_still("trainer-0"):  # or the first one that is ready has made all before the other
            run.wait_for_generators(2)
        run.wait_for_end()
        steps, samples = run.steps(), run.samples()
        assert [(s.iteration, s.last_of_iteration) for s in steps] == [
            (i, m) for i in range(4) for m in (False, True)
        ]
        made = {(sample.group, sample.index) for sample in samples}
        assert sorted(trained_ids(steps)) == sorted(made)
        assert len({sample.generator for sample in samples}) == 2
        staleness = np.concatenate([step.iteration - step.versions for step in steps])
        assert staleness.min() >= 0
        assert staleness.max() <= 2
        assert staleness.mean() <= 1.5
        assert staleness.max() >= 1, "nothing was generated ahead: this run did not overlap"
        assert not run.dead_letters()
        changed = {sample.id for sample in samples if sample.versions.size > 1}
    drawn_again(run, max(steps, key=lambda step: len(changed.intersection(ids_of(step)))))


def ids_of(step: StepRecord) -> list[str]:
    return [sample_id(*pair) for pair in zip(step.groups.tolist(), step.indexes.tolist(), strict=True)]


def drawn_again(recorded: Run, step: StepRecord) -> None:
    """What generators said of a step is true: its samples and rewards come again, bit by bit."""
    words = ["--step", str(step.step), "--regenerate", "--rewards", "--json"]
    result = CliRunner().invoke(app, ["replay", recorded.record.id, "--store", recorded.store.url, *words])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["regenerated"]["equal"] and said["rewards"]["equal"]
    assert said["regenerated"]["samples"] == said["rewards"]["samples"] == len(step.groups)
