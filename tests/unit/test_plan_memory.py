"""Memory of plans: engines and learner in turns on the same GPUs, and processes that share main memory."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from flows.planning.allocating import MachineAllocator, PlanGoal
from flows.planning.learner_memory import ModelSizes, learner_memory
from flows.planning.machine_pools import CPU, MachinePool, PlanError, pools_of
from flows.planning.main_memory import GIB_BYTES, generator_bytes, trainer_bytes
from flows.planning.model_shape import shape_of
from flows.planning.stage_times import LearnerTimes
from flows.planning.step_estimate import GeneratorKind, MachineSplit, TrainerKind
from flows.planning.table_times import TableTimes
from flows.planning.workload import LogNormalLengths, Workload
from flows.plans.given_split import given_split
from flows.plans.plan_rows import split_row
from flows.plans.planning_inputs import KnownLengths, PlanningInputs
from flows.plans.run_plan import with_slots
from flows.plans.slower_engines import SlowerEngines
from infra.machine_memory import whole_memory
from producers.engines.vllm_engine import SHARE_IN_TURNS
from schemas.runspec import PlacementSection
from tests.factories import make_spec
from tests.planning import TableOfTests, demand_of, engine_of, pool_of

SEVEN_B = shape_of(
    {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064,
        "tie_word_embeddings": False,
    }
)  # fmt: skip
ZERO = {"learner": "deepspeed", "zero_stage": 3, "gradient_checkpointing": True}
LENGTHS = KnownLengths(Workload(LogNormalLengths(300), LogNormalLengths(50)), "of the test", 0.05)


def table_of(**generator: object) -> TableTimes:
    spec = make_spec(
        model={"dtype": "bfloat16"}, generator=generator, trainer=ZERO | {"ranks": 4},
    )  # fmt: skip
    return TableTimes(spec, SEVEN_B, demand_of())


def test_in_turns_the_learners_state_stays_beside_the_engines_share() -> None:
    """7.6 billion parameters of 20 bytes are 142 GiB; 0.55 of an H100's 80 GiB are 44 GiB."""
    times = table_of()
    assert times.learner("H100", 3) is not None  # alone it has room on three
    problem = times.turn_problem("H100", 3)
    assert "keeps 47.3 GiB on each of 3 x H100" in problem
    assert f"share of {SHARE_IN_TURNS:g} (generator.gpu_memory) there are 44.0 GiB: take a smaller" in problem
    assert times.turn_problem("H100", 4) == ""
    assert table_of(gpu_memory=0.15).turn_problem("H100", 3) == ""
    assert 0 < times.slots_in_turns("H100", 1) < times.most_slots("H100", 1)
    assert table_of(gpu_memory=0.15).slots_in_turns("H100", 1) == 0


def test_stretches_of_layers_have_the_memory_of_all_devices_and_the_speed_of_one_stretch() -> None:
    plain, stretched = table_of(), table_of(pipeline_parallel=2)
    assert plain.tensor_parallel("H100", 8) == [1, 2, 4]  # 28 heads can't be divided by 8
    assert stretched.tensor_parallel("H100", 8) == [2, 4, 8]
    small = {"gpu_memory": 0.15}
    assert table_of(**small).slots_in_turns("H100", 1) == 0  # the model does not fit
    assert table_of(**small, pipeline_parallel=2).slots_in_turns("H100", 2) > 0
    assert stretched.engine("H100", 2, 8).batch_s == plain.engine("H100", 1, 8).batch_s
    assert stretched.engine("H100", 4, 8).batch_s[8] < stretched.engine("H100", 2, 8).batch_s[8]
    on_cpu = table_of(pipeline_parallel=2, threads=3)
    assert on_cpu.tensor_parallel("CPU", 16) == [6]
    assert on_cpu.engine("CPU", 6, 8).cores == 6
    assert on_cpu.engine("CPU", 6, 8).batch_s == table_of(threads=3).engine("CPU", 3, 8).batch_s


