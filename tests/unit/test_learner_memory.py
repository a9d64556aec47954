"""The memory of a trainer's ranks, beside what one H100 showed, and how learners divide it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.planning.learner_memory import LearnerMemory, counts_for_memory, learner_memory
from flows.planning.main_memory import GIB_BYTES
from flows.planning.model_shape import shape_of
from tests.bench._gpu_model import SHAPES
from tests.bench.memory import SETTINGS
from tests.factories import make_spec

# GiB of one H100, from docs/benchmarks.md "Memory". The tokens are those of the bench's largest micro-batch.
MEASURED = [
    ("1.5b", 6656, "weights", 53.3), ("1.5b", 6656, "weights, checkpointing", 40.2),
    ("1.5b", 6656, "weights, checkpointing, offloaded", 28.7), ("1.5b", 6656, "adapter", 20.9),
    ("1.5b", 6656, "adapter, checkpointing", 7.0), ("1.5b", 6656, "adapter, checkpointing, 4 bits", 5.2),
    ("7b", 3328, "adapter, checkpointing", 18.3), ("7b", 3328, "adapter, checkpointing, 4 bits", 9.4),
]  # fmt: skip


def memory_of(
    size: str, tokens: float, trainer: dict[str, Any], *, model: dict[str, Any] | None = None,
    ranks: int = 1, on_gpu: bool = True, four_bits: bool = False, loss: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
) -> LearnerMemory:  # fmt: skip
    spec = make_spec(
        model={"dtype": "bfloat16"} | (model or {}), trainer=trainer, loss=loss or {},
        algorithm=algorithm or {},
    )  # fmt: skip
    shape = shape_of({"model_type": "qwen2", "tie_word_embeddings": True, **SHAPES[size]})
    return learner_memory(
        spec, counts_for_memory(shape), ranks, tokens=tokens, on_gpu=on_gpu, four_bits=four_bits
    )  # fmt: skip


@pytest.mark.parametrize(("size", "tokens", "setting", "gib"), MEASURED)
def test_what_an_h100_showed_is_foretold(size: str, tokens: int, setting: str, gib: float) -> None:
    model, trainer = SETTINGS[setting]
    found = memory_of(size, tokens, trainer, model=model, four_bits="4 bits" in setting)
    assert found.most / GIB_BYTES == pytest.approx(gib, rel=0.06)


def test_moments_in_main_memory_leave_the_gpu_by_as_much() -> None:
    here, there = (memory_of("7b", 100, {"offload_optimizer": off}) for off in (False, True))
    assert there.moments == here.kept - there.kept > 0 == here.moments
    assert memory_of("7b", 100, {"offload_optimizer": True}, on_gpu=False).moments == 0
    zero = {"learner": "deepspeed", "zero_stage": 3}
    zero_here, zero_there = (memory_of("7b", 100, zero | {"offload_optimizer": off}) for off in (False, True))
    assert zero_here.kept - zero_there.kept == pytest.approx(1.5 * there.moments)
    assert zero_there.moments == pytest.approx(2 * there.moments), "gradients are copied there, too"
    critic = memory_of("7b", 100, {"offload_optimizer": True}, loss={"kind": "ppo"})
    assert critic.moments == 2 * there.moments


DIVIDING = [{"learner": "fsdp"}, {"learner": "deepspeed", "zero_stage": 3}]


@pytest.mark.parametrize("trainer", DIVIDING, ids=str)
def test_where_ranks_divide_everything_each_keeps_its_share(trainer: dict[str, Any]) -> None:
    one, four = (memory_of("7b", 8192, trainer, ranks=many) for many in (1, 4))
    assert four.kept == pytest.approx(one.kept / 4)


def test_each_stage_of_zero_takes_less_and_the_learner_torch_takes_all() -> None:
    stages = [{"learner": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)]
    found = [memory_of("7b", 8192, one, ranks=8).kept for one in stages]
    assert found == sorted(found, reverse=True) and len(set(found)) == 3
    plain = {"exact_sums": False}
    assert memory_of("7b", 8192, plain, ranks=8).kept == memory_of("7b", 8192, plain).kept > found[0]


def test_models_beside_the_policy_are_counted() -> None:
    plain = memory_of("0.5b", 100, {}).kept
    assert memory_of("0.5b", 100, {}, loss={"kind": "ppo"}).kept > 2 * plain - 1
    with_reference = memory_of("0.5b", 100, {}, loss={"kl": 0.1}).kept
    assert 1.04 * plain < with_reference < 1.2 * plain
    several = {"groups": 4, "optimizer_steps": 2}
    clipped = memory_of("0.5b", 100, {}, algorithm=several, loss={"correction": "decoupled"}).kept
    assert clipped > 1.1 * plain
    lora = {"lora": {"rank": 8}}
    adapter = memory_of("0.5b", 100, {}, model=lora)
    assert memory_of("0.5b", 100, {}, model=lora, loss={"kl": 0.1}).kept == adapter.kept  # the base itself


def test_an_adapter_of_some_layers_is_smaller() -> None:
    all_of, some = (
        memory_of("1.5b", 100, {}, model={"lora": {"rank": 64, "targets": targets}}).kept
        for targets in ("all-linear", ["q_proj", "v_proj"])
    )
    per_rank = 28 * ((1536 + 1536) + (1536 + 256))  # inputs and outputs of both kinds
    everything = per_rank + 28 * ((1536 + 1536) + (1536 + 256) + 3 * (1536 + 8960))
    assert all_of - some == pytest.approx(64 * 24 * (everything - per_rank))


@given(st.sampled_from(sorted(SHAPES)), st.integers(1, 50_000), st.integers(1, 64), st.booleans())
def test_more_tokens_never_take_less_and_checkpointing_never_more(
    size: str, tokens: int, ranks: int, adapter: bool
) -> None:
    model = {"lora": {"rank": 8}} if adapter else {}
    plain, again, longer = (
        memory_of(size, many, {"gradient_checkpointing": on}, model=model, ranks=ranks)
        for many, on in ((tokens, False), (tokens, True), (2 * tokens, False))
    )
    assert plain.most <= longer.most
    if SHAPES[size]["num_hidden_layers"] > 2:  # of two layers one is computed again beside what both keep
        assert again.most <= plain.most
