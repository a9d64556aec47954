"""The run files for large models: each fits the machines that it names, and can be planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.large.math_reward import last_number, reward
from flows.planning.allocating import PlanGoal
from flows.plans.given_split import given_split
from flows.plans.plan_rows import settings_words
from flows.plans.planning_inputs import planning_inputs
from flows.plans.prediction import estimated_s
from flows.plans.run_plan import plan_run
from flows.plans.simulated_split import Scaled
from flows.run.checks import problems_of
from schemas.loading import load_run_file
from tests.harness import ROOT

FILES = sorted((ROOT / "examples" / "large").glob("*.yaml"))
GPUS = {"one_node": 8, "two_nodes": 8, "two_sites": 4}  # of the trainer's machine


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_large_run_file_fits_the_machines_that_it_names(file: Path) -> None:
    spec = load_run_file(file)
    here = spec.trainer.ranks - spec.placement.ranks.elsewhere + spec.placement.generators
    assert here <= GPUS[file.stem]
    inputs = planning_inputs(spec, mean_length=1500)
    own = dict.fromkeys(spec.placement.machines, 8) if not spec.placement.generators else None
    split = given_split(inputs, own and {list(own)[-1]: 8})
    assert 1 < estimated_s(inputs, split, Scaled()) < 3600


@pytest.mark.parametrize(
    ("file", "machines"),
    [*((file, {}) for file in FILES), (ROOT / "examples/large/two_nodes.yaml", {"count": 4, "devices": 4})],
    ids=[*(file.stem for file in FILES), "four_nodes"],
)
def test_a_run_takes_the_settings_of_its_plan(
    file: Path, machines: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_BUDGET", "_SAMPLES", "_SAMPLES_TO_COMPARE"):
        monkeypatch.setattr(f"flows.plans.run_plan.{name}", 0)
    changes = [f"placement.machines.node.{name}={many}" for name, many in machines.items()]
    plan = plan_run(planning_inputs(load_run_file(file, changes), mean_length=1500), PlanGoal())
    settings = settings_words(plan).replace("--set ", "").split()
    gpus = [str(number) for number in range(machines.get("devices", GPUS[file.stem]))]
    monkeypatch.setattr("flows.run.checks.visible_gpus", lambda: gpus)
    spec = load_run_file(file, [*changes, *settings])
    assert not [one for one in problems_of(spec) if "GPU" in one]
    ranks = spec.trainer.ranks - spec.placement.ranks.elsewhere
    assert ranks == min(plan.chosen.split.trainer.devices, len(gpus))


def test_configs_have_as_many_weights_as_they_say() -> None:
    for name, billions in (("7b", 7.6), ("32b", 32.8)):
        config = json.loads((ROOT / f"examples/large/models/{name}/config.json").read_text())
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
        attention = 2 * hidden * hidden + 2 * hidden * (hidden // heads) * keys
        layer = attention + 3 * hidden * inner
        total = config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * hidden
        assert total / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("completion", "earned"),
    [("so 3 + 4 = 7", 1.0), ("7.0 apples.", 1.0), ("#### 1,007", 0.0), ("none", 0.0), ("", 0.0)],
)
def test_the_last_number_counts(completion: str, earned: float) -> None:
    assert reward({"answer": "3 + 4 is 7\n#### 7"}, completion) == earned
    assert last_number("#### 1,234.5") == 1234.5
