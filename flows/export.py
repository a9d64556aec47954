"""A version of a run as a Hugging Face folder: merged, or the adapter alone.

<folder>/config.json, tokenizer …    as the starting model has them    <folder>/adapter_config.json
<folder>/model*.safetensors          in the run's dtype                <folder>/adapter_model.safetensors

What is written is verified before; the folder is there whole or not at all: committed by a rename.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infra.errors import Explained
from infra.runs import RunRecord
from infra.store import Store
from infra.weights.adapter import Merging, check_fits, is_meant, layers_of
from infra.weights.digest import file_digests
from infra.weights.folder import ModelFolder
from infra.weights.manifest import Manifest
from infra.weights.versions import WeightStore

if TYPE_CHECKING:
    import torch

Progress = Callable[[float, str], None]

_SHARD = 4 << 30  # bytes of a file: so much is in memory at a time
# All that a folder may hold besides config and tokenizer: weights in any format, and what downloads leave.
_NOT_COPIED = ("*.safetensors", "*.bin", "*.index.json", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack",
               "*.onnx", ".*")  # fmt: skip


class ExportError(Explained):
    """A version can't be exported; the message says why."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    version: int
    size: int  # bytes of its tensors


def export(
    record: RunRecord,
    store: Store,
    target: Path | None = None,
    *,
    version: int | None = None,
    adapter: bool = False,
    replace: bool = False,
    progress: Progress = lambda share, text: None,
) -> Exported:
    """Write a version, by default the newest, into a folder that is empty, not there, or to be replaced."""
    if adapter and record.spec.model.lora is None:
        raise ExportError(f"run {record.id} trains all weights (it has no model.lora): leave --adapter out")
    weights = WeightStore(store, record.id)
    number = _existing(weights, f"run {record.id} in {store.url}", version)
    target = target or Path(f"{record.id}-v{number}{'-adapter' if adapter else ''}")
    if not replace and (target.is_file() or (target.is_dir() and any(target.iterdir()))):
        raise ExportError(f"{target} is there and not empty: name another folder, or remove it")
    progress(0.0, f"fetching version {number}")
    manifest, file = weights.fetch_file(number)
    base = ModelFolder(record.model)
    if not (base.path / "config.json").is_file():
        raise ExportError(
            f"{base.path} has no config.json: the model that run {record.id} began with is needed here, for "
            "config and tokenizer"
        )
    progress(0.0, "verifying the base")
    check_fits(manifest, record.spec.model, base)
    with _whole(target, replace=replace) as folder:
        if adapter:
            _write_adapter(record, file, base, folder)
        else:
            _write_model(record, manifest, file, base, folder, progress)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    progress(1.0, "done")
    return Exported(target, number, size)


def _existing(weights: WeightStore, run: str, version: int | None) -> int:
    versions = weights.versions()
    if not versions:
        raise ExportError(f"{run} has published no weights")
    if version is None:
        return versions[-1]
    if version not in versions:
        raise ExportError(
            f"{run} has no version {version}; it has {_ranges(versions)} (trainer.keep_weights says how many "
            "are kept)"
        )
    return version


def _ranges(numbers: Iterable[int]) -> str:
    """3–7, 9"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)


@contextmanager
def _whole(target: Path, *, replace: bool) -> Iterator[Path]:
    """A folder beside the target that takes its place at the end, or is not there any more."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
        work.mkdir()
    except OSError as error:
        raise ExportError(f"{target} can't be written: {error}") from error
    try:
        yield work
        if target.is_dir():
            shutil.rmtree(target) if replace else target.rmdir()  # which refuses one that is not empty
        work.replace(target)
    except OSError as error:
        raise ExportError(f"{target} can't be written: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_adapter(record: RunRecord, file: bytearray, base: ModelFolder, folder: Path) -> None:
    from peft import LoraConfig, TaskType

    lora = record.spec.model.lora
    assert lora is not None
    layers = layers_of(file_digests(file))
    config = LoraConfig(
        base_model_name_or_path=record.model, r=lora.rank, lora_alpha=lora.alpha,
        target_modules=_targets(layers, base.names), lora_dropout=0.0, bias="none",
        task_type=TaskType.CAUSAL_LM, inference_mode=True,
    )  # fmt: skip
    config.save_pretrained(str(folder))
    (folder / "adapter_model.safetensors").write_bytes(file)


def _targets(layers: list[str], names: list[str]) -> list[str]:
    """The short names of layers, if these mean no other ones."""
    short = sorted({layer.rpartition(".")[2] for layer in layers})
    meant = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    return short if {layer for layer in meant if is_meant(layer, short)} == set(layers) else layers


def _write_model(
    record: RunRecord,
    manifest: Manifest,
    file: bytearray,
    base: ModelFolder,
    folder: Path,
    progress: Progress,
) -> None:
    ignored = shutil.ignore_patterns(*_NOT_COPIED)
    shutil.copytree(record.model, folder, ignore=ignored, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config[_dtype_key(config)] = record.spec.model.dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if manifest.base is None:
        (folder / "model.safetensors").write_bytes(file)
    else:
        _write_shards(_merged(record, file, base), _sizes(record, base), folder, progress)


def _dtype_key(config: dict[str, object]) -> str:
    """What this version of transformers calls it."""
    return "torch_dtype" if "torch_dtype" in config else "dtype"


def _sizes(record: RunRecord, base: ModelFolder) -> dict[str, int]:
    """Bytes of each tensor as it is written."""
    width = 2 if record.spec.model.dtype == "bfloat16" else 4
    sizes = {}
    for name, shape in base.shapes.items():
        sizes[name] = width
        for size in shape:
            sizes[name] *= size
    return sizes


def _merged(record: RunRecord, file: bytearray, base: ModelFolder) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the merged model, one after the other."""
    from safetensors.torch import load

    adapter, merging = load(bytes(file)), Merging(record.spec.model, base)
    changed = {f"{layer}.weight": layer for layer in layers_of(adapter)}
    for name in base.names:
        yield name, merging.merged(changed[name], adapter) if name in changed else merging.plain(name)


def _write_shards(
    tensors: Iterator[tuple[str, torch.Tensor]], sizes: dict[str, int], folder: Path, progress: Progress
) -> None:
    """One file, or several with an index where one would be too large to hold in memory."""
    from safetensors.torch import save_file

    parts: list[list[str]] = [[]]
    held = 0
    for name in sorted(sizes):
        if parts[-1] and held + sizes[name] > _SHARD:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += sizes[name]
    total, written = sum(sizes.values()), 0
    places: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        single = len(parts) == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        part: dict[str, torch.Tensor] = {}
        for _ in names:
            name, tensor = next(tensors)
            part[name] = tensor.contiguous()
            written += tensor.nbytes
            progress(min(1.0, written / total), f"writing {file}")
        save_file(part, str(folder / file), metadata={"format": "pt"})  # transformers asks for it
        places |= dict.fromkeys(names, file)
    if len(parts) > 1:
        index = {"metadata": {"total_size": written}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def where_to_read(exported: Exported, *, adapter: bool, base: str) -> str:
    """How to load it, for people."""
    folder = os.fspath(exported.folder)
    if adapter:
        return f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{folder}")'
    return f'AutoModelForCausalLM.from_pretrained("{folder}")'
