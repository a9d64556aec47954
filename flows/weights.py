"""What can be done with versions of weights beside a run: put, fetch, compare, audit, hand over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infra.store import Missing
from infra.weights.bits import Model
from infra.weights.codec.chunks import check_alike, decode, encode
from infra.weights.copy import Copy
from infra.weights.digest import model_digests, root_digest
from infra.weights.errors import WeightsError
from infra.weights.folder import ModelFolder
from infra.weights.garbage import Progress
from infra.weights.manifest import Manifest
from infra.weights.versions import WeightStore

_FILE, _MARK = "model.safetensors", "weights.json"
_BESIDE = 64 << 20  # bytes: larger files beside the tensors are no config and no tokenizer
_TENSORS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def newest(weights: WeightStore, where: str, version: int | None) -> int:
    """The version that is asked for, by default the newest."""
    versions = weights.versions()
    if not versions:
        raise WeightsError(f"{where} has no versions of weights")
    if version is None:
        return versions[-1]
    if version not in versions:
        raise WeightsError(f"{where} has no version {version}; it has {versions[0]} to {versions[-1]}")
    return version


def push(
    folder: Path, weights: WeightStore, *, version: int | None = None, old: Path | None = None,
    progress: Progress = lambda done, whole: None,
) -> Manifest:  # fmt: skip
    """Put a Hugging Face folder as the next version: what changed, if `old` holds the one before."""
    model = ModelFolder(folder).bits()
    known = weights.versions()
    number = (known[-1] + 1 if known else 0) if version is None else version
    if old is not None:
        before = ModelFolder(old).bits()
        manifest = weights.manifest(number - 1)
        if root_digest(model_digests(before)) != manifest.root:
            raise WeightsError(f"{old} does not hold version {number - 1}: its tensors have other bits")
        weights.goes_on_from(number - 1, before)
    files = {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.endswith(_TENSORS) and path.name != _MARK
        and not path.name.startswith(".") and path.stat().st_size <= _BESIDE
    }  # fmt: skip
    return weights.publish_model(number, model, files=files, progress=progress)


def pull(
    weights: WeightStore, version: int, folder: Path, progress: Progress = lambda done, whole: None
) -> Manifest:
    """Make a folder a version: of a folder that holds another one, only what changed is fetched."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _MARK).is_file():
        raise WeightsError(f"{folder} is not empty, and nothing that was pulled: name another folder")
    manifest, copy = weights.update(_held(folder), version, progress=progress)
    folder.mkdir(parents=True, exist_ok=True)
    for name, chunk in manifest.files.items():
        _written(folder / Path(name).name, weights.file(chunk))
    _written(folder / _FILE, copy.file)
    mark = {"run": manifest.run, "version": manifest.version, "root": manifest.root}
    _written(folder / _MARK, json.dumps(mark).encode())  # last: until then it is of the version before
    return manifest


def _held(folder: Path) -> Copy | None:
    """What a folder holds; nothing if it can't be read. Whatever it says of itself is verified."""
    try:
        said = json.loads((folder / _MARK).read_text())
        return Copy(bytearray((folder / _FILE).read_bytes()), int(said["version"]), str(said["root"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _written(path: Path, data: bytes | bytearray) -> None:
    work = path.with_name(f".{path.name}.tmp")
    try:
        work.write_bytes(data)
        work.replace(path)
    except OSError as error:
        work.unlink(missing_ok=True)
        raise WeightsError(f"{path} can't be written: {error}") from error


@dataclass(frozen=True)
class Difference:
    """Between two models."""

    tensors: int
    changed_tensors: int
    elements: int
    changed: int
    size: int  # bytes of the new model
    sent: int  # bytes that tell what changed


def difference(old: Model, new: Model) -> Difference:
    """How much changes from one model to another, and what telling it takes."""
    check_alike(old, new)
    changed = {name: int(np.count_nonzero(old[name].data != new[name].data)) for name in new}
    return Difference(
        tensors=len(new), changed_tensors=sum(map(bool, changed.values())),
        elements=sum(bits.data.size for bits in new.values()), changed=sum(changed.values()),
        size=sum(bits.data.nbytes for bits in new.values()), sent=sum(map(len, encode(old, new))),
    )  # fmt: skip


def verify(weights: WeightStore, progress: Progress = lambda done, whole: None) -> Iterator[str]:
    """Audit all that is there: manifests and their chain, every chunk, and that each path makes its version.

    Yields what is wrong; nothing if all is well.
    """
    versions = weights.versions()
    copies: dict[int, Copy] = {}  # of the versions that later paths begin with
    before: Manifest | None = None
    for place, version in enumerate(versions):
        progress(place, len(versions))
        try:
            manifest = weights.manifest(version)
        except WeightsError as error:
            yield str(error)
            before = None
            continue
        if before is not None and before.version == version - 1 and manifest.previous != before.hash():
            yield f"version {version} follows another version {before.version} than the one that is here"
        for chunk in manifest.files.values():
            try:
                weights.file(chunk)
            except (WeightsError, Missing) as error:
                yield str(error)
        made = [copy for path in manifest.paths for copy in _made(weights, manifest, path.since, copies)]
        yield from (wrong for wrong in made if isinstance(wrong, str))
        whole = [copy for copy in made if isinstance(copy, Copy)]
        copies = {
            number: copy for number, copy in copies.items() if number % 8 == 0 and number >= version - 32
        }
        if whole:
            copies[version] = whole[0]
        before = manifest
    progress(len(versions), len(versions))


def _made(
    weights: WeightStore, manifest: Manifest, since: int | None, copies: dict[int, Copy]
) -> Iterator[Copy | str]:
    """What a path of a version makes, if what it begins with is here; or what is wrong with it."""
    path = manifest.path(since)
    assert path is not None
    where = f"version {manifest.version}, from {'nothing' if since is None else f'version {since}'}"
    if since is None:
        copy = Copy.blank(manifest.tensors)
    elif since in copies:
        copy = Copy(bytearray(copies[since].file))
    else:
        for chunk in path.chunks:
            try:
                weights.file(chunk)
            except (WeightsError, Missing) as error:
                yield f"{where}: {error}"
        return
    try:
        for chunk in path.chunks:
            decode(weights.file(chunk), copy.model, weights.chunk_key(chunk))
    except (WeightsError, Missing) as error:
        yield f"{where}: {error}"
        return
    wrong = model_digests(copy.model)
    if wrong != manifest.digests or root_digest(wrong) != manifest.root:
        yield f"{where}: it makes other bits than the version has"
        return
    copy.version, copy.root = manifest.version, manifest.root
    yield copy
