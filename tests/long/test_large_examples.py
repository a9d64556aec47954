"""The run files for large models: each says what its plan says, and has the settings of that plan."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import save_file

from examples.large.math_reward import last_number, reward
from flows.planning.allocating import PlanGoal
from flows.planning.learner_memory import counts_for_memory, learner_memory
from flows.planning.machine_pools import PlanError
from flows.planning.main_memory import GIB_BYTES
from flows.plans.given_split import given_split
from flows.plans.plan_rows import beyond_settings, figure, settings_words, split_row
from flows.plans.planning_inputs import PlanningInputs, planning_inputs, shape_at_hand
from flows.plans.run_plan import RunPlan, plan_run
from flows.plans.simulated_split import iterations_for, simulated_split
from flows.run.checks import problems_of
from infra.weights.four_bits import rounded
from schemas.loading import load_run_file
from tests.harness import ROOT

LARGE = ROOT / "examples" / "large"
NAMES = sorted(file.stem for file in LARGE.glob("*.yaml"))
GPUS = {
    "one_consumer_gpu": 1,
    "one_node": 8,
    "two_nodes": 8,
    "three_nodes": 8,
    "two_sites": 4,
}  # of the run's machine
SMALL = LARGE / "one_consumer_gpu.yaml"


def header(name: str) -> str:
    """The comment at the top of a run file, as one line."""
    lines = (LARGE / f"{name}.yaml").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line.removeprefix("#").strip() for line in lines[:first])


def row(name: str) -> list[str]:
    """The cells of a run file's row in the table of docs/how-to/ranks.md."""
    lines = (ROOT / "docs/how-to/ranks.md").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"| `{name}.yaml` |"))
    return [cell.strip() for cell in found.strip("|").split("|")]


def asked(name: str) -> tuple[float, PlanGoal]:
    """The mean length and the goal of the plan that a header says how to ask for."""
    found = re.search(
        rf"streamrl plan examples/large/{name}\.yaml --mean-length (\d+)( --goal cost)?", header(name)
    )
    assert found, f"the header of {name}.yaml has no command of a plan"
    return float(found[1]), PlanGoal("cost" if found[2] else "time")


@cache
def inputs_of(name: str, *changes: str) -> PlanningInputs:
    return planning_inputs(load_run_file(LARGE / f"{name}.yaml", changes), mean_length=asked(name)[0])


@cache
def planned(name: str) -> RunPlan:
    return plan_run(inputs_of(name), asked(name)[1])


def gib(size: float) -> str:
    return f"{size / GIB_BYTES:.0f}"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_as_it_is_written_is_what_its_plan_chose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, inputs = planned(name), inputs_of(name)
    changed = load_run_file(LARGE / f"{name}.yaml", settings_words(plan).replace("--set ", "").split())
    assert changed == inputs.spec
    monkeypatch.setattr("flows.run.checks.visible_gpus", lambda: [str(one) for one in range(GPUS[name])])
    assert not [one for one in problems_of(inputs.spec) if "GPU" in one]
    joining = [int(many) for many in re.findall(r"--generators (\d+)", header(name))]
    own = {plan.chosen.split.generators[0][0].pool.name: sum(joining)} if joining else None
    assert split_row(given_split(inputs, own)) == split_row(plan.chosen.split)


@pytest.mark.parametrize("name", NAMES)
def test_headers_and_the_table_say_the_figures_of_the_plan(name: str) -> None:
    plan, text, cells = planned(name), header(name), row(name)
    step, learner = plan.step_s, plan.chosen.split.trainer.learner
    took = f"{figure(step.value)} s ({figure(step.low)} to {figure(step.high)})"
    cost = f"{plan.cost_per_1000.value:.2g}".removeprefix("0")
    assert learner.room is not None
    assert f"a step takes {took}, and 1,000 samples cost {cost}" in text
    held = re.search(r"(\d+) of (?:a|the) GPU's (\d+) GiB", text)
    assert held and held.groups() == (gib(learner.room.taken), gib(learner.room.whole))
    assert cells[2:] == [took, cost, f"{held[1]} of {held[2]} GiB"]
    commands = [
        line.partition(": ")[2].replace("RUN", f"{plan.spec.run}-1")
        for line in beyond_settings(plan.chosen.split, plan.spec.placement.store)
        if "streamrl join" in line
    ]
    assert all(command in text for command in commands)
    assert text.count("streamrl join") == len(commands)
    assert f"streamrl run examples/large/{name}.yaml" in text
    for pool, size in plan.chosen.figures.bytes_per_step.items():
        if size:
            busy = plan.chosen.figures.link_busy[pool]
            assert (
                f"{size / 1e6:.0f} MB of weights cross the link for a step, which takes {busy:.0%}".replace(
                    "%", " %"
                )
                in text
            )


