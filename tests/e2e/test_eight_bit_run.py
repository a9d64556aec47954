"""The whole loop with weights in eight bits in the engine: verified, corrected for, and drawn again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tests.factories import make_spec
from tests.harness import running, trained_ids

SPEC = make_spec(
    generator={"quantization": "int8", "slots": 16},
    loss={"correction": "truncated", "correct_fresh": True},
    algorithm={"iterations": 3, "groups": 8, "group_size": 4, "learning_rate": 3e-3},
    trainer={"bundle_tokens": 64},
)


@pytest.mark.timeout(300)
def test_a_run_draws_by_rounded_weights_and_its_samples_come_again(
    tmp_path: Path, kafka: str, tiny_model: Path
) -> None:
    with running(tmp_path / "rounded", kafka, SPEC, tiny_model) as run:
        run.wait_for_end()
        steps = run.steps()
        assert sorted(trained_ids(steps)) == [(group, one) for group in range(24) for one in range(4)]
        assert all((step.versions == step.iteration).all() for step in steps)
        assert not run.dead_letters()
        assert min(step.metrics["logprob_gap"] for step in steps) > 1e-3, "no weight was rounded"
        words = ["--step", "1", "--regenerate", "--json"]
        result = CliRunner().invoke(app, ["replay", run.record.id, "--store", run.store.url, *words])
        assert result.exit_code == 0, result.output
        said = json.loads(result.stdout)
        assert said["regenerated"]["equal"]
        assert said["regenerated"]["samples"] == 32
