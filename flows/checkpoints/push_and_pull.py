"""Pushes, pulls and compares versions of weights, with or without a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infra.weights.bits import Model
from infra.weights.codec.chunks import check_alike, encode_model
from infra.weights.copy import Copy
from infra.weights.digest import model_digests, root_digest
from infra.weights.folder import ADAPTER, SINGLE, VERSION_FILE, AdapterFolder, ModelFolder, is_beside, opened
from infra.weights.garbage import ByteProgress
from infra.weights.manifest import Chunk, VersionManifest
from infra.weights.seen import Seen
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError

_log = logging.getLogger("streamrl.weights")
_HALF = ".tmp"  # a file that is being written ends so
_GO_BACK = "If that is right, name the version with --version N, or say --allow-older"


def newest_version(
    weights: WeightStore, where: str, version: int | None, seen: Seen | None = None,
    *, allow_older: bool = False, held: int = -1,
) -> int:  # fmt: skip
    """Return `version` if it is there, by default the newest.

    Raises WeightsError if it is missing or, unless `allow_older`, if the newest is older than the version
    that `seen` remembers, or than `held`.
    """
    versions = weights.versions()
    if not versions:
        raise WeightsError(f"{where} has no versions of weights")
    if version is None:
        if not allow_older and seen is not None:
            seen.check(versions[-1], where, _GO_BACK)
        if not allow_older and versions[-1] < held:
            raise WeightsError(
                f"{where} has version {versions[-1]} as its newest, and the folder holds version {held}. "
                f"{_GO_BACK}"
            )
        return versions[-1]
    if version not in versions:
        there = _ranges(versions)
        raise WeightsError(
            f"{where} has no version {version}; it has {there} (older ones may have been collected)"
        )
    return version


def _ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges, such as "3–7, 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)


def push_folder(
    folder: Path, weights: WeightStore, *, version: int | None = None, old: Path | None = None,
    base: Path | None = None, progress: ByteProgress = lambda done, whole: None,
) -> VersionManifest:  # fmt: skip
    """Put a Hugging Face folder as a version, by default the next one.

    `old`: a folder with the version before; only what changed since then is sent. `base`: for an adapter, the
    folder of its model, by default the one that its config names.
    """
    source = opened(folder)
    model = source.bits()
    root = _base_of(source, base)
    known = weights.versions()
    number = (known[-1] + 1 if known else 0) if version is None else version
    if old is not None:
        before = opened(old).bits()
        manifest = weights.manifest(number - 1)
        if root_digest(model_digests(before)) != manifest.root:
            raise WeightsError(f"{old} does not hold version {number - 1}: its tensors have other bits")
        weights.goes_on_from(number - 1, before)
    return weights.publish_model(number, model, base=root, files=source.beside, progress=progress)


def _base_of(source: ModelFolder, base: Path | None) -> str | None:
    """Return the root of the model that an adapter is for; None for a whole model."""
    if not isinstance(source, AdapterFolder):
        if base is not None:
            raise WeightsError(f"{source.path} holds a whole model: leave --base out")
        return None
    if base is None:
        base = source.base
    if base is None or not ModelFolder(base).files:
        raise WeightsError(
            f"{source.path} holds an adapter: name the folder of the model that it is for with --base"
            f"{f' (it says {base}, which is no folder with safetensors here)' if base else ''}"
        )
    return ModelFolder(base).root


def held_version(folder: Path) -> int:
    """Return the version that a folder says it holds; -1 if it says none."""
    try:
        return int(json.loads((folder / VERSION_FILE).read_text())["version"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -1


def pull_version(
    weights: WeightStore, version: int, folder: Path, progress: ByteProgress = lambda done, whole: None,
    *, seen: Seen | None = None, lower: bool = False,
) -> VersionManifest:  # fmt: skip
    """Fetch a version into a folder. If the folder holds another version, only what changed is fetched.

    `seen` remembers the version if it is newer than the one remembered or, with `lower`, in any case.
    """
    if folder.is_dir() and not (folder / VERSION_FILE).is_file() and not all(map(_is_half, folder.iterdir())):
        raise WeightsError(
            f"{folder} is not empty, and holds no pulled version: name another folder, or remove it"
        )
    manifest, copy = weights.update(_held(folder), version, progress=progress)
    file, other = (SINGLE, ADAPTER) if manifest.base is None else (ADAPTER, SINGLE)
    mark = {"run": manifest.run, "version": manifest.version, "root": manifest.root}
    files: dict[str, bytes | bytearray] = {
        **{name: weights.file(chunk) for name, chunk in beside_of(manifest).items()},
        file: copy.file,
        VERSION_FILE: json.dumps(mark).encode(),  # last: until then it names the version before
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write_all(folder, files)
    (folder / other).unlink(missing_ok=True)
    if seen is not None:
        seen.remember(version, lower=lower)
    return manifest


def beside_of(manifest: VersionManifest) -> dict[str, Chunk]:
    """Return a version's files for config and tokenizer. Warns about other files, which are left out."""
    found = {name: chunk for name, chunk in manifest.files.items() if is_beside(name)}
    if others := sorted(set(manifest.files) - set(found)):
        _log.warning(
            "version %d of run %s has files that are neither config nor tokenizer; they are left out: %s",
            manifest.version, manifest.run, ", ".join(others)[:500],
        )  # fmt: skip
    return found


def _held(folder: Path) -> Copy | None:
    """Return the copy that a folder holds; None if it can't be read. `update` verifies its bits."""
    try:
        said = json.loads((folder / VERSION_FILE).read_text())
        (file,) = opened(folder).files
        return Copy(bytearray(file.read_bytes()), int(said["version"]), str(said["root"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, WeightsError):
        return None


def _write_all(folder: Path, files: Mapping[str, bytes | bytearray]) -> None:
    """Write files beside their places, and then put each in its place, in this order.

    Until all are written the folder is as it was: a first pull that is killed leaves one that can be pulled
    into again. The folder itself may be a mount, which no other folder can replace.
    """
    halves = {folder / name: folder / f".{name}{_HALF}" for name in files}
    try:
        for path, half in halves.items():
            half.write_bytes(files[path.name])
        for path, half in halves.items():
            half.replace(path)
    except OSError as error:
        raise WeightsError(f"{path} can't be written: {error}") from error
    finally:  # also at Ctrl-C: a model has gigabytes
        for half in halves.values():
            half.unlink(missing_ok=True)


def _is_half(path: Path) -> bool:
    """Whether a file is left over from a pull that was killed."""
    return path.name.startswith(".") and path.name.endswith(_HALF)


@dataclass(frozen=True)
class Difference:
    """The difference between two models."""

    tensors: int
    changed_tensors: int
    elements: int
    changed: int
    size: int  # bytes of the new model
    sent: int  # bytes that sending the changes takes


def difference(old: Model, new: Model) -> Difference:
    """Count what changes from one model to another, and the bytes that sending the changes takes."""
    check_alike(old, new)
    changed = {name: int(np.count_nonzero(old[name].data != new[name].data)) for name in new}
    return Difference(
        tensors=len(new), changed_tensors=sum(map(bool, changed.values())),
        elements=sum(bits.data.size for bits in new.values()), changed=sum(changed.values()),
        size=sum(bits.data.nbytes for bits in new.values()), sent=sum(map(len, encode_model(old, new))),
    )  # fmt: skip
