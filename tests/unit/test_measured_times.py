"""Times of measured hardware: as the profile says, corrected beyond it, and refused of something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.planning.allocating import PlanGoal
from flows.planning.hardware import HARDWARE
from flows.planning.machine_pools import PlanError
from flows.planning.model_shape import ShapeError, shape_of
from flows.planning.profile_file import write_profile
from flows.planning.profile_identity import WrongProfile, profiled_settings
from flows.planning.profile_times import measured_engine, measured_learner
from flows.planning.profiled_learner import ProfilingFailed
from flows.planning.table_times import TableTimes
from flows.plans.measured_times import MeasuredTimes
from flows.plans.named_profiles import HardwareProfile, hardware_of_profile, named_profiles
from flows.plans.planning_inputs import planning_inputs
from flows.plans.profiling import ProfileAsked, profile_of_run
from flows.plans.run_plan import plan_run
from schemas.loading import load_run_file
from schemas.profile import Profile
from schemas.runspec import RunSpec
from tests.factories import make_spec
from tests.planning import demand_of, plan_folder
from tests.profiles import known_profile

CONFIG = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip
SHAPE = shape_of(CONFIG)
H100 = "torch 2.9; transformers 4.57; NVIDIA H100 80GB HBM3"


def profile_of(spec: RunSpec, **identity: Any) -> Profile:
    """The profile that a run file would have of one H100."""
    given = {"machine": H100, "parameters": SHAPE.parameters, "settings": profiled_settings(spec), **identity}
    return known_profile(identity=given, generation={"memory_tokens": 1_000_000})


def times_of(hardware: str = "H100", **identity: Any) -> MeasuredTimes:
    spec, demand = make_spec(), demand_of()
    table = TableTimes(spec, SHAPE, demand)
    one = HardwareProfile(hardware, profile_of(spec, **identity), "h100.yaml")
    return MeasuredTimes(spec, [one], demand, [(7, 20)], lambda: table, list(HARDWARE))


def test_as_it_was_measured_the_profile_says_it() -> None:
    times = times_of()
    profile = times.profiles[0].profile
    assert times.engine("H100", 1, 64).batch_s == measured_engine(profile, slots=64).batch_s
    assert times.engine("H100", 1, 64).beside_step == 1  # it has a GPU for itself
    learner = times.learner("h100", 1)
    assert learner is not None
    assert learner.token_s == measured_learner(profile, lengths=[(7, 20)]).token_s
    assert times.engine_source("H100", 1, 64) == times.learner_source("H100", 1) == "measured, h100.yaml"


def test_more_devices_ranks_and_slots_come_from_the_corrected_table() -> None:
    times = times_of()
    table = times.table()
    assert times.tensor_parallel("H100", 8) == [1, 2, 4, 8]
    assert times.engine_source("H100", 2, 64) == "from the hardware table, corrected by h100.yaml"
    assert times.learner_source("H100", 8) == times.engine_source("H100", 2, 64)
    plain, one = table.engine("H100", 1, 64), times.engine("H100", 1, 64)
    context = times.demand.context

    def step_s(engine: Any) -> float:
        return float(engine.batch_s[64] + engine.context_s * 64 * context)

    ratio = step_s(one) / step_s(plain)
    assert ratio > 1.3  # or this test would show nothing
    spreads = [one.spread]
    for devices in (2, 4, 8):
        found = times.engine("H100", devices, 64)
        assert 1 < step_s(found) / step_s(table.engine("H100", devices, 64)) < ratio
        assert found.install_s == one.install_s
        spreads.append(found.spread)
    assert spreads == sorted(spreads)
    assert spreads[-1] < 0.25
    far = times.most_slots("H100", 1)
    assert far > 128  # twice as many as were measured
    assert times.engine("H100", 1, far).slots == far
    ranks = [times.learner("H100", many) for many in (1, 2, 8)]
    assert all(one is not None and one.version_bytes == 1_000_000 for one in ranks)
    seconds = [one.token_s for one in ranks if one]
    assert seconds == sorted(seconds, reverse=True)


def test_other_hardware_is_not_corrected() -> None:
    times = times_of()
    assert times.engine("A100", 1, 8) == times.table().engine("A100", 1, 8)
    assert "not measured" in times.learner_source("A100", 2)


def test_a_cpu_is_widened_and_never_corrected_by_the_table() -> None:
    times = times_of("CPU", machine="torch; a CPU")
    assert times.tensor_parallel("CPU", 16) == [1]
    assert times.most_slots("CPU", 1) == 128
    wide = times.engine("CPU", 1, 128)
    assert wide.batch_s == measured_engine(times.profiles[0].profile, slots=128, threads=1).batch_s
    assert wide.spread > times.engine("CPU", 1, 64).spread
    assert times.engine_source("CPU", 1, 128) == "measured, h100.yaml"


def test_of_a_model_that_nobody_has_counted_the_profile_alone_serves() -> None:
    def uncounted() -> TableTimes:
        raise ShapeError("nobody has counted it")

    times = times_of()
    times = MeasuredTimes(times.spec, times.profiles, times.demand, times.lengths, uncounted, list(HARDWARE))
    assert times.tensor_parallel("H100", 8) == [1]
    assert times.most_slots("H100", 1) == 128
    learner = times.learner("H100", 4)
    assert learner is not None
    assert learner.spread > 0.2
    assert times.learner_source("H100", 4) == "measured, h100.yaml"
    assert times.room_in_turns("H100", 1) is None


def test_measured_engines_in_turns_have_the_memory_that_the_table_says() -> None:
    times = times_of()
    for hardware in ("H100", "A100"):  # measured, and not
        room = times.room_in_turns(hardware, 1)
        assert room is not None and room.taken == pytest.approx(0.45 * room.whole)
    assert times_of("CPU", machine="torch; a CPU").room_in_turns("CPU", 1) is None


@pytest.mark.parametrize(
    ("machine", "hardware"),
    [(H100, "H100"), ("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100"), ("a CPU; AVX512", "CPU")],
)
def test_the_hardware_of_a_profile_is_a_word_of_its_machine(machine: str, hardware: str) -> None:
    profile = known_profile(identity={"machine": machine})
    assert hardware_of_profile(profile, list(HARDWARE)) == hardware


RUN_FILE = """
run: planned
task: {python: task.py}
model: {path: model}
sampling: {max_tokens: 600, max_prompt_tokens: 50}
algorithm: {mode: async, staleness: 1, iterations: 20, groups: 8, group_size: 4}
trainer: {microbatch_tokens: 4096}
placement:
  machines:
    near: {hardware: H100, devices: 4, profile: h100.yaml}
    more: {hardware: H100, devices: 2}
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = plan_folder(tmp_path, monkeypatch, config=CONFIG, run_file=RUN_FILE)
    write_profile(profile_of(load_run_file(str(file), [])), tmp_path / "h100.yaml")
    return file


