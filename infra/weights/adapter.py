"""A LoRA adapter as peft writes it into a file, and the layers that it makes of its base.

base_model.model.<layer>.lora_A.weight    A  [rank, in]
base_model.model.<layer>.lora_B.weight    B  [out, rank]
<layer>.weight + alpha / rank * B @ A        [out, in]     what generators compute with
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from infra.weights.errors import WeightsError
from infra.weights.folder import ModelFolder
from infra.weights.manifest import Manifest
from schemas.runspec import ModelSection

if TYPE_CHECKING:
    import torch

_KINDS = {"torch.float32": "F32", "torch.bfloat16": "BF16"}  # as safetensors calls them
_BEFORE, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def layers_of(names: Iterable[str]) -> list[str]:
    """The layers that an adapter with these tensors has something for."""
    left = set(names)
    layers = sorted(name.removeprefix(_BEFORE).removesuffix(_A) for name in left if name.endswith(_A))
    strange = left - {name for layer in layers for name in names_of(layer)}
    if strange or 2 * len(layers) != len(left):
        raise WeightsError(f"not the tensors of an adapter: {', '.join(sorted(strange or left)[:3])}")
    return layers


def names_of(layer: str) -> tuple[str, str]:
    """What A and B of a layer are called."""
    return f"{_BEFORE}{layer}{_A}", f"{_BEFORE}{layer}{_B}"


def is_meant(layer: str, targets: Iterable[str]) -> bool:
    """Whether a layer is one of those that `model.lora.targets` names, by the end of its name."""
    return any(f".{layer}".endswith(f".{target}") for target in targets)


def check_targets(targets: Iterable[str], layers: Collection[str], folder: str | Path) -> None:
    """Raise if one of `model.lora.targets` names none of the layers that may have an adapter."""
    for target in targets:
        if not any(is_meant(layer, [target]) for layer in layers):
            kinds = sorted({layer.rpartition(".")[2] for layer in layers})
            close = difflib.get_close_matches(target, kinds, n=1)
            raise WeightsError(
                f"model.lora.targets: the model in {folder} has no linear layer {target!r} below its head"
                f"{f'; did you mean {close[0]!r}?' if close else ''} (it has: {', '.join(kinds)})"
            )


def check_fits(manifest: Manifest, spec: ModelSection, base: ModelFolder) -> None:
    """Raise unless a version is what a run of this spec publishes, and of this base."""
    what = f"version {manifest.version} of run {manifest.run}"
    if spec.lora is None:
        if manifest.base is not None:
            raise WeightsError(f"{what} is an adapter, but the run has no model.lora")
    elif manifest.base is None:
        raise WeightsError(f"{what} is a whole model, but the run has model.lora")
    elif manifest.base != base.root:
        raise WeightsError(
            f"{what} is an adapter for a model with root {manifest.base[:12]}; the one in {base.path} has "
            f"root {base.root[:12]}. Put the model that the run began with there"
        )


class Merging:
    """Makes the layers of adapters whole, on the model that a run began with. Never adds to a sum of before:
    what comes out depends on base and adapter alone."""

    def __init__(self, spec: ModelSection, base: ModelFolder) -> None:
        import torch

        assert spec.lora is not None
        self._base, self._scale = base, spec.lora.scale
        self._dtype: torch.dtype = getattr(torch, spec.dtype)

    def plain(self, name: str) -> torch.Tensor:
        """A tensor of the base that no adapter changes, in the run's dtype."""
        tensor = self._base.tensor(name)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def merged(self, layer: str, adapter: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A layer's weight with its adapter in it: computed in fp32, rounded once."""
        import torch

        weight = self._base.tensor(f"{layer}.weight").float()
        a, b = (adapter[name].float() for name in names_of(layer))
        if (b.shape[0], a.shape[1]) != tuple(weight.shape):
            raise WeightsError(
                f"the adapter of {layer} makes {b.shape[0]} × {a.shape[1]}; the layer has "
                f"{' × '.join(map(str, weight.shape))}"
            )
        return torch.addmm(weight, b, a, alpha=self._scale).to(self._dtype)

    def file(self, adapter: Mapping[str, torch.Tensor]) -> bytearray:
        """All layers of an adapter as a safetensors file: made in its place, for they are most of a model."""
        import torch

        header, end = {}, 0
        for layer in layers_of(adapter):
            shape = self._base.shapes[f"{layer}.weight"]
            begin, end = end, end + math.prod(shape) * self._dtype.itemsize
            kind = _KINDS[str(self._dtype)]
            header[f"{layer}.weight"] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        whole = bytearray(8 + len(head) + end)
        whole[: 8 + len(head)] = len(head).to_bytes(8, "little") + head
        for layer in layers_of(adapter):
            weight = self.merged(layer, adapter)
            start = 8 + len(head) + header[f"{layer}.weight"]["data_offsets"][0]
            place = torch.frombuffer(whole, dtype=self._dtype, count=weight.numel(), offset=start)
            place.copy_(weight.view(-1))
        return whole