def test_experts_are_divided_among_as_many_ranks_as_divide_their_number() -> None:
    mixture = shape_of(
        {
            "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
            "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4,
            "vocab_size": 151_936, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 768,
        }
    )  # fmt: skip
    for whole, able in ((False, [1, 2, 4, 8]), (True, [2, 4])):
        times = replace(table_of(tensor_parallel=2, expert_parallel=whole), shape=mixture)
        assert times.tensor_parallel("H100", 8) == able


def test_a_plan_takes_turns_only_where_both_fit() -> None:
    pool, demand = pool_of("a", 1, 6, hardware="H100"), demand_of()
    found = MachineAllocator([pool], table_of(), demand).estimates(PlanGoal())
    turning = [one.split for one in found if one.split.takes_turns]
    assert {split.trainer.devices for split in turning} == {4, 5, 6}  # three have no room
    most = {table_of().slots_in_turns("H100", devices) for devices in (1, 2, 4)}
    assert {kind.slots for split in turning for kind, _ in split.generators} <= most
    apart = [one.split for one in found if not one.split.takes_turns]
    assert any(split.trainer.devices == 3 for split in apart)


def test_slots_in_turns_and_problems_are_those_of_the_times() -> None:
    times, pool = TableOfTests({"fast": 1.0}), pool_of("a", 1, 4)
    times.turn_slots = 5
    found = MachineAllocator([pool], times, demand_of()).estimates(PlanGoal())
    assert {k.slots for one in found if one.split.takes_turns for k, _ in one.split.generators} == {5}
    times.problem_in_turns = "it has no room"
    found = MachineAllocator([pool], times, demand_of()).estimates(PlanGoal())
    assert not [one for one in found if one.split.takes_turns]


def test_an_engine_in_turns_takes_its_share_in_turns() -> None:
    machines = {"a": {"hardware": "H100", "devices": 4}}
    spec = make_spec(
        model={"dtype": "bfloat16"}, trainer=ZERO | {"ranks": 4}, generator={"slots": 4},
        placement={"kind": "colocated", "generators": 4, "machines": machines},
    )  # fmt: skip
    times = TableTimes(spec, SEVEN_B, demand_of())
    assert times.most_slots("H100", 1) > times.slots_in_turns("H100", 1) > 4  # the run file's slots fit
    inputs = PlanningInputs(spec, pools_of(spec.placement), times, LENGTHS, demand_of())
    slower = SlowerEngines(times, 1.5)
    found = [given_split(inputs)]
    for source in (times, slower):
        allocator = MachineAllocator(inputs.pools, source, demand_of())
        found += [one.split for one in allocator.estimates(PlanGoal()) if one.split.takes_turns]
    assert len(found) > 4
    for split in [*found, *(with_slots(one, times, 0.5) for one in found)]:
        for kind, _ in split.generators:
            room = kind.engine.room
            assert room is not None and room.taken == pytest.approx(SHARE_IN_TURNS * 80 * GIB_BYTES)
            row = cast(list[dict[str, dict[str, float]]], split_row(split)["generators"])[0]
            assert row["memory"]["device_gib"] == 36
    apart = MachineAllocator(inputs.pools, times, demand_of(), may_take_turns=False).estimates(PlanGoal())
    kinds = [kind for one in apart for kind, _ in one.split.generators]
    assert all(kind.engine.room and kind.engine.room.taken == 72 * GIB_BYTES for kind in kinds)
    assert times.room_in_turns(CPU, 1) is None  # processes share main memory
    assert table_of(gpu_memory=0.3).room_in_turns("H100", 1) == table_of(gpu_memory=0.3).engine_room(
        "H100", 1
    )


def test_a_run_file_in_turns_without_room_is_refused() -> None:
    machines = {"a": {"hardware": "H100", "devices": 3}}
    spec = make_spec(
        model={"dtype": "bfloat16"}, trainer=ZERO | {"ranks": 3},
        placement={"kind": "colocated", "generators": 3, "machines": machines},
    )  # fmt: skip
    demand = demand_of()
    times = TableTimes(spec, SEVEN_B, demand)
    inputs = PlanningInputs(spec, pools_of(spec.placement), times, LENGTHS, demand)
    with pytest.raises(PlanError, match=r"placement\.kind: colocated.* more trainer\.ranks"):
        given_split(inputs)