def test_a_plan_says_that_a_named_profile_corrects_the_table(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.plans.run_plan._BUDGET", 0)
    result = CliRunner().invoke(app, ["plan", str(run_file), "--json"])
    assert result.exit_code == 0, result.output
    sources = json.loads(result.stdout)["sources"]
    assert any(str(run_file.with_name("h100.yaml")) in one and "H100" in one for one in sources)
    assert any("measured with the first weights" in one for one in sources)


def test_a_profile_holds_for_all_machines_of_its_hardware(run_file: Path) -> None:
    inputs = planning_inputs(load_run_file(str(run_file), []))
    said = [inputs.times.engine_source("H100", devices, 8) for devices in (1, 2)]
    assert said[0].startswith("measured")
    assert "corrected by" in said[1]
    assert all(pool.link is not None for pool in inputs.pools)


@pytest.mark.parametrize(
    ("changes", "identity", "message"),
    [
        ([], {"machine": "NVIDIA H200"}, "near.profile: it was made on 'NVIDIA H200', and these"),
        ([], {"machine": "a CPU"}, "these machines have H100. Name a profile"),
        ([], {"parameters": 7_000_000_000}, "the model: it has 7,000,000,000 parameters there"),
        (["model.dtype=bfloat16"], {}, "the setting model.dtype: it was"),
    ],
)
def test_profiles_of_something_else_are_refused(
    run_file: Path, changes: list[str], identity: dict[str, Any], message: str
) -> None:
    write_profile(profile_of(load_run_file(str(run_file), []), **identity), run_file.with_name("h100.yaml"))
    spec = load_run_file(str(run_file), changes)
    with pytest.raises(WrongProfile, match=message):
        named_profiles(spec, None, lambda: SHAPE, list(HARDWARE))


def test_a_kind_of_hardware_has_one_profile(run_file: Path) -> None:
    write_profile(profile_of(load_run_file(str(run_file), [])), run_file.with_name("other.yaml"))
    spec = load_run_file(str(run_file), ["placement.machines.more.profile=other.yaml"])
    with pytest.raises(PlanError, match=r"more\.profile: .*: a kind of hardware has one profile"):
        named_profiles(spec, None, lambda: SHAPE, list(HARDWARE))


def test_a_profile_that_is_not_there_is_named(run_file: Path) -> None:
    wrong = ["--set", "placement.machines.near.profile=no.yaml"]
    result = CliRunner().invoke(app, ["plan", str(run_file), *wrong])
    assert result.exit_code in (2, 3)
    assert "no.yaml: no such file" in result.output.replace("\n", " ")


SERVED = ["generator.engine=served", "placement.machines.near.use=[generate, train]"]


def test_a_plan_with_servers_takes_a_profile_of_another_engine_and_no_turns(run_file: Path) -> None:
    """A server keeps its memory while it rests, so nothing else fits there."""
    spec = load_run_file(str(run_file), SERVED)
    inputs = planning_inputs(spec)
    assert inputs.times.engine_source("H100", 1, 8).startswith("measured")
    plan = plan_run(inputs, PlanGoal())
    assert not any(one.split.takes_turns for one in (plan.chosen, *plan.others))
    with pytest.raises(WrongProfile, match=r"the setting generator\.tensor_parallel: it was 1, and is 2"):
        planning_inputs(load_run_file(str(run_file), [*SERVED, "generator.tensor_parallel=2"]))


def test_a_plan_with_servers_has_to_know_their_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RUN_FILE[: RUN_FILE.index("placement:")] + "generator: {engine: served}\n"
    file = plan_folder(tmp_path, monkeypatch, config=CONFIG, run_file=text)
    with pytest.raises(PlanError, match="servers draw, and nobody says on which machines"):
        planning_inputs(load_run_file(str(file), []))


def test_the_steps_of_a_server_are_not_profiled(run_file: Path) -> None:
    with pytest.raises(ProfilingFailed, match=r"tells of tokens and not of decode steps.*engine: vllm"):
        profile_of_run(ProfileAsked(str(run_file), tuple(SERVED)), lambda share, text: None, print)
