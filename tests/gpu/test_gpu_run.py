"""A whole small run on one GPU, which engine and learner share with the settings of `streamrl demo`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.cli.demo import _ONE_GPU
from infra.errors import Explained
from infra.stack.kafka_install import jars_present, java_command
from infra.stack.paths import StackPaths
from schemas.loading import changes_of
from tests.factories import make_spec, make_tiny_model
from tests.harness import running, trained_ids


def broker_missing() -> bool:
    """Whether there are no jars of Kafka here, or no Java that runs them."""
    try:
        java_command()
    except Explained:
        return True
    return not jars_present(StackPaths.locate())


@pytest.mark.skipif(broker_missing(), reason="Kafka's jars or Java are missing")
def test_engine_and_learner_share_a_gpu(tmp_path: Path, kafka: str) -> None:
    shared = changes_of(_ONE_GPU)
    spec = make_spec(
        **shared, trainer={"bundle_tokens": 64},
        algorithm={"iterations": 3, "groups": 8, "group_size": 4, "learning_rate": 3e-3},
        deadlines={"progress_s": 300, "start_s": 300},
    )  # fmt: skip
    assert spec.placement.share_gpus
    with running(tmp_path, kafka, spec, make_tiny_model(tmp_path / "model", width=128)) as run:
        run.wait_for_end(deadline_s=400)
        steps = run.steps()
    assert sorted(trained_ids(steps)) == [(group, index) for group in range(24) for index in range(4)]
    assert len({step.root_out for step in steps}) == 3
    assert all(step.metrics["logprob_gap"] < 0.05 for step in steps)
    assert not run.dead_letters()
