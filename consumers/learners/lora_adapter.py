"""A LoRA adapter on a policy: only the adapter is trained, published and kept; the base stays as it is.

x ──► W x + alpha / rank * B (A x)        A, B: fp32 parameters of peft's layers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch

from infra.weights.adapter_tensors import check_targets, is_meant
from infra.weights.folder import ModelFolder
from infra.weights.weights_error import WeightsError
from schemas.runspec import RunSpec

_MARK = "base"  # name in a checkpoint's state


class Adapter:
    """peft's layers in a transformers model; parameters have the names that peft's files have."""

    def __init__(self, model: Any, folder: str, spec: RunSpec) -> None:
        from peft import LoraConfig, TaskType, get_peft_model

        lora = spec.model.lora
        assert lora is not None
        config = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=_targets(model, lora.targets, folder),
            lora_dropout=0.0, bias="none", task_type=TaskType.CAUSAL_LM,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]), _stand_ins(model):
            torch.manual_seed(spec.seed)  # each start of a trainer begins with the same A
            self._peft = get_peft_model(model, config)
        self._model, self._folder = model, folder
        self.named: dict[str, torch.nn.Parameter] = {
            name.replace(".default.", "."): parameter
            for name, parameter in self._peft.named_parameters()
            if parameter.requires_grad
        }

    @cached_property
    def base(self) -> str:
        """Root of the model that the adapter belongs to."""
        return ModelFolder(self._folder).root

    def off(self) -> Alternative:
        """Return the model that the run began with, which is the policy without the adapter."""

        @contextmanager
        def without() -> Iterator[None]:
            self._peft.base_model.disable_adapter_layers()
            try:
                yield
            finally:
                self._peft.base_model.enable_adapter_layers()

        return Alternative(self._model, without)

    def kept(self) -> Alternative:
        """Return a frozen copy of the policy as it is now; copying into its parameters renews it."""
        kept = {name: parameter.detach().clone() for name, parameter in self.named.items()}

        @contextmanager
        def exchanged() -> Iterator[None]:
            self._exchange(kept)
            try:
                yield
            finally:
                self._exchange(kept)

        return Alternative(self._model, exchanged, kept)

    def _exchange(self, kept: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.named.items():
            parameter.data, kept[name] = kept[name], parameter.data

    def mark(self) -> dict[str, torch.Tensor]:
        """Return the tensor by which a checkpoint names the base."""
        return {_MARK: torch.tensor(list(bytes.fromhex(self.base)), dtype=torch.uint8)}

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raise WeightsError if a checkpoint belongs to another base."""
        found = bytes(state[_MARK].tolist()).hex()
        if found != self.base:
            raise WeightsError(
                f"the checkpoint is of an adapter for a model with root {found[:12]}; this trainer's model "
                f"has root {self.base[:12]}. Put the model that the run began with in its place"
            )


class Alternative:
    """The same layers with another adapter or none, for `Forward` to run. Only without gradients."""

    def __init__(
        self,
        model: Any,
        using: Callable[[], AbstractContextManager[None]],
        named: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self._model, self.using, self._named = model, using, named or {}
        self.lm_head = model.lm_head  # the head has no adapter

    def model(self, **inputs: Any) -> Any:
        """Run the layers below the head."""
        with self.using():
            return self._model.model(**inputs)

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the adapter's parameters, which may be overwritten."""
        return self._named.items()


@contextmanager
def _stand_ins(model: Any) -> Iterator[None]:
    """Put tensors that take no memory in place of weights that are not there yet.

    peft makes a layer's adapter where the layer's weights are, and on the meta device it would have no bits.
    """
    away = [
        (module, name, weight) for module in model.modules()
        for name, weight in module._parameters.items() if weight is not None and weight.is_meta
    ]  # fmt: skip
    for module, name, weight in away:
        nothing = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        module._parameters[name] = torch.nn.Parameter(nothing, requires_grad=False)
    try:
        yield
    finally:
        for module, name, weight in away:
            module._parameters[name] = weight


def _targets(model: Any, wanted: str | list[str], folder: str) -> list[str]:
    """Return the names of the layers that get an adapter."""
    head = model.get_output_embeddings()
    linear = [
        name for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]  # fmt: skip
    if isinstance(wanted, str):
        return linear
    check_targets(wanted, linear, folder)
    return [name for name in linear if is_meant(name, wanted)]
