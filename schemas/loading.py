"""Reads a run file. Errors name file, line and field, and say what is allowed."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from schemas.explaining import SettingsOrigin, explain
from schemas.runspec import SEAMS, RunSpec
from schemas.seams import IMPORT, LOAD
from schemas.shortening import bounded, printable
from schemas.yaml_text import LARGEST_FILE, BadYaml, Document, Location, read_yaml

_MOST_OVERRIDES = 1_000
_DEEPEST_NAME = 8  # sections in sections, as a.b.c


class RunFileError(ValueError):
    """A run file that can't be used. The message has one line for each problem; it is short and printable."""

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


def load_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Return the run spec in a YAML file, with `a.b=value` overrides. Raises only RunFileError."""
    path = Path(path)
    document = _document(path, _text(path))
    if len(overrides) > _MOST_OVERRIDES:
        raise RunFileError(f"--set is given {len(overrides)} times; at most {_MOST_OVERRIDES} are read")
    for override in overrides:
        apply_override(document.data, override)
    return validate(document.data, path, document.lines, overrides)


def _text(path: Path) -> str:
    """Return the text of a file. Raises RunFileError if it is no regular file, or far too large."""
    try:
        str(path).encode()
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe must not wait
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RunFileError(f"{path}: can't be read: it is no file")
            raw = file.read(LARGEST_FILE + 1)
        if len(raw) > LARGEST_FILE:
            raise RunFileError(
                f"{path}: it is larger than {LARGEST_FILE:,} bytes: a run file is a page of text"
            )
        return raw.decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RunFileError(
            f"{path}:{line}: it is not UTF-8 text (found the byte 0x{error.object[error.start]:02x})"
        ) from None
    except FileNotFoundError:
        raise RunFileError(f"{path}: no such file{_near(path)}") from None
    except RunFileError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise RunFileError(f"{path}: can't be read: {error}") from None


def _document(path: Path, text: str) -> Document:
    try:
        document = read_yaml(text)
    except BadYaml as error:
        raise RunFileError(f"{path}{f':{error.line}' if error.line else ''}: {error}") from None
    if not isinstance(document.data, dict):
        raise RunFileError(f"{path}: a run file is a mapping of sections; see examples/count.yaml")
    if document.double:
        raise RunFileError("\n".join(f"{path}:{line}: {name}: given twice" for name, line in document.double))
    return document


def changes_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what `a.b=value` overrides say, as nested sections. Raises RunFileError."""
    if len(overrides) > _MOST_OVERRIDES:
        raise RunFileError(f"--set is given {len(overrides)} times; at most {_MOST_OVERRIDES} are read")
    found: dict[str, Any] = {}
    for override in overrides:
        apply_override(found, override)
    return found


def validate(
    data: dict[str, Any],
    path: Path,
    lines: Mapping[Location, int] | None = None,
    overrides: Sequence[str] = (),
) -> RunSpec:
    """Return the run spec in parsed data. Raises RunFileError.

    `path`: the run file, beside which other files are looked for. `lines` and `overrides` are for messages.
    """
    try:
        spec = RunSpec.model_validate(_with_imports(data, path.parent), context=LOAD)
        return resolve_paths(spec, path.parent)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise RunFileError(explain(problems, SettingsOrigin(path, lines or {}, overrides), data)) from None


def _with_imports(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the data with absolute paths of the code that it imports, which is read to validate it."""
    found = dict(data)
    for name in SEAMS:
        section = data.get(name)
        if isinstance(section, list):
            found[name] = [_with_import(one, folder) for one in section]
        elif section is not None:
            found[name] = _with_import(section, folder)
    return found


def _with_import(section: Any, folder: Path) -> Any:
    if isinstance(section, dict) and isinstance(where := section.get(IMPORT), str):
        return {**section, IMPORT: _resolved(where, folder)}
    return section


def _resolved(value: str, folder: Path) -> str:
    name, colon, function = value.partition(":")
    try:
        candidate = (folder / name).resolve()
        str(candidate).encode()  # a name that is not UTF-8 could not stand in the run's record
        return f"{candidate}{colon}{function}" if candidate.exists() else value
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a folder that may not be read
        raise RunFileError(f"{value}: can't be looked for beside the run file: {error}") from None


def resolve_paths(spec: RunSpec, folder: Path) -> RunSpec:
    """Return the spec with absolute paths of files that exist beside the run file, for use from anywhere."""

    def resolve(value: str | None) -> str | None:
        return _resolved(value, folder) if value else value

    task = {
        name: resolve(getattr(spec.task, name))
        for name in ("python", "jsonl", "dataset", "reward", "held_out_jsonl", "chat_template")
    }
    model = {name: resolve(getattr(spec.model, name)) for name in ("path", "build")}
    loss = {} if spec.loss.reference is None else {"reference": resolve(spec.loss.reference)}
    lengths = {} if spec.lengths.backbone == "none" else {"backbone": resolve(spec.lengths.backbone)}
    machines = {
        name: one.model_copy(update={"profile": resolve(one.profile)})
        for name, one in spec.placement.machines.items()
    }
    report = str((folder / spec.report).absolute()) if "report" in spec.model_fields_set else spec.report
    return spec.model_copy(
        update={
            "report": report,
            "task": spec.task.model_copy(update=task),
            "model": spec.model.model_copy(update=model),
            "loss": spec.loss.model_copy(update=loss),
            "lengths": spec.lengths.model_copy(update=lengths),
            "placement": spec.placement.model_copy(update={"machines": machines}),
        }
    )


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of run files, for editors."""
    schema = RunSpec.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "StreamRL run file"
    return schema


def _near(path: Path) -> str:
    try:
        names = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def apply_override(data: dict[str, Any], override: str) -> None:
    """Change parsed data in place, as an `a.b=value` override says. Raises RunFileError."""
    name, equals, text = override.partition("=")
    written = f"--set {printable(override, 200)}"
    names = name.split(".")
    if not equals or not all(names):
        raise RunFileError(f"{written}: write it as section.key=value")
    if len(names) > _DEEPEST_NAME:
        raise RunFileError(
            f"{written}: the name has {len(names)} parts; the name of a setting has {_DEEPEST_NAME} at most"
        )
    try:
        value = read_yaml(text)
    except BadYaml as error:
        raise RunFileError(f"{written}: the value is {_not_yaml(error)}") from None
    if value.double:
        raise RunFileError(f"{written}: {value.double[0][0]}: given twice")
    *sections, key = names
    place = data
    for section in sections:
        if place.get(section) is None:
            place[section] = {}
        place = place[section]
        if not isinstance(place, dict):
            raise RunFileError(f"{written}: {printable(section, 80)} is not a section")
    place[key] = value.data


def _not_yaml(error: BadYaml) -> str:
    text = str(error)
    return text if text.startswith("not valid YAML") else f"not allowed: {text}"
