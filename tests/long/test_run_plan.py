"""Plans: the best split by simulation, intervals, errors; on the command line, as JSON and as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.planning.allocating import PlanGoal
from flows.planning.machine_pools import MachinePool, PlanError
from flows.planning.stage_times import LearnerTimes
from flows.planning.step_estimate import GeneratorKind, IterationDemand, MachineSplit, TrainerKind
from flows.planning.workload import LogNormalLengths, Workload
from flows.plans.asked_simulation import asked_row, generators_words, simulate_asked
from flows.plans.drawn_factors import drawn_factors
from flows.plans.given_split import given_split
from flows.plans.interval import Interval
from flows.plans.plan_rows import beyond_settings, figure, plan_row, plan_settings
from flows.plans.planning_inputs import KnownLengths, PlanningInputs, demand_of_workload, planning_inputs
from flows.plans.predicted_speed import Prediction
from flows.plans.prediction import estimated_s
from flows.plans.run_plan import RunPlan, interval_around, plan_run
from flows.plans.simulated_split import Scaled, iterations_for, simulated_run
from schemas.balancing import BalanceSection
from schemas.loading import load_run_file
from schemas.runspec import RunSpec
from tests.factories import make_spec
from tests.harness import ROOT
from tests.planning import LINK, TableOfTests, engine_of, plan_folder, pool_of

CONFIG = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip
WORKLOAD = Workload(LogNormalLengths(300, 0.5, 600), LogNormalLengths(50))


def spec_of_test(mode: str = "async", **algorithm: object) -> RunSpec:
    staleness = {"staleness": 2} if mode == "async" else {}
    return make_spec(
        sampling={"max_tokens": 2000, "max_prompt_tokens": 100},
        algorithm={"mode": mode, "iterations": 30, "groups": 8, "group_size": 4, **staleness, **algorithm},
        trainer={"microbatch_tokens": 4096, "bundle_tokens": 1024},
    )


def inputs_of(
    spec: RunSpec, *, token_s: float = 1e-4, machines: int = 3, price: float = 2.0
) -> PlanningInputs:
    times = TableOfTests({"fast": 1.0, "slow": 0.5}, slots=16, token_s=token_s, version_bytes=10**8)
    pools = (
        pool_of("a", machines, 1, price=price),
        pool_of("b", 2, 1, hardware="slow", price=price / 4, site="far", trains=False, link=LINK),
    )
    lengths = KnownLengths(WORKLOAD, "of the test", 0.05)
    return PlanningInputs(spec, pools, times, lengths, demand_of_workload(spec, WORKLOAD))


@pytest.fixture(scope="module", autouse=True)
def few_simulations() -> Iterator[None]:
    """Simulate no longer than these tests need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flows.plans.run_plan._BUDGET", 0)
        patch.setattr("flows.plans.run_plan._SAMPLES", 200)
        patch.setattr("flows.plans.run_plan._SAMPLES_TO_COMPARE", 100)
        yield


@pytest.fixture(scope="module")
def made(few_simulations: None) -> RunPlan:
    return plan_run(inputs_of(spec_of_test()), PlanGoal())


def test_the_chosen_split_is_the_best_of_those_that_were_simulated(made: RunPlan) -> None:
    assert made.chosen.figures.step_s <= made.others[0].figures.step_s * 1.02
    assert made.estimated > made.simulated > 1
    assert made.step_s.low <= made.step_s.value <= made.step_s.high
    assert made.samples_per_s.value == pytest.approx(32 / made.step_s.value)
    assert made.spec.algorithm.staleness == made.chosen.split.lookahead
    assert made.why


def test_the_same_seed_makes_the_same_plan(made: RunPlan) -> None:
    assert plan_row(plan_run(inputs_of(spec_of_test()), PlanGoal())) == plan_row(made)


def test_the_cheapest_plan_costs_no_more_than_the_quickest(made: RunPlan) -> None:
    cheap = plan_run(inputs_of(spec_of_test()), PlanGoal("cost"))
    assert cheap.cost_per_1000.value <= made.cost_per_1000.value * 1.02
    late = cheap.step_s.value
    if late > made.step_s.value * 1.1:
        between = (late + made.step_s.value) / 2
        assert plan_run(inputs_of(spec_of_test()), PlanGoal("cost", between)).step_s.value <= between


