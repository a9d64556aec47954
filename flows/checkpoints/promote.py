"""Writes a version as a Hugging Face folder: a whole model, or an adapter for peft.

<folder>/config.json, tokenizer …    as the version has them, or    <folder>/adapter_config.json
                                     the model that it began with
<folder>/model*.safetensors          one, or several and an index   <folder>/adapter_model.safetensors

Every bit is verified before it is written. A rename commits the folder: it is there whole or not at all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flows.checkpoints.folder_writer import FolderWriting, ShareProgress
from flows.checkpoints.version_source import ExportError, VersionSource
from flows.checkpoints.whole_folder import check_new, whole_folder
from infra.weights.folder import ADAPTER
from infra.weights.shards import SHARD
from infra.weights.versions import WeightStore


@dataclass(frozen=True)
class Promoted:
    """A version that was written into a folder."""

    folder: Path
    version: int
    size: int  # bytes of its tensors
    base: str | None  # folder of the model that an adapter needs; None: a whole model was written


def promote_version(
    weights: WeightStore, origin: VersionSource, version: int, target: Path, *, adapter: bool = False,
    replace: bool = False, shard: int = SHARD, progress: ShareProgress = lambda share, text: None,
) -> Promoted:  # fmt: skip
    """Write a version into a folder that is new or empty or, with `replace`, takes the old one's place.

    `adapter`: write the adapter by itself; `shard`: maximum bytes of a safetensors file.
    """
    if not replace:
        check_new(target)
    manifest = weights.manifest(version)
    if adapter and manifest.base is None:
        raise ExportError(f"version {version} of {origin.name} is a whole model: leave --adapter out")
    progress(0.0, f"fetching version {version}")
    _, copy = weights.update(None, version, root=manifest.root)
    writing = FolderWriting(weights, manifest, copy, origin)
    with whole_folder(target, replace=replace) as folder:
        if adapter:
            size = writing.adapter(folder)
        elif manifest.base is None:
            size = writing.model(folder, shard, progress)
        else:
            progress(0.0, "verifying the base")
            size = writing.merged(folder, shard, progress)
    progress(1.0, "done")
    return Promoted(target, version, size, origin.base if adapter else None)


def where_to_read(promoted: Promoted) -> str:
    """Return the Python expression that loads the folder, for people."""
    folder = os.fspath(promoted.folder)
    if (promoted.folder / ADAPTER).is_file():
        base = promoted.base or "its model"
        return f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{folder}")'
    return f'AutoModelForCausalLM.from_pretrained("{folder}")'
