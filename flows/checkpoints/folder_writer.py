"""Writes a version into a folder: a whole model, one merged from base and adapter, or an adapter for peft."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flows.checkpoints.folder_names import folder_reader, folder_tensors
from flows.checkpoints.push_and_pull import beside_of
from flows.checkpoints.version_source import CONFIG, ExportError, VersionSource
from infra.weights.adapter_tensors import Merging, check_fits, is_meant, layers_of, lora_of
from infra.weights.bits import bits_of, type_name
from infra.weights.copy import Copy
from infra.weights.folder import ADAPTER, ModelFolder, is_beside
from infra.weights.manifest import VersionManifest
from infra.weights.shards import TypedShapes, write_model
from infra.weights.versions import WeightStore
from schemas.runspec import LoraSection, ModelSection

ShareProgress = Callable[[float, str], None]

_ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class FolderWriting:
    """Writes a version that was fetched into a folder."""

    weights: WeightStore
    manifest: VersionManifest
    copy: Copy
    origin: VersionSource

    def model(self, folder: Path, shard: int, progress: ShareProgress) -> int:
        """Write a version that is a whole model. Returns the bytes of its tensors.

        `shard`: maximum bytes of a safetensors file.
        """
        if CONFIG not in self.manifest.files:
            copy_beside(self.origin.folder, folder)
        self._files(folder)
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in self.manifest.tensors.items()}
        say_type(folder, shapes)
        tensors = folder_tensors(_config_in(folder).get("model_type"), shapes)
        typed = {name: (shapes[one.whole][0], one.shape) for name, one in tensors.items()}
        tensor = folder_reader(tensors, self.copy.model.__getitem__)
        return write_model(folder, typed, tensor, shard=shard, progress=progress)

    def merged(self, folder: Path, shard: int, progress: ShareProgress) -> int:
        """Write a version that is an adapter, merged into its base. Otherwise like `model`."""
        base = self.origin.folder
        spec = self.origin.spec or ModelSection(
            path=str(base.path), dtype=_type_of(base), lora=lora_of(*self._config())
        )
        check_fits(self.manifest, spec, base)
        copy_beside(base, folder)
        self._files(folder)
        (folder / _ADAPTER_CONFIG).unlink(missing_ok=True)
        merging, adapter = Merging(spec, base), self.copy.tensors()
        merging.check(adapter)
        shapes = merging.shapes()
        say_type(folder, shapes)
        return write_model(
            folder, shapes, lambda name: bits_of(merging.tensor(name, adapter)), shard=shard,
            progress=progress,
        )  # fmt: skip

    def adapter(self, folder: Path) -> int:
        """Write a version that is an adapter for peft. Returns the bytes of its tensors."""
        self._files(folder)
        spec = self.origin.spec
        if spec is not None and spec.lora is not None:
            base = self.origin.folder
            check_fits(self.manifest, spec, base)
            _configure(spec.lora, base, layers_of(self.manifest.tensors), folder)
        else:
            self._config()
        (folder / ADAPTER).write_bytes(self.copy.file)
        return self.manifest.size

    def _files(self, folder: Path) -> None:
        """Write the version's files beside its tensors: config and tokenizer."""
        for name, chunk in beside_of(self.manifest).items():
            (folder / name).write_bytes(self.weights.file(chunk))

    def _config(self) -> tuple[bytes, str]:
        """Return the version's adapter_config.json, and its name for messages. Raises ExportError."""
        where = f"{_ADAPTER_CONFIG} of version {self.manifest.version} of {self.origin.name}"
        if _ADAPTER_CONFIG not in self.manifest.files:
            raise ExportError(f"there is no {where}: without it the scale of the adapter is not known")
        return self.weights.file(self.manifest.files[_ADAPTER_CONFIG]), where


def copy_beside(base: ModelFolder, folder: Path) -> None:
    """Copy the files beside a model's tensors: config and tokenizer."""

    def ignored(_: str, names: list[str]) -> list[str]:
        return [name for name in names if not is_beside(name)]

    shutil.copytree(base.path, folder, ignore=ignored, dirs_exist_ok=True)


def say_type(folder: Path, shapes: TypedShapes) -> None:
    """Write the type of the tensors into the config, if all floating-point tensors have one type."""
    names = {type_name(dtype) for dtype, _ in shapes.values()}
    found = {name for name in names if "float" in name}
    config = _config_in(folder)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"  # depends on transformers' version
    if len(found) == 1 and config.get(key) not in found:
        config[key] = found.pop()
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _config_in(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / CONFIG).read_text()))
    except (ValueError, TypeError) as error:
        raise ExportError(f"{CONFIG} of the version, or of its base, is damaged: {error}") from error


def _type_of(base: ModelFolder) -> Literal["float32", "bfloat16"]:
    """Return bfloat16 if most bytes of a model are of that type, else float32."""
    sizes: dict[str, int] = {}
    for bits in base.bits().values():
        sizes[bits.dtype] = sizes.get(bits.dtype, 0) + bits.data.nbytes
    return "bfloat16" if max(sizes, key=lambda dtype: sizes[dtype]) == "BF16" else "float32"


def _configure(lora: LoraSection, base: ModelFolder, layers: list[str], folder: Path) -> None:
    """Write the adapter_config.json with which peft reads a run's adapter."""
    from peft import LoraConfig, TaskType

    config = LoraConfig(
        base_model_name_or_path=str(base.path), r=lora.rank, lora_alpha=lora.alpha,
        target_modules=_targets(layers, base.names), lora_dropout=0.0, bias="none",
        task_type=TaskType.CAUSAL_LM, inference_mode=True,
    )  # fmt: skip
    config.save_pretrained(str(folder))


def _targets(layers: list[str], names: list[str]) -> list[str]:
    """Return the layers' short names; their full names if a short name would match other layers, too."""
    short = sorted({layer.rpartition(".")[2] for layer in layers})
    meant = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    return short if {layer for layer in meant if is_meant(layer, short)} == set(layers) else layers
