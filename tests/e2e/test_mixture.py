"""The whole loop with a mixture of experts: the trainer takes the experts that the engine took.

The engine has two ranks with a layer each, so a sample's routes come from both.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from flows.checkpoints.export_run import export_run
from flows.cli import app
from infra.weights.folder import ModelFolder
from infra.weights.versions import WeightStore
from schemas.expert_routes import unpack_routes
from tests.factories import make_spec, make_tiny_mixture
from tests.harness import running

SPEC = make_spec(
    generator={"pipeline_parallel": 2},
    algorithm={"iterations": 2, "groups": 8, "group_size": 4, "learning_rate": 3e-3},
    trainer={"bundle_tokens": 64},
)


def done(words: list[str]) -> Result:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.thorough
def test_a_mixture_learns_by_the_routes_of_its_samples(tmp_path: Path, kafka: str) -> None:
    model = make_tiny_mixture(tmp_path / "mixture", "mixtral")
    with running(tmp_path, kafka, SPEC, model) as run:
        run.wait_for_end()
        steps, samples = run.steps(), run.samples()
        assert [step.iteration for step in steps] == [0, 1]
        for step in steps:
            assert step.metrics["logprob_gap"] < 1e-3, "trainer and generator disagree on the same weights"
            assert step.metrics["gap_tokens"] == step.metrics["trained_tokens"]
        for sample in samples:
            tokens = sample.prompt_tokens.size + sample.tokens.size
            assert unpack_routes(sample.routes, tokens - 1).shape == (tokens - 1, 2, 2)
        words = ["replay", run.record.id, "--store", run.store.url, "--step", "1", "--json"]
        again, drawn = (json.loads(done(words).stdout), json.loads(done([*words, "--regenerate"]).stdout))
        assert again["equal"] and drawn["regenerated"]["equal"], "routes come again, too"
        exported = export_run(run.record, run.store, tmp_path / "exported")
        assert ModelFolder(exported.folder).shapes == ModelFolder(model).shapes
        published = WeightStore(run.store, run.record.id).fetch(2, root=steps[-1].root_out)[1]
        loaded = dict(AutoModelForCausalLM.from_pretrained(exported.folder).named_parameters())
        assert loaded.keys() == published.keys()
        assert all(torch.equal(tensor, published[name]) for name, tensor in loaded.items())
        assert not run.dead_letters()
