"""The tensors of a LoRA adapter, named as in peft's files, and merging them into the base model's layers.

base_model.model.<layer>.lora_A.weight    A  [rank, in]
base_model.model.<layer>.lora_B.weight    B  [out, rank]
<layer>.weight + alpha / rank * B @ A        [out, in]     the weight that generators compute with
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from infra.weights.bits import bits_of, blank_file, file_model
from infra.weights.folder import ModelFolder
from infra.weights.manifest import VersionManifest
from infra.weights.weights_error import WeightsError
from schemas.runspec import LoraSection, ModelSection

if TYPE_CHECKING:
    import torch

_KINDS = {"float32": "F32", "bfloat16": "BF16"}  # torch's names of types to safetensors'
_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
# Settings of peft that can't be merged here: other sums, a rank per layer, whole layers, biases.
_MORE = (
    "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "bias", "lora_bias", "fan_in_fan_out",
    "layer_replication", "target_parameters", "trainable_token_indices",
)  # fmt: skip
_BEFORE, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def layers_of(names: Iterable[str]) -> list[str]:
    """Return the layers that an adapter changes, sorted. Raises unless its tensors are pairs of A and B."""
    left = set(names)
    layers = sorted(name.removeprefix(_BEFORE).removesuffix(_A) for name in left if name.endswith(_A))
    strange = left - {name for layer in layers for name in names_of(layer)}
    if strange or 2 * len(layers) != len(left):
        raise WeightsError(
            f"these are not the tensors of an adapter: {', '.join(sorted(strange or left)[:3])}"
        )
    return layers


def names_of(layer: str) -> tuple[str, str]:
    """Return the names of a layer's two adapter tensors, A and B."""
    return f"{_BEFORE}{layer}{_A}", f"{_BEFORE}{layer}{_B}"


def is_meant(layer: str, targets: Iterable[str]) -> bool:
    """Whether one of `model.lora.targets` selects a layer: a target matches the end of the layer's name."""
    return any(f".{layer}".endswith(f".{target}") for target in targets)


def check_targets(targets: Iterable[str], layers: Collection[str], folder: str | Path) -> None:
    """Raise if one of `model.lora.targets` selects none of the layers that may have an adapter."""
    for target in targets:
        if not any(is_meant(layer, [target]) for layer in layers):
            kinds = sorted({layer.rpartition(".")[2] for layer in layers})
            close = difflib.get_close_matches(target, kinds, n=1)
            raise WeightsError(
                f"model.lora.targets: the model in {folder} has no linear layer {target!r} below its head"
                f"{f'; did you mean {close[0]!r}?' if close else ''} (it has: {', '.join(kinds)})"
            )


def check_fits(manifest: VersionManifest, spec: ModelSection, base: ModelFolder) -> None:
    """Raise unless a version is what this spec publishes: a whole model, or an adapter of this base."""
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


def lora_of(raw: bytes, where: str) -> LoraSection:
    """Return rank and alpha from an adapter_config.json; the scale of rsLoRA becomes part of alpha.

    Raises WeightsError if the file is damaged, or asks for more than plain LoRA.
    """
    try:
        said = json.loads(raw)
        if unknown := [name for name in _MORE if said.get(name) not in (None, False, [], {}, "none")]:
            raise WeightsError(
                f"{where} has {unknown[0]}, which only peft merges: take the adapter as it is with --adapter"
            )
        if said["peft_type"] != "LORA":
            raise WeightsError(f"{where} is of kind {said['peft_type']}, and only LORA can be merged here")
        rank, alpha = int(said["r"]), float(said["lora_alpha"])
        return LoraSection(rank=rank, alpha=alpha * math.sqrt(rank) if said.get("use_rslora") else alpha)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise WeightsError(f"{where} is no configuration of an adapter: {error!r}") from error


class Merging:
    """Merges adapters into the model that a run began with. Each merge starts from the base, never from an
    earlier merge: the result depends on base and adapter alone."""

    def __init__(self, spec: ModelSection, base: ModelFolder) -> None:
        import torch

        assert spec.lora is not None
        self._base, self._scale = base, spec.lora.scale
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self.kind = _KINDS[spec.dtype]  # safetensors' name of the type of all merged floating-point tensors

    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return type and shape of each tensor of the merged model, by name."""
        return {
            name: (self.kind if bits.dtype in _FLOATS else bits.dtype, bits.shape)
            for name, bits in self._base.bits().items()
        }

    def tensor(self, name: str, adapter: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a tensor of the merged model."""
        layer = name.removesuffix(".weight")
        return self.merged(layer, adapter) if names_of(layer)[0] in adapter else self.plain(name)

    def check(self, adapter: Iterable[str]) -> None:
        """Raise WeightsError unless the base has all layers that an adapter with these tensors changes."""
        for layer in layers_of(adapter):
            if f"{layer}.weight" not in self._base.shapes:
                raise WeightsError(
                    f"the adapter is for {layer}, which the model in {self._base.path} has not"
                )

    def plain(self, name: str) -> torch.Tensor:
        """Return a tensor of the base that no adapter changes; floating-point numbers in the run's dtype."""
        tensor = self._base.tensor(name)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def base_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the base as they are without an adapter, in the run's dtype."""
        return {name: self.plain(name) for name in self._base.names}

    def merged(self, layer: str, adapter: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a layer's weight with its adapter added: computed in fp32, rounded once."""
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
        """Return the merged weights of all layers that an adapter changes, as a safetensors file.

        Each weight goes straight into its place in the file, for together they are most of a model.
        """
        layers = layers_of(adapter)
        shapes = {f"{layer}.weight": self._base.shapes[f"{layer}.weight"] for layer in layers}
        file = blank_file({name: (self.kind, tuple(shape)) for name, shape in shapes.items()})
        places = file_model(file)
        for layer in layers:
            places[f"{layer}.weight"].data[:] = bits_of(self.merged(layer, adapter)).data
        return file