class _SharedMemory(TableOfTests):
    """Generators of 2 GiB, and a trainer of 3 GiB."""

    def engine(self, hardware: str, tensor_parallel: int, slots: int):  # type: ignore[no-untyped-def]
        return replace(engine_of(slots, cores=1.0), memory_bytes=2.0 * GIB_BYTES)

    def learner(self, hardware: str, devices: int) -> LearnerTimes:
        return LearnerTimes(1e-4, cores=float(devices), memory_bytes=3.0 * GIB_BYTES)


def cpu_pool(gib: float | None, machines: int = 1) -> MachinePool:
    memory = None if gib is None else gib * GIB_BYTES
    return MachinePool("here", CPU, machines=machines, devices=8, memory_bytes=memory)


@pytest.mark.parametrize(("gib", "most"), [(16.0, 6), (9.0, 3), (5.0, 1), (None, 8)])
def test_generators_share_main_memory_with_the_trainer(gib: float | None, most: int) -> None:
    times = _SharedMemory({CPU: 1.0})
    found = MachineAllocator([cpu_pool(gib)], times, demand_of()).estimates(PlanGoal())
    assert max(count for one in found for _, count in one.split.generators) == most


def test_a_machine_without_room_for_one_generator_is_refused() -> None:
    allocator = MachineAllocator([cpu_pool(4.5)], _SharedMemory({CPU: 1.0}), demand_of())
    with pytest.raises(PlanError, match=r"1 generators of 2\.0 GiB each beside 3\.0 GiB of the trainer"):
        allocator.estimates(PlanGoal())


def test_a_problem_of_memory_says_how_many_would_fit() -> None:
    times = _SharedMemory({CPU: 1.0})

    def split(pool: MachinePool, count: int) -> MachineSplit:
        kind = GeneratorKind(pool, times.engine(CPU, 1, 8))
        return MachineSplit(TrainerKind(pool, times.learner(CPU, 1), 1), ((kind, count),))

    assert split(cpu_pool(9.0), 3).memory_problem() == ""
    said = split(cpu_pool(9.0), 4).memory_problem()
    assert "placement.machines.here: a machine has 9.0 GiB of main memory, and 4 generators" in said
    assert "take 11.0 GiB: 3 of them would fit. Take fewer generators" in said
    assert split(cpu_pool(9.0, machines=2), 6).memory_problem() == ""
    assert split(cpu_pool(None), 400).memory_problem() == ""
    assert (
        "the trainer takes 3.0 GiB"
        in replace(
            split(cpu_pool(2.0), 1), generators=((GeneratorKind(pool_of(), engine_of(8)), 1),)
        ).memory_problem()
    )


def test_main_memory_of_processes_and_machines() -> None:
    small = make_spec(generator={"kv_cache_mib": 64})
    large = make_spec(generator={"kv_cache_mib": 1088})
    assert generator_bytes(large, 5e8) - generator_bytes(small, 5e8) == pytest.approx(GIB_BYTES)
    one, two = (learner_memory(small, ModelSizes(1e9), ranks, tokens=9, on_gpu=False) for ranks in (1, 2))
    assert trainer_bytes(1e9, 2, two) > trainer_bytes(1e9, 1, one) > 34e9
    assert whole_memory() > GIB_BYTES / 2
    machines = {"a": {"devices": 8}, "b": {"devices": 8, "memory_gib": 5}, "c": {"hardware": "H100"}}
    pools = pools_of(PlacementSection.model_validate({"machines": machines}))
    assert [pool.memory_bytes for pool in pools] == [32 * GIB_BYTES, 5 * GIB_BYTES, None]
    assert pools_of(PlacementSection())[0].memory_bytes == whole_memory()


@pytest.mark.parametrize(
    ("hardware", "devices", "name"), [(CPU, 16, "kv_cache_mib"), ("H100", 1, "gpu_kv_cache_mib")]
)
def test_slots_are_no_more_than_the_kv_cache_holds(hardware: str, devices: int, name: str) -> None:
    few, more = (table_of(**{name: mib}).most_slots(hardware, devices) for mib in (256, 1024))
    assert 1 <= few < more
    assert more == pytest.approx(4 * few, abs=4)
    assert table_of(**{name: 256}).slots_in_turns(hardware, devices) == few


