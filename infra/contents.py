"""Hashes of the files that a run uses: a resumed run compares contents, not paths.

A file is read whole, and so is a folder of up to 64 MiB. Of a larger folder the hash covers the names and
sizes of all files, small files whole (such as the configuration), and of large ones the first and last MiB
and the header, if they are safetensors. That takes seconds at 100 GB.
"""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from schemas.runspec import RunSpec

_WHOLE = 64 << 20  # bytes: a folder up to this size is read whole
_ENDS = 1 << 20  # bytes that are read at the beginning and at the end of each file in a larger folder
_PASSED_OVER = {".cache", ".git", "__pycache__"}

# Settings that name files. The model is compared by its folder, whatever setting that came from.
FILES = {
    "task.python", "task.jsonl", "task.dataset", "task.reward", "task.held_out_jsonl",
    "task.chat_template", "loss.reference", "loss.import", "trainer.import", "generator.import",
}  # fmt: skip
MODEL = "model"


def contents_of(spec: RunSpec, model: str) -> dict[str, str]:
    """Return, by setting, the hash of the file or folder that it names; other settings are left out."""
    named: dict[str, str | None] = {
        "task.python": spec.task.python, "task.jsonl": spec.task.jsonl, "task.dataset": spec.task.dataset,
        "task.reward": spec.task.reward, "task.held_out_jsonl": spec.task.held_out_jsonl,
        "task.chat_template": spec.task.chat_template,
        "loss.reference": spec.loss.reference, "loss.import": spec.loss.imported,
        "trainer.import": spec.trainer.imported, "generator.import": spec.generator.imported,
    }  # fmt: skip
    found = {name: content(value) for name, value in named.items() if value}
    return {name: text for name, text in {**found, MODEL: content(model)}.items() if text}


def content(value: str) -> str:
    """Return a hash of the file or folder that `value` names; empty if there is none.

    For `FILE.py:function` the function's name is appended.
    """
    if not value:  # as a path it would be the working folder
        return ""
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
    """Return a file's beginning and end; of safetensors also the whole header, which lists all tensors."""
    with file.open("rb") as opened:
        start = opened.read(_ENDS)
        header = int.from_bytes(start[:8], "little") if file.suffix == ".safetensors" else 0
        start += opened.read(max(0, min(header, 64 * _ENDS) - _ENDS))
        opened.seek(-_ENDS, 2)
        return start + opened.read()


def _hidden(file: Path, folder: Path) -> bool:
    return any(part in _PASSED_OVER for part in file.relative_to(folder).parts)
