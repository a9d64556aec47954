"""The page about the public names of the package `streamrl`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import GenericAlias
from typing import Any

import streamrl

_HEAD = """# Python names

All public names, by module. [From Python](../python.md) shows how to read and call runs; the pages "Add a …"
show how to extend StreamRL. Everything else may change from one release to the next.
"""


def python_page() -> str:
    """Return the page."""
    modules = [
        one.name for one in pkgutil.iter_modules(streamrl.__path__) if one.name not in ("__main__", "runs")
    ]
    sections = [_section("streamrl", importlib.import_module("streamrl.runs"))]
    sections += [
        _section(f"streamrl.{name}", importlib.import_module(f"streamrl.{name}")) for name in modules
    ]
    return _HEAD + "".join(sections)


def _section(title: str, module: Any) -> str:
    lines = [f"\n## {title}\n"]
    for name in module.__all__:
        thing = getattr(module, name)
        lines.append(f"**`{name}{_signature(thing)}`** — {_first(thing)}\n")
        lines += [f"- `{method}` — {told}" for method, told in _methods(thing)]
        lines.append("")
    return "\n".join(lines)


def _methods(thing: Any) -> Iterator[tuple[str, str]]:
    """Yield the public methods that a class defines by itself."""
    if not inspect.isclass(thing):
        return
    for name, value in vars(thing).items():
        inner = value.fget if isinstance(value, property) else value
        if not name.startswith("_") and inspect.isfunction(inner) and inspect.getdoc(inner):
            yield name if isinstance(value, property) else f"{name}{_signature(inner)}", _first(inner)


def _signature(thing: Any) -> str:
    """Return the names of a function's arguments; a class is shown by its name."""
    if not inspect.isfunction(thing):
        return ""
    parameters = [one for one in inspect.signature(thing).parameters.values() if one.name != "self"]
    shown = [one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in parameters]
    return f"({', '.join(shown)})"


def _first(thing: Any) -> str:
    """Return the first paragraph of a docstring; of a type's alias, the type."""
    if not (inspect.isclass(thing) or inspect.isfunction(thing)) or isinstance(thing, GenericAlias):
        return f"`{thing}`"
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split()).replace("|", "\\|")