def test_a_kv_cache_on_a_gpu_takes_what_is_said_beside_the_weights() -> None:
    plain, bounded = table_of(), table_of(gpu_kv_cache_mib=10 << 10)
    assert plain.most_slots("H100", 1) > bounded.most_slots("H100", 1)
    assert table_of(gpu_kv_cache_mib=80 << 10).most_slots("H100", 1) == 0
    room = bounded.engine_room("H100", 2)
    assert room.taken == pytest.approx(room.weights + 5 * GIB_BYTES)
    assert "weights and KV cache (generator.gpu_kv_cache_mib)" in table_of(
        gpu_kv_cache_mib=60 << 10
    ).turn_problem("H100", 1)


def test_weights_in_eight_bits_leave_room_for_more_samples() -> None:
    """6.5 of 7.6 billion weights are rounded. The trainer has all of them as before."""
    spec = make_spec(
        model={"dtype": "bfloat16"}, generator={"quantization": "fp8"}, trainer=ZERO | {"ranks": 4},
        loss={"correction": "truncated", "correct_fresh": True},
    )  # fmt: skip
    rounded, plain = TableTimes(spec, SEVEN_B, demand_of()), table_of()
    assert rounded.slots_in_turns("H100", 1) > plain.slots_in_turns("H100", 1)
    assert rounded.engine("H100", 1, 64).batch_s[64] < plain.engine("H100", 1, 64).batch_s[64]
    assert rounded.learner("H100", 2) == plain.learner("H100", 2)
    assert rounded.turn_problem("H100", 2) == plain.turn_problem("H100", 2)


def test_a_trainer_that_holds_the_whole_model_is_refused_with_what_it_takes() -> None:
    machines = {"a": {"hardware": "H100", "devices": 8}}
    spec = make_spec(
        model={"dtype": "bfloat16"}, trainer={"ranks": 4},
        placement={"generators": 4, "machines": machines},
    )  # fmt: skip
    times = TableTimes(spec, SEVEN_B, demand_of())
    inputs = PlanningInputs(spec, pools_of(spec.placement), times, LENGTHS, demand_of())
    said = r"keeps 170\.2 GiB on each of 4 x H100 .* 72\.0 GiB may be used: take trainer\.learner: fsdp"
    with pytest.raises(PlanError, match=said):
        given_split(inputs)
    with pytest.raises(PlanError, match=r"can't hold the model: the trainer keeps .* on each of 8 x H100"):
        MachineAllocator(inputs.pools, times, demand_of())


def test_an_adapter_a_smaller_batch_and_moments_elsewhere_make_room() -> None:
    """One H100 holds an adapter of a 7B, and 7.6 billion weights never; with moments elsewhere five do."""

    def fewest(trainer: dict[str, object], model: dict[str, object]) -> int:
        spec = make_spec(
            model={"dtype": "bfloat16"} | model, trainer={"learner": "fsdp", "ranks": 2} | trainer
        )
        times = TableTimes(spec, SEVEN_B, demand_of())
        return next(many for many in range(1, 17) if not times.trainer_problem("H100", many))

    again = {"gradient_checkpointing": True}
    assert fewest(again, {"lora": {"rank": 16}}) == 1
    plain, offloaded = fewest(again, {}), fewest(again | {"offload_optimizer": True}, {})
    assert 1 < offloaded < plain


def test_main_memory_beside_gpus_holds_moments_and_copies() -> None:
    machines = {"a": {"hardware": "H100", "devices": 8, "memory_gib": 64}}
    spec = make_spec(
        model={"dtype": "bfloat16"}, placement={"generators": 4, "machines": machines},
        trainer={"learner": "fsdp", "ranks": 4, "offload_optimizer": True, "gradient_checkpointing": True},
    )  # fmt: skip
    inputs = PlanningInputs(
        spec, pools_of(spec.placement), TableTimes(spec, SEVEN_B, demand_of()), LENGTHS, demand_of()
    )
    with pytest.raises(PlanError, match=r"has 64\.0 GiB of main memory, and the trainer takes 102\.\d GiB"):
        given_split(inputs)
