"""What the files of a run hold, by hashes: a resumed run compares contents, not places.

A file is read whole. So is a model's folder that is small; of a larger one the hash is over names, sizes,
configuration and the headers of its safetensors, with the beginning and end of each file: seconds at 100 GB.
"""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from schemas.runspec import RunSpec

_WHOLE = 64 << 20  # bytes of a folder that are read whole
_ENDS = 1 << 20  # bytes at the beginning and end of a file in a larger one
_PASSED_OVER = {".cache", ".git", "__pycache__"}

# Settings that name files, by what they mean. The model is compared as the folder that came of it.
FILES = {"task.python", "task.jsonl", "task.dataset", "task.reward", "task.held_out_jsonl", "loss.reference"}
MODEL = "model"


def contents_of(spec: RunSpec, model: str) -> dict[str, str]:
    """The hash of what each setting names, if that is a file or a folder here; others are told by name."""
    named: dict[str, str | None] = {
        "task.python": spec.task.python, "task.jsonl": spec.task.jsonl, "task.dataset": spec.task.dataset,
        "task.reward": spec.task.reward, "task.held_out_jsonl": spec.task.held_out_jsonl,
        "loss.reference": spec.loss.reference,
    }  # fmt: skip
    found = {name: content(value) for name, value in named.items() if value}
    return {name: text for name, text in {**found, MODEL: content(model)}.items() if text}


def content(value: str) -> str:
    """A hash of the file or folder that is named, and of the function in it; empty if there is none."""
    source, colon, function = value.rpartition(":")
    path, rest = (Path(source), function) if colon and source.endswith(".py") else (Path(value), "")
    try:
        if path.is_file():
            digest = _of_file(path)
        elif path.is_dir():
            digest = _of_folder(path)
        else:
            return ""
    except OSError:
        return ""
    return f"{digest}:{rest}" if rest else digest


def _of_file(path: Path) -> str:
    return str(blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()[:32])


def _of_folder(folder: Path) -> str:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not _hidden(file, folder))
    whole = sum(file.stat().st_size for file in files) <= _WHOLE
    digest = blake3()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)}\0{size}\0".encode())
        digest.update(file.read_bytes() if whole or size <= 2 * _ENDS else _ends(file))
    return digest.hexdigest()[:32]


def _ends(file: Path) -> bytes:
    """A safetensors file begins with its header: names, shapes and places of all tensors."""
    with file.open("rb") as opened:
        start = opened.read(_ENDS)
        header = int.from_bytes(start[:8], "little") if file.suffix == ".safetensors" else 0
        start += opened.read(max(0, min(header, 64 * _ENDS) - _ENDS))
        opened.seek(-_ENDS, 2)
        return start + opened.read()


def _hidden(file: Path, folder: Path) -> bool:
    return any(part in _PASSED_OVER for part in file.relative_to(folder).parts)
