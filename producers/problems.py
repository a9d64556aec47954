"""Checks a task's problems, and reads JSONL files of them. Foreign text is bounded before it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.errors import Explained
from producers.chat_messages import PromptContent, split_messages
from schemas.importing import said
from schemas.runspec import TaskSection
from schemas.shortening import shown

Problem = dict[str, Any]

LARGEST_PROBLEM = 4 << 20  # bytes of a problem as JSON: it must fit a record together with its tokens
_LONGEST_ID = 256  # characters
_PROMPT, _MESSAGES = "prompt", "messages"
_DEEPEST = 64  # levels of lists and dicts


class TaskError(Explained):
    """A user's task can't be used; the message names the file and the problem."""

    lasting = True


def checked_problem(problem: Any, number: int, task: TaskSection) -> Problem:
    """Return the problem with text in "id" and text or messages in "prompt"; the id is None if it has none.

    If the messages end with one of the assistant, that one is the problem's "answer", and not in its prompt.
    Raises TaskError if the problem can't be used. `number` names the problem in messages.
    """
    if not isinstance(problem, dict):
        raise TaskError(f"problem {number} is a {type(problem).__name__}; a dict is expected")
    known = problem.get(task.id_field)
    named = "" if known is None else f"; its id is {shown(known)}"
    field, prompt = _prompt_of(problem, task)
    if not isinstance(prompt, str | list) or not prompt:
        found = f"; a {type(prompt).__name__} is there" if prompt is not None and prompt != "" else ""
        raise TaskError(f"problem {number} has no text in {field!r} (task.prompt_field){found}{named}")
    wrong = _wrong(problem) or _wrong_prompt(prompt, field, task) or _wrong_id(known, task.id_field)
    if wrong:
        raise TaskError(f"problem {number} {wrong}{named}")
    own: Problem = {"id": None if known is None else str(known), "prompt": prompt}
    if isinstance(prompt, str):
        return {**problem, **own}
    try:
        own["prompt"], answer = split_messages(prompt)
    except ValueError as error:
        raise TaskError(f"problem {number}: {field!r}: {error}{named}") from None
    expected = {} if answer is None or problem.get("answer") is not None else {"answer": answer}
    return {**problem, **own, **expected}


def _prompt_of(problem: Problem, task: TaskSection) -> tuple[str, Any]:
    """Return a problem's prompt, with the name of its field: `messages`, if there is no `prompt`."""
    field = task.prompt_field
    if field == _PROMPT and problem.get(field) is None and isinstance(problem.get(_MESSAGES), list):
        field = _MESSAGES
    return field, problem.get(field)


def _wrong_prompt(prompt: PromptContent, field: str, task: TaskSection) -> str:
    if isinstance(prompt, list):
        return ""
    if task.system and not task.chat:
        return f"has text in {field!r}, to which task.system can't be added: set task.chat: true"
    return _wrong_text(prompt, field)


def _wrong_id(known: Any, field: str) -> str:
    if known is None:
        return ""
    if isinstance(known, bool) or not isinstance(known, str | int | float):
        return f"has a {type(known).__name__} for an id; text or a number is expected (task.id_field)"
    text = str(known)
    if not 0 < len(text) <= _LONGEST_ID:
        return f"has an id of {len(text):,} characters; 1 to {_LONGEST_ID} are allowed (task.id_field)"
    return _wrong_text(text, field)


def _wrong(problem: Problem) -> str:
    """Return why a problem can't travel to the reward as JSON; empty if it can."""
    try:
        text = json.dumps(problem, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"has a value that JSON does not have: {said(error)}"
    if _levels(problem) > _DEEPEST:
        return f"has more than {_DEEPEST} levels of lists and dicts"
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        return f"has text that is no Unicode: the lone surrogate U+{ord(text[error.start]):04X}"
    return (
        f"has {size:,} bytes as JSON; at most {LARGEST_PROBLEM:,} are allowed"
        if size > LARGEST_PROBLEM
        else ""
    )


def _levels(value: Any) -> int:
    """Count the levels of lists and dicts. (A loop can't come here: `json.dumps` refuses it before.)"""
    levels, here = 0, [value]
    while here:
        inside = [one for one in here if isinstance(one, dict | list | tuple)]
        here = [inner for one in inside for inner in (one.values() if isinstance(one, dict) else one)]
        levels += bool(inside)
    return levels


def _wrong_text(text: str, field: str) -> str:
    return f"has the character U+0000 in {field!r}: it is not allowed there" if "\0" in text else ""


def read_jsonl(path: Path) -> Iterator[Any]:
    """Yield the values of a JSONL file, one for each line. Raises TaskError with the line's number."""
    try:
        if not path.is_file():
            raise TaskError(f"{path}: there is no such file")
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LARGEST_PROBLEM + 1):
                number += 1
                if len(line) > LARGEST_PROBLEM:
                    raise TaskError(f"{path}:{number}: a line of more than {LARGEST_PROBLEM:,} bytes")
                if line.strip():
                    yield _parsed(line, f"{path}:{number}")
    except OSError as error:
        raise TaskError(f"{path}: can't be read: {error}") from error


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"), parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        found = f"found the byte 0x{line[error.start]:02x}, the {error.start + 1}th of the line"
        raise TaskError(f"{where}: it is not UTF-8 text: {found}") from None
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: not JSON: {said(error)}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shown(text)} is too large for a number")
    return number
