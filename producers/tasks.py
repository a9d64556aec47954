"""Loads the user's task: problems and a reward, from Python, JSONL or a Hugging Face dataset."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from producers.chat_messages import PromptContent
from producers.dataset_rows import read_dataset
from producers.problems import Problem, TaskError, checked_problem, read_jsonl
from schemas.importing import BadImport, imported, said
from schemas.runspec import RunSpec, TaskSection
from schemas.shortening import shown

__all__ = ["Problem", "Reward", "TaskError", "load_problems", "load_reward"]

Reward = Callable[[Problem, str], float | dict[str, float]]

_log = logging.getLogger("streamrl")
_END = object()
_MOST_PARTS = 100


def load_problems(spec: RunSpec, split: str) -> list[Problem]:
    """Return the problems of a split, each with "id" and "prompt".

    Of more than task.limit the rest is left out, with a warning. Raises TaskError if there is none.
    """
    rows = _rows(spec.task, split)
    problems = list(identified(itertools.islice(rows, spec.task.limit), spec.task, split))
    if not problems:
        raise TaskError(f"the task has no problems in split {split!r}")
    if len(problems) == spec.task.limit and _has_more(rows):
        _log.warning(
            "the task has more than %d problems in split %r; the others are left out (task.limit)",
            spec.task.limit, split,
        )  # fmt: skip
    return problems


def first_problems(task: TaskSection, split: str, most: int) -> list[Problem]:
    """Return the first problems of a split, at most `most`, as `load_problems` gives them."""
    return list(identified(itertools.islice(_rows(task, split), most), task, split))


def identified(rows: Iterable[Any], task: TaskSection, split: str) -> Iterator[Problem]:
    """Yield rows as problems, each with a unique id. Raises TaskError for a row that can't be used."""
    seen: dict[str, int] = {}
    alike: dict[str, Iterator[int]] = {}
    for number, row in enumerate(rows):
        problem = checked_problem(row, number, task)
        name = problem["id"]
        if name is None:
            name = _name_by_prompt(problem["prompt"], seen, alike)
        elif name in seen:
            raise TaskError(
                f"two problems of split {split!r} have the id {shown(name)}: problems {seen[name]} and "
                f"{number} (task.id_field {task.id_field!r}); ids must differ"
            )
        seen[name] = number
        yield {**problem, "id": name}


def _name_by_prompt(prompt: PromptContent, seen: Mapping[str, int], alike: dict[str, Iterator[int]]) -> str:
    """Name a problem by a hash of its prompt.

    If several share the prompt, the second gets "-2", and so on. `alike`: the next number, by hash.
    """
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    numbers = alike.setdefault(name, itertools.count(1))
    return next(one for n in numbers if (one := name if n == 1 else f"{name}-{n}") not in seen)


def _has_more(rows: Iterator[Any]) -> bool:
    try:
        return next(rows, _END) is not _END
    except TaskError:
        return True  # an error beyond the limit does not matter


def load_reward(task: TaskSection) -> Reward:
    """Return the task's reward function."""
    where = task.reward or f"{task.python}:reward"
    return load_function(where)


def parts_of(value: Any) -> dict[str, float]:
    """Return a reward by the names of its parts; a plain number is the part "reward".

    Raises TaskError if a part is no finite number.
    """
    given = value if isinstance(value, dict) else {"reward": value}
    if not given or len(given) > _MOST_PARTS:
        raise TaskError(f"the reward has {len(given)} parts; 1 to {_MOST_PARTS} are allowed")
    parts = {str(name): _number(part) for name, part in given.items()}
    if not all(math.isfinite(part) for part in parts.values()):
        raise TaskError(f"the reward is not a finite number: {shown(parts)}")
    return parts


def _number(part: Any) -> float:
    if isinstance(part, str | bytes):  # float() would take "1", and hide a mistake
        raise TaskError(f"the reward is not a number: {shown(part)} is text")
    try:
        return float(part)
    except (TypeError, ValueError, OverflowError) as error:
        raise TaskError(f"the reward is not a number, but a {type(part).__name__}: {said(error)}") from None


def load_function(where: str, takes: str = "") -> Callable[..., Any]:
    """Return the function at FILE.py:name or module:name. Raises TaskError if there is none.

    `takes`: its arguments, for the message.
    """
    try:
        function = imported(where)
    except BadImport as error:
        raise TaskError(str(error)) from error
    if not callable(function):
        source, _, name = where.rpartition(":")
        raise TaskError(f"{source} has no function {name}({takes})")
    found: Callable[..., Any] = function
    return found


def _rows(task: TaskSection, split: str) -> Iterator[Problem]:
    if task.python:
        yield from _from_python(task.python, split)
    elif task.jsonl:
        yield from read_jsonl(Path(task.held_out_jsonl or "" if split == task.held_out_split else task.jsonl))
    else:
        yield from read_dataset(task, split)


def _from_python(source: str, split: str) -> Iterator[Any]:
    problems = load_function(f"{source}:problems", "split")
    try:
        yield from problems(split)
    except (Exception, SystemExit) as error:
        raise TaskError(f"{source}: problems({split!r}) failed: {said(error)}") from error