def test_a_header_says_what_the_other_split_would_take() -> None:
    """That of GPUs of their own, beside the one in turns."""
    text = header("one_node")
    words = shlex.split(text[text.index("--set placement.kind") : text.index(" models/7b holds")])
    inputs = inputs_of("one_node", *(word for word in words if word != "--set"))
    split = given_split(inputs)
    iterations = iterations_for(inputs.spec, split.lookahead, samples=4000)
    found = simulated_split(inputs.spec, split, inputs.workload, iterations=iterations)
    assert split.trainer.learner.room is not None
    said = f"a step takes {figure(found.step_s)} s, and a rank {gib(split.trainer.learner.room.taken)} GiB"
    assert said in text


def test_a_plan_of_more_machines_gives_settings_that_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_BUDGET", "_SAMPLES", "_SAMPLES_TO_COMPARE"):
        monkeypatch.setattr(f"flows.plans.run_plan.{name}", 0)
    changes = [f"placement.machines.node.{name}=4" for name in ("count", "devices")]
    plan = plan_run(inputs_of("two_nodes", *changes), PlanGoal())
    settings = settings_words(plan).replace("--set ", "").split()
    monkeypatch.setattr("flows.run.checks.visible_gpus", lambda: ["0", "1", "2", "3"])
    spec = load_run_file(LARGE / "two_nodes.yaml", [*changes, *settings])
    assert not [one for one in problems_of(spec) if "GPU" in one]
    ranks = spec.trainer.ranks - spec.placement.ranks.elsewhere
    assert ranks == min(plan.chosen.split.trainer.devices, 4)


def test_the_trainer_of_one_model_is_on_two_machines() -> None:
    spec = planned("three_nodes").spec
    assert spec.placement.ranks.elsewhere == spec.trainer.ranks - spec.placement.machines["node"].devices == 8
    assert f"--ranks {spec.placement.ranks.elsewhere}" in header("three_nodes")


def test_one_gpu_of_24_gib_holds_what_both_sides_keep() -> None:
    """By the plan; four bits of the base and eight of the engine are needed for it."""
    text, inputs = header("one_consumer_gpu"), inputs_of("one_consumer_gpu")
    ((kind, _),) = planned("one_consumer_gpu").chosen.split.generators
    counts = counts_for_memory(shape_at_hand(inputs.spec, lambda done, what: None))
    kept = {
        four_bits: learner_memory(
            inputs.spec,
            counts,
            1,
            tokens=inputs.spec.trainer.microbatch_tokens,
            on_gpu=True,
            four_bits=four_bits,
        ).kept
        for four_bits in (True, False)
    }
    room = kind.engine.room
    assert (
        room is not None and kept[True] + room.taken < room.whole - 2 * GIB_BYTES
    )  # that the processes take
    assert f"to keep {gib(kept[True])} of them while the engine takes {gib(room.taken)}" in text
    assert f"Without four bits it would keep {gib(kept[False])}" in text
    assert f"in 16 bits the engine's weights alone would take {gib(2 * counts.elements)}" in text
    for change, why in (
        (
            f"model.path={LARGE / 'models/7b'}",
            "the learner keeps 16.1 GiB on each of 1 x RTX 4090, and beside .* 12.0",
        ),
        ("generator.quantization=none", "the memory of all that generates, .* can't hold the model"),
    ):
        with pytest.raises(PlanError, match=why):
            plan_run(inputs_of("one_consumer_gpu", change), PlanGoal())


def test_weights_say_more_of_four_bits_than_a_config_does(tmp_path: Path) -> None:
    """A model that was rounded, and one that was not: both have a config that says so, or does not."""
    import torch

    from flows.plans.planning_inputs import _in_four_bits

    config = json.loads((LARGE / "models/7b-nf4/config.json").read_text())
    assert config.pop("streamrl_four_bits") is True
    assert config == json.loads((LARGE / "models/7b/config.json").read_text())
    plain = torch.randn(8, 64)
    for says in (True, False):
        (tmp_path / "config.json").write_text(json.dumps(config | {"streamrl_four_bits": says}))
        for weight, is_rounded in ((plain.bfloat16(), False), (rounded(plain).whole(), True)):
            save_file({"model.layers.0.self_attn.q_proj.weight": weight}, tmp_path / "model.safetensors")
            assert _in_four_bits(load_run_file(SMALL, [f"model.path={tmp_path}"])) == is_rounded
        (tmp_path / "model.safetensors").unlink()
        assert _in_four_bits(load_run_file(SMALL, [f"model.path={tmp_path}"])) == says


def test_configs_have_as_many_weights_as_they_say() -> None:
    for name, billions in (("7b", 7.6), ("32b", 32.8)):
        config = json.loads((LARGE / f"models/{name}/config.json").read_text())
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
