"""Explains the errors of a run file to people: file, line, field, what is wrong and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from schemas.runspec import RunSpec
from schemas.seams import seam_of
from schemas.section import is_listed, is_named, keys_of, section_of
from schemas.shortening import shown
from schemas.yaml_text import Location, shown_name

_MOST = 20  # maximum problems that are told of one file


@dataclass(frozen=True, slots=True)
class SettingsOrigin:
    """The origin of settings: the file, the lines of its parts, and the command line's overrides."""

    path: Path
    lines: Mapping[Location, int]
    overrides: Sequence[str] = ()

    def of(self, name: str, location: Location) -> str:
        """Return the place of a setting: the file and line, or the override that gave it."""
        line = self._line(location)
        where = f"{self.path}:{line}" if line else str(self.path)
        said = {override.partition("=")[0]: f"--set {override[:200]}" for override in self.overrides}
        if whole := [text for key, text in said.items() if f"{name}.".startswith(f"{key}.")]:
            return whole[-1]
        if inside := [text for key, text in said.items() if not name or key.startswith(f"{name}.")]:
            return f"{where} with {' '.join(inside[:8])}"
        return where

    def _line(self, location: Location) -> int | None:
        """Return the line of the deepest part of a location that the file has; None if it has none."""
        for length in range(len(location), 0, -1):
            if location[:length] in self.lines:
                return self.lines[location[:length]]
        return None


def explain(problems: Sequence[Any], origin: SettingsOrigin, data: Any) -> str:
    """Return a line for each problem: at most the first 20, and how many more there are.

    `data`: all that was given, which tells what a section chooses.
    """
    lines = dict.fromkeys(_explain(problem, origin, data) for problem in problems[:_MOST])
    more = len(problems) - _MOST
    return "\n".join([*lines, *([f"{origin.path}: … and {more} more problems"] if more > 0 else [])])


def _explain(problem: Any, origin: SettingsOrigin, data: Any) -> str:
    location = tuple(
        part for part in problem["loc"] if not str(part).startswith(("literal[", "list[", "constrained"))
    )
    name = shown_name(location)
    where = origin.of(".".join(str(part) for part in location), location)
    kind, given = problem["type"], problem.get("input")
    section = _section(location[:-1], data)
    if kind == "extra_forbidden":
        return f"{where}: {name}: unknown key{_hint(str(location[-1]), section)}"
    if kind == "missing":
        described = _field(section, str(location[-1])).description if section else None
        return f"{where}: {name}: missing{f' ({described})' if described else ''}"
    if kind == "literal_error":
        return f"{where}: {name}: {_choice(given, problem['ctx']['expected'])}"
    if kind == "model_type" or kind == "model_attributes_type":
        return f"{where}: {name}: a section with keys is expected, found {shown(given)}"
    if kind == "value_error":
        return f"{where}: {name or 'run file'}: {problem['msg'].removeprefix('Value error, ')}"
    message = problem["msg"]
    return f"{where}: {name or 'run file'}: {message[0].lower()}{message[1:]} (found {shown(given)})"


def _hint(key: str, section: type[BaseModel] | None) -> str:
    allowed = sorted(keys_of(section)) if section else []
    close = difflib.get_close_matches(key, allowed, n=1)
    elsewhere = [] if close else [f"{name}.{key}" for name, other in _sections() if key in keys_of(other)]
    hint = f"; did you mean {(close or elsewhere)[0]!r}?" if close or elsewhere else ""
    return f"{hint} (allowed here: {', '.join(allowed)})"


def _choice(given: object, expected: str) -> str:
    options = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    close = difflib.get_close_matches(given[:80], options, n=1) if isinstance(given, str) else []
    return f"{shown(given)} is not one of {expected}{f'; did you mean {close[0]!r}?' if close else ''}"


def _sections(kind: type[BaseModel] = RunSpec, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield all sections with their names, also sections inside others."""
    for name, field in kind.model_fields.items():
        inner = section_of(field)
        if inner is not None:
            yield f"{prefix}{name}", inner
            yield from _sections(inner, f"{prefix}{name}.")


def _field(section: type[BaseModel], key: str) -> FieldInfo:
    return next(one for name, one in section.model_fields.items() if key in (name, one.alias))


def _section(location: Sequence[Any], data: Any) -> type[BaseModel] | None:
    """Return the section that a location is in; None if there is none."""
    here: type[BaseModel] = RunSpec
    parts = iter(location)
    for part in parts:
        field = here.model_fields.get(str(part))
        if field is None:
            return None
        inner = section_of(field)
        if inner is None:
            return None
        data = data.get(part) if isinstance(data, dict) else None
        seam = seam_of(field)
        if is_listed(field):
            at = next(parts, None)
            data = data[at] if isinstance(data, list) and isinstance(at, int) and at < len(data) else None
        here = inner if seam is None else seam.chosen_class(data)
        if is_named(field):
            next(parts, None)
    return here
