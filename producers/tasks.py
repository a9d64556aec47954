"""The user's task: problems and a reward, from Python, JSONL or a Hugging Face dataset."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from infra.errors import Explained
from schemas.runspec import RunSpec, TaskSection

Problem = dict[str, Any]
Reward = Callable[[Problem, str], float | dict[str, float]]


class TaskError(Explained):
    """A task that can't be used; the message names the file and the problem."""


def load_problems(spec: RunSpec, split: str) -> list[Problem]:
    """The problems of a split, each with "id" and "prompt"; at most task.limit."""
    task = spec.task
    problems = [
        _checked(problem, number, task)
        for number, problem in enumerate(itertools.islice(_rows(task, split), task.limit))
    ]
    if not problems:
        raise TaskError(f"the task has no problems in split {split!r}")
    seen: set[str] = set()
    for problem in problems:
        if problem["id"] in seen:
            raise TaskError(f"two problems of split {split!r} have the id {problem['id']!r}: ids must differ")
        seen.add(problem["id"])
    return problems


def load_reward(task: TaskSection) -> Reward:
    """The reward function."""
    where = task.reward or f"{task.python}:reward"
    return load_function(where)


def load_function(where: str) -> Callable[..., Any]:
    """The function at FILE.py:name or module:name."""
    source, _, name = where.rpartition(":")
    if not source:
        raise TaskError(f"{where}: write it as FILE.py:function or module:function")
    function = getattr(load_module(source), name, None)
    if not callable(function):
        raise TaskError(f"{source} has no function {name}()")
    return function


def load_module(source: str) -> ModuleType:
    """A module by file or by dotted name."""
    if not source.endswith(".py"):
        try:
            return importlib.import_module(source)
        except ImportError as error:
            raise TaskError(f"module {source} can't be imported: {error}") from error
    path = Path(source).resolve()
    if not path.is_file():
        raise TaskError(f"{path}: no such file")
    name = f"streamrl_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise TaskError(f"{path} can't be imported: {type(error).__name__}: {error}") from error
    return module


def _rows(task: TaskSection, split: str) -> Iterator[Problem]:
    if task.python:
        yield from _from_python(task.python, split)
    elif task.jsonl:
        yield from _from_jsonl(
            Path(task.held_out_jsonl or "" if split == task.held_out_split else task.jsonl)
        )
    else:
        yield from _from_dataset(task.dataset or "", split)


def _from_python(source: str, split: str) -> Iterator[Problem]:
    problems: Callable[[str], Iterable[Problem]] | None = getattr(load_module(source), "problems", None)
    if problems is None:
        raise TaskError(f"{source} has no function problems(split)")
    try:
        yield from problems(split)
    except Exception as error:
        raise TaskError(f"{source}: problems({split!r}) failed: {type(error).__name__}: {error}") from error


def _from_jsonl(path: Path) -> Iterator[Problem]:
    try:
        with path.open() as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError as error:
                        raise TaskError(f"{path}:{number}: not JSON: {error}") from error
    except OSError as error:
        raise TaskError(f"{path}: can't be read: {error}") from error


def _from_dataset(name: str, split: str) -> Iterator[Problem]:
    try:
        import datasets
    except ImportError as error:
        raise TaskError(
            "task.dataset needs the package datasets: pip install 'streamrl[datasets]'"
        ) from error
    try:
        if Path(name).is_dir() and (Path(name) / "dataset_dict.json").exists():
            rows = datasets.load_from_disk(name)[split]
        elif Path(name).is_dir() and (Path(name) / "state.json").exists():
            rows = datasets.load_from_disk(name)
        else:
            rows = datasets.load_dataset(name, split=split)
    except Exception as error:
        raise TaskError(f"dataset {name}, split {split}: {type(error).__name__}: {error}") from error
    yield from rows


def _checked(problem: Any, number: int, task: TaskSection) -> Problem:
    if not isinstance(problem, dict):
        raise TaskError(f"problem {number} is a {type(problem).__name__}; a dict is expected")
    prompt = problem.get(task.prompt_field)
    if not isinstance(prompt, str) or not prompt:
        raise TaskError(f"problem {number} has no text in {task.prompt_field!r} (task.prompt_field)")
    known = problem.get(task.id_field)
    try:
        json.dumps(problem)  # it travels to the reward
    except (TypeError, ValueError) as error:
        raise TaskError(f"problem {number} has a value that JSON does not have: {error}") from error
    name = str(known) if known is not None else hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()
    return {**problem, "id": name, "prompt": prompt}
