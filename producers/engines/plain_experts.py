"""Experts of a mixture on a CPU: computed from vLLM's parameters as they are, with bits that don't depend on
the batch.

vLLM's own way packs the experts' weights when it has loaded them, pads them, and drops the originals. So the
weights that it computes with could be neither written in place nor hashed. Here the parameters stay as they
were loaded. As in `packed_linear.py`, rows are padded, and a probe tells whether blocks of 8 are needed.

A rank of several computes its part of a sum, which all ranks add up: by slices of all experts, or by its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from infra import choices, cpu_linear
from producers.engines.cpu_activations import Activation, Functions
from producers.engines.engine import lasting_error
from producers.engines.packed_linear import Product, invariant_product

_FUNCTIONS = Functions()
_ACTIVATIONS: dict[str, Activation] = {
    "silu": _FUNCTIONS.silu, "gelu": _FUNCTIONS.gelu,
    "gelu_tanh": partial(_FUNCTIONS.gelu, approximate="tanh"),
}  # fmt: skip
_MOST_AT_ONCE = 1 << 24  # elements of what the experts of some tokens compute: bounds a long prompt's memory


def plain_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply by a weight that may have changed since the last call."""
    if choices.LINEAR.forced() == "mkl":
        return linear(x, weight)
    return cpu_linear.product(x, weight)


class PlainExperts:
    """Computes the experts of all layers of one engine."""

    def __init__(self, *, invariant: bool) -> None:
        self._invariant = invariant
        self._known: dict[tuple[object, ...], bool] = {}

    def compute(
        self, hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor,
        experts: torch.Tensor, activation: str, here: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return for each row of `hidden` the sum over its `experts`, each times its weight.

        `here`: by expert, which one of `w13` and `w2` it is; -1 if another rank has it. None: all are here.
        """
        if here is not None:
            experts = here[experts].long()
        most = max(1, _MOST_AT_ONCE // (experts.shape[1] * max(w13.shape[1], hidden.shape[1])))
        parts = zip(hidden.split(most), weights.split(most), experts.split(most), strict=True)
        found = [self._some(*some, w13=w13, w2=w2, act=_ACTIVATIONS[activation]) for some in parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _some(
        self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, *, w13: torch.Tensor,
        w2: torch.Tensor, act: Activation,
    ) -> torch.Tensor:  # fmt: skip
        tokens, each = experts.shape
        order = experts.flatten().argsort(stable=True)
        elsewhere, *counts = (experts.flatten() + 1).bincount(minlength=w13.shape[0] + 1).tolist()
        order = order[elsewhere:]  # those of experts that are not here come first
        rows = hidden[order // each].split(counts)
        made = [hidden.new_empty(0, hidden.shape[1])]
        for expert, of_expert in enumerate(rows):
            if not len(of_expert):
                continue
            gate, up = self._product(of_expert, w13[expert]).chunk(2, dim=-1)
            made.append(self._product(act(gate) * up, w2[expert]))
        outputs = hidden.new_zeros(tokens * each, hidden.shape[1])
        outputs[order] = torch.cat(made)
        outputs = outputs.view(tokens, each, -1).float()
        total = outputs[:, 0] * weights[:, :1]
        for number in range(1, each):  # one after the other: so no bit depends on how torch sums
            total = total + outputs[:, number] * weights[:, number : number + 1]
        return total.to(hidden.dtype)

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not self._invariant:
            return plain_product(x, weight)
        product: Product = lambda rows, _: plain_product(rows, weight)  # noqa: E731
        return invariant_product(product, x, weight, None, self._known)


def use_plain_experts(*, invariant: bool) -> None:
    """Make the next engine compute experts this way."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    experts = PlainExperts(invariant=invariant)

    class _Experts(cpu_moe.CPUUnquantizedExperts):
        """Takes the place of vLLM's kernels, which differ from one kind of CPU to the other."""

        keeps_weights = True

        @classmethod
        def _supports_grouped_gemm(cls, moe_config: Any) -> tuple[bool, str | None]:
            if (name := moe_config.activation.value) not in _ACTIVATIONS:
                return False, f"StreamRL computes no experts with the activation {name} on CPUs"
            return (
                (False, "StreamRL computes no experts with a bias on CPUs")
                if moe_config.has_bias
                else (True, None)
            )

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Leave the weights as they are."""

        def apply(
            self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
            topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: Any, global_num_experts: int,
            expert_map: torch.Tensor | None, *_: Any, **__: Any,
        ) -> None:  # fmt: skip
            ids, act = topk_ids.long(), activation.value
            output.copy_(experts.compute(hidden_states, w1, w2, topk_weights, ids, act, expert_map))

    current = unquantized.backend_to_kernel_cls
    plain = getattr(current, "plain", current)  # of an engine before this one in the process

    def kernels(backend: Any) -> list[Any]:
        return [_Experts] if backend is unquantized.UnquantizedMoeBackend.CPU else list(plain(backend))

    kernels.plain = plain  # type: ignore[attr-defined]
    unquantized.backend_to_kernel_cls = kernels


def check_experts(model: torch.nn.Module) -> None:
    """Raise EngineError if a layer computes experts or routes from other memory than its parameters."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    for module in model.modules():
        if not isinstance(module, MoERunner):
            continue
        method = module.routed_experts.quant_method
        backend = getattr(method, "unquantized_backend", None)
        kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        keeps = backend is UnquantizedMoeBackend.TRITON or getattr(kernel, "keeps_weights", False)
        if not keeps:
            by = type(method).__name__ if backend is None else backend.value
            raise lasting_error(
                f"vLLM computes this model's experts by {by}, which lays their weights out anew: they "
                "can't be verified there"
            )
