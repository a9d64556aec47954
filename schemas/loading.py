"""Reads a run file; what is wrong with it is said by file, line, field and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from schemas.runspec import RunSpec
from schemas.section import is_named, section_of


class RunFileError(ValueError):
    """A run file that can't be used. The message has one line for each problem."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunSpec:
    """The run spec in a YAML file, with `a.b=value` overrides; raises RunFileError."""
    path = Path(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise RunFileError(f"{path}: no such file{_near(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RunFileError(f"{path}: can't be read: {error}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RunFileError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise RunFileError(f"{path}: a run file is a mapping of sections; see examples/count.yaml")
    double = list(_double_keys(root, ""))
    if double:
        raise RunFileError("\n".join(f"{path}:{line}: {name}: given twice" for name, line in double))
    for override in overrides:
        _override(data, override)
    return validate(data, path, root, overrides)


def validate(
    data: dict[str, Any], path: Path, root: yaml.Node | None = None, overrides: Sequence[str] = ()
) -> RunSpec:
    """The run spec in parsed data; `path`, the YAML nodes and the overrides are for the messages."""
    try:
        return resolve_paths(RunSpec.model_validate(data), path.parent)
    except ValidationError as error:
        lines = [_explain(problem, path, root, overrides) for problem in error.errors()]
        raise RunFileError("\n".join(dict.fromkeys(lines))) from None


def resolve_paths(spec: RunSpec, folder: Path) -> RunSpec:
    """The spec with files that exist beside the run file as absolute paths: it can be used from anywhere."""

    def resolve(value: str | None) -> str | None:
        if not value:
            return value
        name, colon, function = value.partition(":")
        candidate = (folder / name).resolve()
        return f"{candidate}{colon}{function}" if candidate.exists() else value

    task = {
        name: resolve(getattr(spec.task, name)) for name in ("python", "jsonl", "reward", "held_out_jsonl")
    }
    task["dataset"] = resolve(spec.task.dataset)
    model = {name: resolve(getattr(spec.model, name)) for name in ("path", "build")}
    loss = {} if spec.loss.reference is None else {"reference": resolve(spec.loss.reference)}
    lengths = {} if spec.lengths.backbone == "none" else {"backbone": resolve(spec.lengths.backbone)}
    return spec.model_copy(
        update={
            "task": spec.task.model_copy(update=task),
            "model": spec.model.model_copy(update=model),
            "loss": spec.loss.model_copy(update=loss),
            "lengths": spec.lengths.model_copy(update=lengths),
        }
    )


def json_schema() -> dict[str, Any]:
    """The JSON schema of run files, for editors."""
    schema = RunSpec.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "StreamRL run file"
    return schema


def _near(path: Path) -> str:
    names = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _double_keys(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """YAML lets the last of two equal keys win silently: we don't."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if name in seen:
            yield name, key.start_mark.line + 1
        seen.add(name)
        yield from _double_keys(value, f"{name}.")


def _override(data: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise RunFileError(f"--set {override}: write it as section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RunFileError(f"--set {override}: the value is not valid YAML: {error}") from None
    *sections, key = name.split(".")
    place = data
    for section in sections:
        if place.get(section) is None:
            place[section] = {}
        place = place[section]
        if not isinstance(place, dict):
            raise RunFileError(f"--set {override}: {section} is not a section")
    place[key] = value


def _explain(problem: Any, path: Path, root: yaml.Node | None, overrides: Sequence[str]) -> str:
    """One line: file, line or --set, field, what is wrong, what is allowed."""
    location = [
        part for part in problem["loc"] if not str(part).startswith(("literal[", "list[", "constrained"))
    ]
    name = ".".join(str(part) for part in location)
    line = _line(root, location)
    where = f"{path}:{line}" if line else str(path)
    keys = {override.partition("=")[0]: f"--set {override}" for override in overrides}
    if whole := [text for key, text in keys.items() if f"{name}.".startswith(f"{key}.")]:
        where = whole[-1]
    elif inside := [text for key, text in keys.items() if not name or key.startswith(f"{name}.")]:
        where = f"{where} with {' '.join(inside)}"
    kind, given = problem["type"], problem.get("input")
    section = _section(location[:-1])
    if kind == "extra_forbidden":
        allowed = sorted(section.model_fields) if section else []
        close = difflib.get_close_matches(str(location[-1]), allowed, n=1)
        elsewhere = (
            [] if close else [f"{n}.{location[-1]}" for n, s in _sections() if location[-1] in s.model_fields]
        )
        hint = f"; did you mean {(close or elsewhere)[0]!r}?" if close or elsewhere else ""
        return f"{where}: {name}: unknown key{hint} (allowed here: {', '.join(allowed)})"
    if kind == "missing":
        described = section.model_fields[str(location[-1])].description if section else None
        return f"{where}: {name}: missing{f' ({described})' if described else ''}"
    if kind == "literal_error":
        allowed_text = problem["ctx"]["expected"]
        options = [word.strip("'") for word in allowed_text.replace(" or ", ", ").split(", ")]
        close = difflib.get_close_matches(str(given), options, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"{where}: {name}: {given!r} is not one of {allowed_text}{hint}"
    if kind == "model_type" or kind == "model_attributes_type":
        return f"{where}: {name}: a section with keys is expected, found {given!r}"
    message = problem["msg"].removeprefix("Value error, ")
    shown = "" if kind == "value_error" else f" (found {given!r})"
    return f"{where}: {name or 'run file'}: {message[0].lower()}{message[1:]}{shown}"


def _sections(kind: type[BaseModel] = RunSpec, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """All sections, those in other ones too, by their names."""
    for name, field in kind.model_fields.items():
        inner = section_of(field)
        if inner is not None:
            yield f"{prefix}{name}", inner
            yield from _sections(inner, f"{prefix}{name}.")


def _section(location: Sequence[Any]) -> type[BaseModel] | None:
    """The section that a location is in."""
    here: type[BaseModel] = RunSpec
    parts = iter(location)
    for part in parts:
        field = here.model_fields.get(str(part))
        if field is None:
            return None
        inner = section_of(field)
        if inner is None:
            return None
        here = inner
        if is_named(field):
            next(parts, None)
    return here


def _line(root: yaml.Node | None, location: Sequence[Any]) -> int | None:
    """The line of the deepest part of a location that the file has."""
    node, line = root, None
    for part in location:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(part):
                    node, line = value, key.start_mark.line + 1
                    break
            else:
                return line
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            return line
    return line
