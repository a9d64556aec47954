"""Errors of an engine that follow from its model and settings: another start would meet them again."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from producers.engines.engine import EngineError
from producers.engines.plain_experts import check_experts
from producers.engines.route_recorder import _routers
from producers.engines.scatter import HeldWeights
from producers.engines.stretch_routes import place_among
from tests.factories import make_patch

LAYERS = "vllm.model_executor.layers.fused_moe"


class MoERunner(torch.nn.Module):
    """A layer of experts as vLLM has it, as far as it is asked."""

    layer_id, router = 0, None

    def __init__(self) -> None:
        super().__init__()
        method = SimpleNamespace(is_monolithic=True, unquantized_backend=SimpleNamespace(value="others"))
        self.routed_experts = SimpleNamespace(quant_method=method)


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> MoERunner:
    """Such a layer, with names in the place of vLLM's, which takes long to import."""
    names = {
        "runner.moe_runner": {"MoERunner": MoERunner},
        "router.base_router": {"BaseRouter": type("BaseRouter", (), {})},
        "oracle.unquantized": {"UnquantizedMoeBackend": SimpleNamespace(TRITON=object())},
    }
    for module, given in names.items():
        monkeypatch.setitem(sys.modules, f"{LAYERS}.{module}", SimpleNamespace(**given))
    return MoERunner()


def test_experts_that_vllm_computes_by_other_weights(experts: MoERunner) -> None:
    with pytest.raises(EngineError, match="experts by others, which lays their weights out anew") as raised:
        check_experts(experts)
    assert raised.value.lasting


def test_routes_that_cannot_be_recorded(experts: MoERunner) -> None:
    with pytest.raises(EngineError, match="where routes can't be recorded") as raised:
        _routers(experts)
    assert raised.value.lasting
    with pytest.raises(EngineError, match="different numbers of experts") as raised:
        place_among([[1, 2, 8, 2, 8], [1, 3, 8, 3, 8]], 0)
    assert raised.value.lasting


@pytest.mark.parametrize(
    ("tensor", "shape", "why"),
    [
        (
            "other.weight",
            (4, 4),
            "the engine has no parameter for other.weight: this model can't be verified",
        ),
        ("norm.weight", (3,), "tensor norm.weight comes as .*; the engine has it as torch.float32"),
        (
            "mlp.experts.5.up_proj.weight",
            (4, 4),
            "can't be verified: it is of expert 5, and the engine has 2",
        ),
    ],
)
def test_tensors_that_have_no_place_in_the_engine(tensor: str, shape: tuple[int, ...], why: str) -> None:
    model = torch.nn.Module()
    model.norm, model.mlp = torch.nn.LayerNorm(4, bias=False), torch.nn.Module()
    model.mlp.experts = torch.nn.Module()
    model.mlp.experts.routed_experts = torch.nn.Module()
    model.mlp.experts.routed_experts.w13_weight = torch.nn.Parameter(torch.zeros(2, 8, 4))
    weights = HeldWeights(model, {"norm.weight": (4,)}, [])
    with pytest.raises(EngineError, match=why) as raised:
        weights.prepare(make_patch({tensor: torch.zeros(shape)}).read())
    assert raised.value.lasting


def test_a_patch_for_other_weights_is_none_of_them() -> None:
    """A new engine begins with a whole version."""
    new = make_patch({"weight": torch.zeros(4)}).read()
    with pytest.raises(EngineError, match="the patch is for the weights 2") as raised:
        HeldWeights(torch.nn.LayerNorm(4), {}, []).prepare(replace(new, since="2"))
    assert not raised.value.lasting
