"""The values that code declares for a field, read from its syntax: by its annotation, and pydantic's `Field`.

An annotation may be an alias of another module, or a class.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import ge, gt, le, lt

from flows.run.inspection.architectures import literal_of, source_of
from producers.engines.vllm_options import VllmOption
from schemas.shortening import shown

_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a string"}
_CONTAINERS = ("dict", "list", "set", "tuple", "type")  # no option's value is one
_ENUMS = ("Enum", "IntEnum", "StrEnum")
_BY_ITSELF = "auto"  # takes the place of an enumeration's member: vLLM chooses
_SHOWN = 8  # allowed words that a message names, if none is like the one that was said
_BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "ge": (ge, "at least"), "gt": (gt, "more than"), "le": (le, "at most"), "lt": (lt, "less than"),
}  # fmt: skip


@dataclass(frozen=True)
class AllowedValues:
    """The values that an annotation allows: all of some plain types, and some more."""

    types: frozenset[str] = frozenset()
    single: tuple[VllmOption, ...] = ()

    def __or__(self, other: AllowedValues) -> AllowedValues:
        return AllowedValues(self.types | other.types, self.single + other.single)

    def wrong(self, value: VllmOption) -> str:
        """Say that a value is none of these; empty if it is one."""
        kind = type(value).__name__
        if kind in self.types or (kind == "int" and "float" in self.types):
            return ""
        alike = [one for one in self.single if type(one).__name__ == kind]
        if _plain(value) in map(_plain, alike):
            return ""
        kinds = self.types | {type(one).__name__ for one in self.single}
        if alike:
            return f"it is {shown(value)}; vLLM takes {_named(value, alike)}"
        takes = " or ".join(words for one, words in _WORDS.items() if one in kinds) or "no plain value"
        return f"it is {shown(value)}; vLLM takes {takes}"


def allowed_values(annotation: ast.AST, code: ast.Module) -> AllowedValues | None:
    """Return the values that an annotation allows; None if that can't be told."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _all_of(allowed_values(one, code) for one in (left, right))
        case ast.Constant(value=None):
            return AllowedValues()
        case ast.Name(id=name) if name in _WORDS:
            return AllowedValues(frozenset({name}))
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)) if name in _CONTAINERS:
            return AllowedValues()
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            return _all_of(_literal_values(values, code))
        case ast.Name(id=name):
            found, there = declaration_of(name, code)
            if isinstance(found, ast.ClassDef):
                return _members(found)
            return None if found is None else allowed_values(found, there)
    return None


def out_of_bounds(value: VllmOption, field: ast.AnnAssign | None) -> str:
    """Say that a value is out of the bounds that pydantic's `Field` sets to a number; empty if it is not."""
    if isinstance(value, bool | str):
        return ""
    bounds = _bounds(field)
    if all(_BOUNDS[one][0](value, bound) for one, bound in bounds.items()):
        return ""
    takes = " and ".join(f"{_BOUNDS[one][1]} {bound:g}" for one, bound in bounds.items())
    return f"it is {shown(value)}; vLLM takes {takes}"


def declaration_of(name: str, code: ast.Module) -> tuple[ast.AST | None, ast.Module]:
    """Return what a module assigns to a name, or its class, or that of the module it is imported from.

    With it comes the code of the module that has it.
    """
    for node in code.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return value, code
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                return value, code
            case ast.ClassDef(name=target) if target == name:
                return node, code
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.startswith("vllm."):
                for one in names:
                    if name == (one.asname or one.name):
                        return declaration_of(one.name, _module(module))
    return None, code


def _named(value: VllmOption, alike: list[VllmOption]) -> str:
    """Name the values that are like a wrong one, or all that there are if they are few."""
    named = {_plain(one): str(one) for one in reversed(alike)}
    words = list(reversed(named.values()))
    if isinstance(value, str) and len(words) > _SHOWN:
        close = difflib.get_close_matches(str(_plain(value)), [str(one) for one in named], n=3)
        words = [named[one] for one in close] or words[:_SHOWN]
        return ", ".join([*words, "and others"])
    return ", ".join(words[:-1]) + f" or {words[-1]}" if len(words) > 1 else words[0]


def _plain(value: VllmOption) -> VllmOption:
    """Return a value as vLLM compares it: it does not mind how some words are written."""
    return value.lower().replace("-", "_") if isinstance(value, str) else value


def _bounds(field: ast.AnnAssign | None) -> dict[str, float]:
    found: dict[str, float] = {}
    match field and field.value:
        case ast.Call(func=ast.Name(id="Field"), keywords=keywords):
            for one in keywords:
                if one.arg in _BOUNDS and isinstance(bound := literal_of(one.value), int | float):
                    found[one.arg] = bound
    return found


def _literal_values(values: ast.expr, code: ast.Module) -> Iterator[AllowedValues | None]:
    for one in values.elts if isinstance(values, ast.Tuple) else [values]:
        if isinstance(one, ast.Constant) and isinstance(one.value, bool | int | float | str):
            yield AllowedValues(single=(one.value,))
        else:
            yield allowed_values(one, code)


def _members(node: ast.ClassDef) -> AllowedValues | None:
    """Return what names an enumeration's members: numbers or words.

    None if the class is no enumeration, or its members can't be told.
    """
    if not any(isinstance(base, ast.Name) and base.id in _ENUMS for base in node.bases):
        return None
    found: list[VllmOption] = []
    for one in node.body:
        match one:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=bool() | int() as number)):
                found.append(number)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant()):
                found += [name, _BY_ITSELF]
            case ast.Assign(targets=[ast.Name()]):
                return None
    return AllowedValues(single=tuple(found))


def _all_of(parts: Iterable[AllowedValues | None]) -> AllowedValues | None:
    found = AllowedValues()
    for part in parts:
        if part is None:
            return None
        found |= part
    return found


def _module(name: str) -> ast.Module:
    """Return the code of a module of vLLM, or of a package of modules."""
    file = name.removeprefix("vllm.").replace(".", "/")
    code = source_of("vllm", f"{file}.py")
    return code if code.body else source_of("vllm", f"{file}/__init__.py")
