"""The whole loop with weights in eight bits in the engine: verified, corrected for, and drawn again.

The rest of a run on one small GPU is there, too: an adapter beside a base in four bits, and turns.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from consumers.steps.telling import largest_gap
from flows.checkpoints.quantizing import quantize_model
from flows.cli import app
from infra.roles.turns import OTHERS_TURN
from infra.weights.folder import ModelFolder
from infra.weights.versions import WeightStore
from schemas.messages import WAIT, Heartbeat
from tests.factories import make_spec
from tests.harness import running, trained_ids

SPEC = make_spec(
    model={"dtype": "bfloat16", "lora": {"rank": 4}},
    generator={"quantization": "int8", "slots": 16},
    loss={"correction": "truncated", "correct_fresh": True},
    algorithm={"iterations": 2, "groups": 8, "group_size": 4, "learning_rate": 3e-2},
    trainer={"bundle_tokens": 64, "gradient_checkpointing": True},
    placement={"kind": "colocated"},
)


@pytest.mark.thorough
def test_a_run_draws_by_rounded_weights_and_its_samples_come_again(
    tmp_path: Path, kafka: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))  # for the locks of turns
    base = tmp_path / "base"
    quantize_model(tiny_model, base)
    with running(tmp_path / "rounded", kafka, SPEC, base) as run:
        run.wait_for_end()
        steps = run.steps()
        assert sorted(trained_ids(steps)) == [(group, one) for group in range(16) for one in range(4)]
        assert all((step.versions == step.iteration).all() for step in steps)
        assert not run.dead_letters()
        gaps = [step.metrics["logprob_gap"] for step in steps]
        assert min(gaps) > 0.3, "no weight was rounded to eight bits: bfloat16 alone is nearer"
        assert max(gaps) < largest_gap(SPEC)
        assert all(step.metrics["gap_tokens"] == step.metrics["trained_tokens"] for step in steps)
        last = steps[-1]
        manifest = WeightStore(run.store, run.record.id).fetch(last.version_out, root=last.root_out)[0]
        assert manifest.base == ModelFolder(base).root, "the adapter belongs to another base"
        beats = [beat for beat in run.read("status", Heartbeat) if beat.role == "generator"]
        assert dict(beats[-1].causes)[WAIT + OTHERS_TURN] > 0
        words = ["--step", "1", "--regenerate", "--json"]
        result = CliRunner().invoke(app, ["replay", run.record.id, "--store", run.store.url, *words])
        assert result.exit_code == 0, result.output
        said = json.loads(result.stdout)
        assert said["regenerated"]["equal"]
        assert said["regenerated"]["samples"] == 32