def test_prices_scale_the_cost_alone(made: RunPlan) -> None:
    dear = plan_run(inputs_of(spec_of_test(), price=20.0), PlanGoal())
    assert dear.step_s.value == made.step_s.value
    assert dear.cost_per_1000.value == pytest.approx(10 * made.cost_per_1000.value)


def test_no_more_staleness_than_helps() -> None:
    """The trainer is so slow that one iteration ahead is enough."""
    found = plan_run(inputs_of(spec_of_test(), token_s=2e-2), PlanGoal(), may_take_turns=False)
    assert found.chosen.split.lookahead <= 1
    assert found.chosen.figures.trainer["waiting for samples"] < 0.05


def test_in_sync_mode_there_is_no_staleness() -> None:
    found = plan_run(inputs_of(spec_of_test("sync")), PlanGoal())
    assert found.chosen.figures.staleness_max == 0
    assert found.spec.algorithm.mode == "sync"


def test_deadlines_that_none_meets() -> None:
    with pytest.raises(PlanError, match="the quickest takes"):
        plan_run(inputs_of(spec_of_test()), PlanGoal("cost", 1e-3))


def test_intervals() -> None:
    found = interval_around(10.0, [0.0, 0.1, -0.1, 0.05])
    assert found.low < 10 < found.high
    assert found.rate(4.0).low < 4 < found.rate(4.0).high
    assert found.scaled(3.0).high / 3.0 == pytest.approx(found.high / 10)
    unsteady = interval_around(10.0, [0.0], 0.1)  # nothing else is unsure
    assert unsteady.high == pytest.approx(10 * math.exp(1.645 * 0.1))
    assert unsteady.low == pytest.approx(10 * math.exp(-1.645 * 0.1))


def test_draws_shift_nothing_and_vary_each_part_by_its_spread(made: RunPlan) -> None:
    inputs, split = made.inputs, made.chosen.split
    draws = drawn_factors(inputs, split, 8)
    assert len(draws) == 8
    logs = np.log([[one.engine, one.learner, one.link, one.lengths] for one in draws])
    link = max((kind.pool.link.spread for kind, _ in split.generators if kind.pool.link), default=0.0)
    spreads = [split.generators[0][0].engine.spread, split.trainer.learner.spread, link, 0.05]
    assert logs.mean(axis=0) == pytest.approx(0.0, abs=1e-12)
    assert logs.std(axis=0) == pytest.approx(spreads)
    assert interval_around(2.0, logs[:, 3].tolist()).high == pytest.approx(2 * math.exp(1.645 * 0.05))


def test_formulas_know_other_times_and_lengths(made: RunPlan) -> None:
    inputs, split = made.inputs, made.chosen.split
    plain = estimated_s(inputs, split, Scaled())
    assert estimated_s(inputs, split, Scaled(engine=2.0, learner=2.0)) > 1.9 * plain
    assert estimated_s(inputs, split, Scaled(lengths=2.0)) > 1.2 * plain
    assert estimated_s(inputs, split, Scaled(learner=0.5)) <= plain


def test_iterations_for_all_modes() -> None:
    assert iterations_for(spec_of_test(), 2.0, samples=0) == 12
    assert iterations_for(spec_of_test("sync"), 0.0, samples=0) == 2
    assert iterations_for(spec_of_test(iterations=3), 2.0, samples=10**6) == 3


def test_a_prediction_goes_from_one_process_to_another() -> None:
    one = Prediction(Interval(2.0, 1.0, 3.0), Interval(50.0, 40.0, 60.0), simulated=True)
    line = json.dumps({
        "step_s": vars(one.step_s), "samples_per_s": vars(one.samples_per_s), "simulated": True,
    })  # fmt: skip
    assert Prediction.read(line) == one
    assert "predicted 50 samples/s (40 to 60), measured 55: -9.1%, inside" in one.beside(55)
    assert "outside" in one.beside(70)
    with pytest.raises(ValueError, match="Expecting value"):
        Prediction.read("nothing")


