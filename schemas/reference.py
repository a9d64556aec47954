"""Makes the page about run files from the spec's own descriptions: `streamrl schema --markdown`."""

from __future__ import annotations

from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from schemas.runspec import RunSpec
from schemas.seams import Seam, seam_of
from schemas.section import is_named, section_of
from schemas.yaml_text import DEEPEST, MOST_NODES

_HEAD = """# The run file

One YAML file is all of a run. Unknown keys are errors, and so are numbers out of range; `--set
section.key=value` changes a setting for one start. This page is made by `streamrl schema --markdown`;
`streamrl schema` prints the JSON schema for editors. Paths of files are relative to the run file.

`streamrl run FILE --check` starts nothing, and says of each thing whether it is fine: the run file and the
files that it names; the model's config, tensors and tokenizer; the task, which is imported in a process of
its own, without credentials and with a deadline: its first problems, their length in tokens, and the reward
of one answer; the store (is it there, can it be written); the broker, if it is not `local`. All that is
wrong is said at once. It ends with 0 if all is fine, with 2 if the run file can't be read or names files
that are not there, with 1 if something else is wrong. Whatever of this takes no time is looked at before
every start, too.

A run file has at most 1 MiB, {values:,} values and {levels} levels. It holds text, numbers, true, false and
null, in lists and mappings; an alias counts as all that it stands for. Dates and other tags are errors.
"""


def reference_page() -> str:
    """Return the whole page, in Markdown."""
    head = _HEAD.format(values=MOST_NODES, levels=DEEPEST)
    sections = [head, "## Top level\n", _table(RunSpec, skip_sections=True)]
    for name, field in RunSpec.model_fields.items():
        kind = section_of(field)
        if kind is not None:
            sections += [f"## {name}\n", f"{(kind.__doc__ or '').strip()}\n", _table(kind)]
        if (seam := seam_of(field)) is not None:
            sections += [_by_choice(seam)]
    return "\n".join(sections)


def _by_choice(seam: Seam[Any]) -> str:
    """Return the table of the keys that only some choices have, or that they have another default for."""
    found: dict[str, dict[str, list[str]]] = {}  # by key and meaning: the choices, with their defaults
    for name in seam.built_in():
        for key, field in seam.own_fields(seam.class_of(name)).items():
            default = f"`{name}` {_default(field)}".rstrip()
            found.setdefault(key, {}).setdefault(_meaning(field), []).append(default)
    if not found:
        return ""
    rows = [
        f"Of one {seam.word}, or of some:\n",
        f"| key | {seam.word}, default | meaning |",
        "|---|---|---|",
    ]
    for key, meanings in found.items():
        rows += [f"| `{key}` | {', '.join(defaults)} | {meaning} |" for meaning, defaults in meanings.items()]
    return "\n".join(rows) + "\n"


def _table(kind: type[BaseModel], *, skip_sections: bool = False, prefix: str = "") -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"] if not prefix else []
    for name, field in kind.model_fields.items():
        inner = section_of(field)
        if inner is not None and skip_sections:
            continue
        if inner is not None:
            if not field.default:  # it may be left out, and its description says what that means
                rows.append(f"| `{prefix}{name}` |  | {field.description} |")
            name = f"{name}.NAME" if is_named(field) else name
            rows.append(_table(inner, prefix=f"{prefix}{name}.").rstrip("\n"))
            continue
        rows.append(f"| `{prefix}{field.alias or name}` | {_default(field)} | {_meaning(field)} |")
    return "\n".join(rows) + "\n"


def _meaning(field: FieldInfo) -> str:
    return " ".join(filter(None, [field.description, _choices(field.annotation), _range(field)]))


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "needed"
    return "" if field.default is None else f"`{field.default}`".replace("(", "[").replace(")", "]")


def _range(field: FieldInfo) -> str:
    """Return the range of numbers that are allowed, as text; empty unless it has both bounds."""
    found = {type(one).__name__: getattr(one, type(one).__name__.lower(), None) for one in field.metadata}
    low, high = found.get("Ge", found.get("Gt")), found.get("Le", found.get("Lt"))
    if low is None or high is None:
        return ""
    whole = int in (field.annotation, *get_args(field.annotation))
    first = f"From {low + 1 if 'Gt' in found else low}" if whole or "Ge" in found else f"Above {low}"
    return f"{first}{', below' if 'Lt' in found else ' to'} {_number(high)}."


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def _choices(kind: Any) -> str:
    options = [option for option in get_args(kind) if isinstance(option, str)]
    if options and get_origin(kind) is not None:
        return "One of " + ", ".join(f"`{option}`" for option in options) + "." if len(options) > 1 else ""
    return ""
