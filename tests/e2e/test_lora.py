"""The whole loop with an adapter: small versions, the same logprobs on both sides, and a model at the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from flows.checkpoints.export_run import export_run
from infra.weights.adapter_tensors import layers_of
from infra.weights.folder import ModelFolder
from infra.weights.versions import WeightStore
from tests.factories import make_spec
from tests.harness import running

SPEC = make_spec(
    model={"lora": {"rank": 4, "alpha": 8.0}},
    algorithm={"iterations": 4, "groups": 8, "group_size": 8, "learning_rate": 1e-2},
    trainer={"bundle_tokens": 64},
)


@pytest.mark.thorough
def test_an_adapter_learns_and_only_it_travels(tmp_path: Path, kafka: str, tiny_model: Path) -> None:
    with running(tmp_path, kafka, SPEC, tiny_model) as run:
        run.wait_for_end()
        steps = run.steps()
        assert [step.iteration for step in steps] == list(range(4))
        for step in steps:
            assert np.isfinite(step.losses).all()
            assert step.metrics["logprob_gap"] < 1e-3, "the merged layers are not what the trainer computes"
            assert step.metrics["gap_tokens"] == step.metrics["trained_tokens"]
        rewards = [float(step.rewards.mean()) for step in steps]
        assert max(rewards[-2:]) > rewards[0]
        weights, base = WeightStore(run.store, run.record.id), ModelFolder(tiny_model)
        size = sum(file.stat().st_size for file in base.files)
        for step in steps:
            manifest = weights.fetch(step.version_out, root=step.root_out)[0]
            assert manifest.base == base.root
            assert len(layers_of(manifest.digests)) == 14
            assert manifest.size < size / 4
        exported = export_run(run.record, run.store, tmp_path / "model")
        assert exported.version == 4
        AutoModelForCausalLM.from_pretrained(exported.folder)
        assert not run.dead_letters()