def test_asked_simulations() -> None:
    spec = spec_of_test().model_copy()
    inputs = inputs_of(spec)
    plain = simulate_asked(inputs, iterations=6, seed=3)
    again = simulate_asked(inputs, iterations=6, seed=3)
    assert plain.figures == again.figures
    assert simulate_asked(inputs, iterations=6, seed=4).figures != plain.figures
    more = simulate_asked(inputs, generators=["a=2", "b=1"], iterations=6, seed=3)
    assert more.figures.step_s < plain.figures.step_s
    longer = simulate_asked(inputs, lengths="2", iterations=6, seed=3)
    assert longer.figures.step_s > plain.figures.step_s
    failed = simulate_asked(inputs, generators=["2"], failures=["1@0.5+2"], iterations=6, seed=3)
    assert failed.result.drawn_again > 0
    for wrong, message in (
        ({"generators": ["many"]}, "write a number"),
        ({"generators": ["c=2"]}, "no machines c; there are a, b"),
        ({"generators": ["0"]}, "no machine has a generator"),
        ({"failures": ["0"]}, "write GENERATOR@SECOND"),
        ({"failures": ["7@1"]}, "there are 1 generators"), ({"lengths": "0"}, "a number above 0"),
        ({"lengths": "1,x"}, "several, as in 1,3,1"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=message):
            simulate_asked(inputs, **wrong)  # type: ignore[arg-type]


def test_a_site_that_is_elsewhere_has_cores_of_its_own() -> None:
    """The processes of one that is not elsewhere are started here, on the cores of the trainer."""
    times = TableOfTests({"CPU": 1.0}, slots=16)
    for elsewhere in (False, True):
        far = {"generators": 1, "elsewhere": elsewhere, "link_gbit_s": 1, "link_latency_ms": 20}
        spec = make_spec(placement={"generators": 1, "store": "s3://bucket/run", "sites": {"far": far}})
        here = pool_of("here", 1, 2, hardware="CPU", free_cores=1.5)
        lengths = KnownLengths(WORKLOAD, "of the test", 0.05)
        inputs = PlanningInputs(spec, (here,), times, lengths, demand_of_workload(spec, WORKLOAD))
        run = simulated_run(spec, given_split(inputs), WORKLOAD, iterations=2)
        assert run.cores == 1.5
        assert {site.name: site.cores for site in run.sites} == {
            "here": None,
            "far": 2.0 if elsewhere else None,
        }


def test_an_asked_simulation_is_balanced_as_the_run_file_says() -> None:
    spec = spec_of_test()
    balance = BalanceSection(most=4, smoothed=1)
    placement = spec.placement.model_copy(update={"balance": balance})
    inputs = inputs_of(spec.model_copy(update={"placement": placement}), token_s=1e-5, machines=5)
    grown = simulate_asked(inputs, lengths="0.5,2,0.5", iterations=50, start_s=3.0)
    row = asked_row(grown)
    assert row["generators"] == [step.generators for step in grown.result.steps]
    assert [one["after"] for one in row["balance"]] == [one.after for one in grown.result.changes]
    assert max(step.generators for step in grown.result.steps) > 1
    assert row["lengths"] == [0.5, 2.0, 0.5]
    assert "generators, by iterations: 1 for" in generators_words(grown.result)
    middle, end = grown.result.steps[25], grown.result.steps[-1]
    assert middle.tokens > 2 * end.tokens
    assert grown.cost_per_1000 == pytest.approx(grown.result.cost / grown.result.samples * 1000)
    alone = simulate_asked(inputs_of(spec), iterations=6)
    assert alone.cost_per_1000 == pytest.approx(alone.result.cost_per_1000)
    assert asked_row(alone)["balance"] is None


def test_figures_have_three_digits() -> None:
    assert [figure(one) for one in (0.0, 0.01234, 1.234, 12.34, 1234.0)] == [
        "0", "0.0123", "1.23", "12.3", "1,234",
    ]  # fmt: skip


RUN_FILE = """
run: planned
task: {python: task.py}
model: {path: model}
sampling: {max_tokens: 600, max_prompt_tokens: 50}
algorithm: {mode: async, staleness: 1, iterations: 20, groups: 8, group_size: 4}
trainer: {microbatch_tokens: 4096}
placement:
  sites: {far: {link_gbit_s: 10, link_latency_ms: 20}}
  machines:
    near: {hardware: H800, count: 1, devices: 4, price: 2.85}
    cheap: {hardware: H20, count: 1, devices: 2, price: 0.25, site: far}
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return plan_folder(tmp_path, monkeypatch, config=CONFIG, run_file=RUN_FILE)


def test_a_plan_on_the_command_line(run_file: Path) -> None:
    picture, page = run_file.with_name("plan.png"), run_file.with_name("plan.html")
    result = CliRunner().invoke(app, ["plan", str(run_file), "--json", "-o", str(picture)])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["run"] == "planned"
    assert said["step_s"]["low"] <= said["step_s"]["value"] <= said["step_s"]["high"]
    assert {one.partition(":")[0] for one in said["sources"]} >= {"H800", "lengths"}
    assert "not measured" in said["sources"][0]
    assert sum(said["figures"]["generators"].values()) == pytest.approx(1, abs=0.01)
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(
        app, ["plan", str(run_file), "--goal", "cost", "--mean-length", "200", "-o", str(page)]
    )
    assert result.exit_code == 0, result.output
    assert "least cost of a sample" in result.output
    assert "as --mean-length says: log-normal, 200 tokens" in result.output
    assert "--set generator.slots=" in result.output
    assert "data:image/png;base64," in page.read_text()


def test_a_simulation_on_the_command_line(run_file: Path) -> None:
    words = ["simulate", str(run_file), "--set", "placement.sites.far.generators=1", "--seed", "5"]
    first, again = (CliRunner().invoke(app, [*words, "--json"]) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout == again.stdout
    picture = run_file.with_name("simulated.png")
    result = CliRunner().invoke(app, [*words, "--lengths", "1.5", "-o", str(picture)])
    assert result.exit_code == 0, result.output
    assert "samples/s" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--goal", "fame"], "say time or cost"),
        (["-o", "plan.gif"], "ends with .png or .html"),
        (["--deadline", "-3"], "seconds above 0"),
        (["--deadline", "0.000001"], "the quickest takes"),
        (["--mean-length", "9000"], "between 1 and sampling.max_tokens, 600"),
        (["--set", "placement.machines.near.hardware=H8000"], "did you mean H800"),
        (["--set", "placement.machines.near.price=-1"], "greater than or equal to 0"),
        (["--set", "placement.machines.cheap.site=near"], "there is no site 'near'; sites has far"),
        (["--set", "placement.sites.far.link_gbit_s=null"], "has no link: set sites.far.link_gbit_s"),
        (["--set", "placement.machines.cheap.use=[train]"], "machines of a site can't train"),
        (["--set", "placement.machines.near.use=[generate]"], "none of them may train"),
        (["--set", "placement.machines.near.use=[train,train]"], "each use is named once"),
        (["--set", "algorithm.mode=offline"], "nothing is generated"),
        (["--set", "model.path=nowhere"], "has no config.json"),
        (["--profile", "no-such.yaml"], "no-such.yaml"),
    ],
)
def test_plans_that_cannot_be_made(words: list[str], message: str, run_file: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(run_file), *words])
    assert result.exit_code in (2, 3), result.output
    assert message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_settings_leave_no_generator_at_a_site_that_is_not_used(made: RunPlan, run_file: Path) -> None:
    spec = load_run_file(str(run_file), ["placement.sites.near-by={generators: 3}"])
    plan = replace(made, spec=spec)
    found = plan_settings(plan)
    used = {kind.pool.site for kind, _ in plan.chosen.split.generators if kind.pool.site}
    for site in ("far", "near-by"):
        assert (found[f"placement.sites.{site}.generators"] == 0) == (site not in used)
    changes = [f"{name}={value}" for name, value in found.items()]
    assert (
        load_run_file(str(run_file), ["placement.sites.near-by={}", *changes])
        .placement.sites["near-by"]
        .generators
        == 0
    )


def _uneven(split: MachineSplit) -> list[str]:
    return [line for line in beyond_settings(split, "s3://b/runs") if "streamrl join" not in line]


def test_devices_that_no_setting_says_are_said(made: RunPlan) -> None:
    split = made.chosen.split
    assert not _uneven(split)
    wide = [(replace(kind, tensor_parallel=4), count) for kind, count in split.generators]
    alike = replace(split, generators=tuple(wide))
    assert not _uneven(alike)
    settings = plan_settings(replace(made, chosen=replace(made.chosen, split=alike)))
    assert settings["generator.tensor_parallel"] == 4
    stretched = made.spec.generator.model_copy(update={"pipeline_parallel": 2})
    chosen = replace(made.chosen, split=alike)
    settings = plan_settings(
        replace(made, chosen=chosen, spec=made.spec.model_copy(update={"generator": stretched}))
    )
    assert settings["generator.tensor_parallel"] == 2
    mixed = replace(split, generators=(*wide, (replace(wide[0][0], tensor_parallel=2), 1)))
    assert (
        "takes 4 devices: a run file has one generator.tensor_parallel"
        in beyond_settings(mixed, "s3://b/runs")[0]
    )
    assert "generator.tensor_parallel" not in plan_settings(
        replace(made, chosen=replace(made.chosen, split=mixed))
    )
    on_cpu = [
        (replace(kind, pool=replace(kind.pool, hardware="CPU"), tensor_parallel=4), count)
        for kind, count in split.generators
    ]
    cores = replace(split, generators=tuple(on_cpu))
    assert not _uneven(cores)
    assert plan_settings(replace(made, chosen=replace(made.chosen, split=cores)))["generator.threads"] == 4


def _divided(
    made: RunPlan, trains: tuple[MachinePool, int], *generators: tuple[MachinePool, int, int], **more: object
) -> tuple[dict[str, object], list[str]]:
    """Return settings and further lines of a plan. `generators`: where, how many, and devices of each."""
    learner = TrainerKind(trains[0], LearnerTimes(1e-4), trains[1])
    kinds = tuple((GeneratorKind(pool, engine_of(8), each), count) for pool, count, each in generators)
    turns = bool(more.pop("takes_turns", False))
    split = MachineSplit(learner, kinds, 1.0, takes_turns=turns)
    spec = make_spec(**more)
    found = plan_settings(replace(made, spec=spec, chosen=replace(made.chosen, split=split)))
    return found, beyond_settings(split, "s3://b/runs")


def test_a_run_starts_only_the_generators_on_the_trainers_machine(made: RunPlan) -> None:
    one, two = pool_of("a", 1, 8), pool_of("a", 2, 8)
    found, lines = _divided(made, (one, 4), (one, 2, 2))
    assert (found["placement.generators"], lines) == (2, [])
    found, lines = _divided(made, (one, 8), (one, 4, 2), takes_turns=True)
    assert (found["placement.generators"], lines) == (4, [])
    found, lines = _divided(made, (two, 8), (two, 4, 2))
    assert found["placement.generators"] == 0
    assert lines == ["on one further machine of a: streamrl join RUN --store s3://b/runs --generators 4"]
    other = pool_of("b", 4, 8, trains=False)
    found, lines = _divided(made, (one, 4), (one, 2, 2), (other, 11, 2))
    assert found["placement.generators"] == 2
    assert lines == [
        "on each of 2 machines of b: streamrl join RUN --store s3://b/runs --generators 4",
        "on one machine of b: streamrl join RUN --store s3://b/runs --generators 3",
    ]
    cores = pool_of("a", 2, 8, hardware="CPU")
    found, lines = _divided(made, (cores, 8), (cores, 7, 2))  # they share the trainer's cores
    assert found["placement.generators"] == 4
    assert lines == ["on one further machine of a: streamrl join RUN --store s3://b/runs --generators 3"]


def test_machines_that_join_need_a_store_that_they_reach(made: RunPlan) -> None:
    near, far = pool_of("a", 1, 4), pool_of("b", 1, 4, trains=False)
    kinds = ((GeneratorKind(far, engine_of(8), 1), 4),)
    split = MachineSplit(TrainerKind(near, LearnerTimes(1e-4), 4), kinds)
    assert beyond_settings(split, "local") == [
        "on one machine of b: streamrl join RUN --store URL --generators 4",
        "set placement.store to a URL that these machines reach: they join with it as URL",
    ]
    alone = replace(split, generators=((GeneratorKind(near, engine_of(8), 1), 4),), takes_turns=True)
    assert beyond_settings(alone, "local") == []


def test_a_simulated_balance_puts_no_generator_on_two_machines() -> None:
    near, far = pool_of("a", 1, 4), pool_of("b", 2, 8, trains=False)
    kinds = ((GeneratorKind(far, engine_of(8), 3), 2),)
    split = MachineSplit(TrainerKind(near, LearnerTimes(1e-4), 4), kinds, 1.0)
    (site,) = simulated_run(spec_of_test(), split, WORKLOAD, iterations=2).sites
    assert site.most == 4


def test_ranks_that_the_trainers_machine_has_no_room_for_are_elsewhere(made: RunPlan) -> None:
    pool = pool_of("a", 4, 4)
    found, lines = _divided(made, (pool, 12), (pool, 2, 2))
    assert (found["trainer.ranks"], found["placement.ranks.elsewhere"]) == (12, 8)
    assert lines[0] == "on each of 2 further machines of a: streamrl join RUN --store s3://b/runs --ranks 4"
    assert "placement.ranks.address" in lines[1]
    assert lines[2:] == ["on one further machine of a: streamrl join RUN --store s3://b/runs --generators 2"]
    assert "placement.ranks.elsewhere" not in _divided(made, (pool, 4), (pool, 2, 2))[0]
    file = {"trainer": {"learner": "deepspeed", "ranks": 8}, "placement": {"ranks": {"elsewhere": 4}}}
    found, _ = _divided(made, (pool, 4), (pool, 2, 2), **file)
    assert (found["trainer.ranks"], found["placement.ranks.elsewhere"]) == (4, 0)
    cores = pool_of("a", 2, 8, hardware="CPU")
    found, lines = _divided(made, (cores, 16), (cores, 2, 1), trainer={"threads": 2})
    assert (found["trainer.ranks"], found["placement.ranks.elsewhere"]) == (8, 4)
    assert "divide these --ranks by trainer.threads" in lines[1]


def test_machines_of_a_site_are_elsewhere(made: RunPlan) -> None:
    near, far = pool_of("a", 1, 4), pool_of("b", 2, 4, site="far", trains=False, link=LINK)
    for is_said in (False, True):
        placement = {"sites": {"far": {"elsewhere": is_said}}}
        found, lines = _divided(made, (near, 4), (far, 8, 1), placement=placement)
        assert found["placement.generators"] == 0 and found["placement.sites.far.generators"] == 8
        assert found.get("placement.sites.far.elsewhere", is_said) is True
        assert lines == [
            "on each of 2 machines of b: streamrl join RUN --store s3://b/runs --site far --generators 4"
        ]


def test_a_model_that_no_budget_holds(run_file: Path) -> None:
    model = run_file.with_name("model") / "config.json"
    model.write_text(json.dumps({**CONFIG, "hidden_size": 16_384, "num_hidden_layers": 400,
                                 "intermediate_size": 65_536}))  # fmt: skip
    result = CliRunner().invoke(app, ["plan", str(run_file)])
    assert result.exit_code == 3
    assert "can't hold the model" in result.output


def test_the_demand_of_a_workload() -> None:
    spec = spec_of_test()
    demand = demand_of_workload(spec, WORKLOAD)
    assert isinstance(demand, IterationDemand)
    assert demand.samples == 32
    assert demand.lookahead == 2
    assert 150 < float(demand.lengths.mean()) < 500


def test_order_arrival_admits_as_far_ahead_as_order_window() -> None:
    """Its cap says how old a sample may become, not how far generation runs ahead."""
    spec = spec_of_test(order="arrival")
    assert demand_of_workload(spec, WORKLOAD).lookahead == 2
    assert plan_run(inputs_of(spec), PlanGoal(), may_take_turns=False).spec.algorithm.staleness <= 2


def test_the_best_split_that_takes_turns_is_simulated_too() -> None:
    """By formulas six others are cheaper than it, and none of them is."""
    file = ROOT / "examples" / "large" / "two_sites.yaml"
    inputs = planning_inputs(load_run_file(file, ["placement.machines.cheap.price=4.2"]), mean_length=1500)
    plan = plan_run(inputs, PlanGoal(least="cost"))
    assert plan.chosen.split.takes_turns
    assert not plan.others[0].split.takes_turns
