"""Linear layers in fp32 and bf16, both ways on whatever CPU this is."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from consumers.learners import forward
from consumers.learners.learner import TorchLearner
from infra import cpu_linear
from infra.choices import LINEAR
from producers.engines import packed_linear as engine
from tests.factories import make_spec, make_tiny_model
from tests.training import train

ROOT = Path(__file__).parents[2]
WAYS = ("onednn", "mkl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@pytest.fixture(params=WAYS)
def linear(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(LINEAR.variable, request.param)
    monkeypatch.setattr(forward, "_WARM_ROWS", 8)
    return str(request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("replaced", [True, False], ids=["own layers", "as loaded"])
def test_both_types_train_both_ways(model: str, linear: str, dtype: str, replaced: bool) -> None:
    """With layers that are ours in a bf16 run too: whichever model comes there."""
    spec = make_spec(model={"dtype": dtype})
    learner = TorchLearner(model, spec)
    if replaced:
        cpu_linear.use_cpu_linear(learner._model, most_rows=8)
    before = learner.weights()
    norms = train(learner, spec, 2)
    assert all(0 < norm < 1e6 for norm in norms)
    moments = [value for name, value in learner.state().items() if ".exp_avg." in name]
    assert {parameter.grad.dtype for parameter in learner._policy.named.values()} == {torch.float32}
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert all(bool(moment.any()) for moment in moments), "a parameter got no gradient"
    assert any(not torch.equal(before[name], after) for name, after in learner.weights().items())


@pytest.mark.parametrize("biased", [True, False])
def test_under_autocast_it_is_torch_with_gradients_in_the_type_of_the_weights(biased: bool) -> None:
    noise = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 12, generator=noise), torch.randn(20, 12, generator=noise)
    leaves = [x, weight, torch.randn(20, generator=noise)] if biased else [x, weight]
    results = []
    for compute in (cpu_linear.linear, torch.nn.functional.linear):
        mine = [leaf.clone().requires_grad_() for leaf in leaves]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = compute(*mine)
        out.float().square().sum().backward()
        assert out.dtype == torch.bfloat16
        results.append([out.detach(), *(leaf.grad for leaf in mine)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    original = torch.nn.Sequential(torch.nn.Linear(4, 3))
    cpu_linear.use_cpu_linear(original, most_rows=8)
    other = copy.deepcopy(original)
    with torch.no_grad():
        other[0].weight.zero_()
        other[0].bias.zero_()
    x = torch.ones(2, 4)
    assert not other(x).any()
    assert original(x).any()
    other(x).sum().backward()
    assert other[0].weight.grad is not None
    assert original[0].weight.grad is None


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engines_layers_both_ways(linear: str, dtype: torch.dtype, invariant: bool) -> None:
    pytest.importorskip("vllm")
    noise = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 32, generator=noise).to(dtype), requires_grad=False)
    layer = torch.nn.Module()
    layer.weight = weight
    packed = engine.PackedLinear(layer, invariant=invariant, known={})
    x = torch.randn(13, 32, generator=noise).to(dtype)
    found = packed(x, weight)
    near = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight), rtol=near, atol=near * 8)
    if invariant:
        assert all(torch.equal(packed(x[:rows], weight), found[:rows]) for rows in (1, 7, 8, 9))


def test_unset_the_maker_of_the_cpu_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LINEAR.variable, raising=False)
    for text, pays in (("vendor_id: GenuineIntel", False), ("vendor_id: AuthenticAMD", True)):
        cpu_linear._intel.cache_clear()
        monkeypatch.setattr(cpu_linear, "Path", _file_saying(text))
        assert cpu_linear.pays() is pays
    cpu_linear._intel.cache_clear()


def _file_saying(text: str) -> Callable[[str], SimpleNamespace]:
    return lambda _: SimpleNamespace(read_text=lambda: text)


INSTRUCTIONS = [
    {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"},
    {"ATEN_CPU_CAPABILITY": "default"},
]


@pytest.mark.parametrize("forced", INSTRUCTIONS, ids=lambda forced: " ".join(forced.values()))
def test_with_fewer_instructions_it_is_as_right(forced: dict[str, str]) -> None:
    _products("trainer", forced)


def test_where_onednn_has_no_bf16_torch_computes_the_engines_layers() -> None:
    pytest.importorskip("vllm")
    _products("engine", INSTRUCTIONS[0])


@pytest.mark.parametrize("forced", [{}, *INSTRUCTIONS[:3]], ids=str)
@pytest.mark.thorough(but=["{}"])
def test_whole_numbers_of_eight_bits_are_added_exactly(forced: dict[str, str]) -> None:
    pytest.importorskip("vllm")
    _products("int8", forced)


def _products(whose: str, forced: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.fakes.products", whose], env={**os.environ, **forced}, cwd=ROOT,
        check=True, timeout=300,
    )  # fmt: skip
