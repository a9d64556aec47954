"""Reads the rows of a Hugging Face dataset: a saved one, a folder of files, or a name on the Hub.

A split is a name, or a name with a slice, as in `train[:90%]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.hub import advice, cached, is_hub_name, is_offline
from producers.problems import Problem, TaskError
from schemas.importing import said
from schemas.runspec import TaskSection

_PART = re.compile(r"(?P<name>[^\[\]+]+)(\[(?P<slice>[^\[\]]*)\])?")


def read_dataset(task: TaskSection, split: str) -> Iterator[Problem]:
    """Yield the rows of a split of task.dataset. Raises TaskError."""
    name = task.dataset or ""
    try:
        import datasets  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise TaskError(
            "task.dataset needs the package datasets: pip install 'streamrl[datasets]'"
        ) from error
    try:
        rows = _saved(Path(name), task, split) if _is_saved(Path(name)) else _loaded(name, task, split)
    except TaskError as error:
        raise TaskError(f"dataset {name}, split {split}: {error}") from error
    except Exception as error:
        raise TaskError(f"dataset {name}, split {split}: {said(error)}") from error
    try:
        yield from rows
    except Exception as error:
        raise TaskError(f"dataset {name}, split {split}: a row can't be read: {said(error)}") from error


def _is_saved(folder: Path) -> bool:
    return any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))


def _saved(folder: Path, task: TaskSection, split: str) -> Any:
    """Return the rows of a split of a folder of save_to_disk()."""
    import datasets

    if task.dataset_config:
        raise TaskError("a folder of save_to_disk() has no configurations: leave task.dataset_config out")
    whole = datasets.load_from_disk(str(folder))
    name = _name(split)
    if isinstance(whole, datasets.DatasetDict):
        if name not in whole:
            raise TaskError(f"there is no such split; it has {', '.join(sorted(whole)) or 'none'}")
        return _slice(whole[name], split)
    # A single dataset may know its split. Without one it stands for the problems that are trained.
    own = str(whole.split) if whole.split is not None else _name(task.train_split)
    if name != own:
        raise TaskError(
            f"the folder has a single dataset, which stands for the split {own!r}. Save a DatasetDict with "
            f"both splits, or divide it: task.train_split: '{own}[:90%]', task.held_out_split: '{own}[90%:]'"
        )
    return _slice(whole, split)


def _name(split: str) -> str:
    found = _PART.fullmatch(split)
    if found is None:
        raise TaskError("write a split as NAME or NAME[FROM:TO], such as train[:90%]")
    return found["name"]


def _slice(rows: Any, split: str) -> Any:
    """Return the slice of the rows that a split names."""
    import datasets

    part = _PART.fullmatch(split)
    if part is None or part["slice"] is None:
        return rows
    instruction = datasets.ReadInstruction.from_spec(f"all[{part['slice']}]")
    (wanted,) = instruction.to_absolute({"all": len(rows)})
    first, end = wanted.from_ or 0, len(rows) if wanted.to is None else wanted.to
    return rows.select(range(first, end))


def _loaded(name: str, task: TaskSection, split: str) -> Any:
    """Return the rows of a split of a folder of files, or of a dataset on the Hub."""
    import datasets

    here = cached(name, "dataset") if is_hub_name(name) else None
    if here is not None and is_offline():
        return datasets.load_dataset(str(here), task.dataset_config, split=split)
    try:
        return datasets.load_dataset(name, task.dataset_config, split=split)
    except (OSError, datasets.exceptions.DatasetNotFoundError) as error:
        if not is_hub_name(name):
            raise
        if here is None:  # the network failed, or there is no such dataset
            raise TaskError(advice(name, "dataset", said(error))) from error
        return datasets.load_dataset(str(here), task.dataset_config, split=split)
