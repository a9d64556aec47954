"""Writes a version as a Hugging Face folder: a whole model, or an adapter for peft.

<folder>/config.json, tokenizer …    as the version has them, or    <folder>/adapter_config.json
                                     the model that it began with
<folder>/model*.safetensors          one, or several and an index   <folder>/adapter_model.safetensors

Every bit is verified before it is written. A rename commits the folder: it is there whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flows.checkpoints.folder_writer import FolderWriting, ShareProgress
from flows.checkpoints.version_source import ExportError, VersionSource
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
    if not replace and (target.is_file() or (target.is_dir() and any(target.iterdir()))):
        raise ExportError(f"{target} is there and not empty: name another folder, or remove it")
    manifest = weights.manifest(version)
    if adapter and manifest.base is None:
        raise ExportError(f"version {version} of {origin.name} is a whole model: leave --adapter out")
    progress(0.0, f"fetching version {version}")
    _, copy = weights.update(None, version, root=manifest.root)
    writing = FolderWriting(weights, manifest, copy, origin)
    with _whole(target, replace=replace) as folder:
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


@contextmanager
def _whole(target: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a folder beside the target. At the end it takes the target's place; on errors it is removed."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
        work.mkdir()
    except OSError as error:
        raise ExportError(f"{target} can't be written: {error}") from error
    try:
        yield work
        if target.is_dir():
            shutil.rmtree(target) if replace else target.rmdir()  # rmdir refuses a folder that is not empty
        work.replace(target)
    except OSError as error:
        raise ExportError(f"{target} can't be written: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
