"""Checks a run file's arguments of vLLM by the names, types and bounds of the installed one, without
importing it.

An annotation may be an alias of another module, or a class. Where it can't be told which values are allowed,
nothing is said: the engine looks again.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import ge, gt, le, lt

from flows.run.inspection.architectures import source_of
from producers.engines.vllm_options import VllmOption, unknown_option
from schemas.shortening import shown

_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a string"}
_CONTAINERS = ("dict", "list", "set", "tuple", "type")  # no option's value is one
_ENUMS = ("Enum", "IntEnum", "StrEnum")
_BY_ITSELF = "auto"  # takes the place of an enumeration's member: vLLM chooses
_SHOWN = 8  # allowed words that a message names, if none is like the one that was said
_BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "ge": (ge, "at least"), "gt": (gt, "more than"), "le": (le, "at most"), "lt": (lt, "less than"),
}  # fmt: skip
_AT_ONCE = "max_num_batched_tokens"


@dataclass(frozen=True)
class _Values:
    """The values that an annotation allows: all of some plain types, and some more."""

    types: frozenset[str] = frozenset()
    single: tuple[VllmOption, ...] = ()

    def __or__(self, other: _Values) -> _Values:
        return _Values(self.types | other.types, self.single + other.single)

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


def wrong_options(options: Mapping[str, VllmOption], slots: int) -> list[str]:
    """Return what the installed vLLM would refuse of `generator.options`. Empty if it is not found."""
    code = source_of("vllm", "engine/arg_utils.py") if options else ast.Module([], [])
    known = _arguments(code)
    if not known:
        return []
    found = [unknown_option(name, known) for name in options if name not in known]
    return found + [
        f"generator.options.{name}: {wrong}"
        for name, value in options.items()
        if name in known and (wrong := _wrong(name, value, known, code) or _too_few(name, value, slots))
    ]


def _wrong(name: str, value: VllmOption, known: Mapping[str, ast.AnnAssign], code: ast.Module) -> str:
    values = _values(known[name].annotation, code)
    if values is not None and (wrong := values.wrong(value)):
        return wrong
    if isinstance(value, bool | str):
        return ""
    bounds = _bounds(_setting(known[name], known, code))
    if all(_BOUNDS[one][0](value, bound) for one, bound in bounds.items()):
        return ""
    takes = " and ".join(f"{_BOUNDS[one][1]} {bound:g}" for one, bound in bounds.items())
    return f"it is {shown(value)}; vLLM takes {takes}"


def _too_few(name: str, value: VllmOption, slots: int) -> str:
    if name != _AT_ONCE or type(value) is not int or value >= slots:
        return ""
    return (
        f"it is {value}, and each of the {slots} samples of generator.slots takes a token of a step: set it "
        f"to {slots} or more, or lower generator.slots"
    )


def _arguments(code: ast.Module) -> dict[str, ast.AnnAssign]:
    """Return vLLM's arguments. Empty if they are not found, or not all."""
    for node in code.body:
        # a class that takes fields from others has more of them than stand there
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs" and not node.bases:
            return _fields(node)
    return {}


def _fields(node: ast.ClassDef) -> dict[str, ast.AnnAssign]:
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    return {one.target.id: one for one in fields if isinstance(one.target, ast.Name)}


def _setting(
    argument: ast.AnnAssign, known: Mapping[str, ast.AnnAssign], code: ast.Module
) -> ast.AnnAssign | None:
    """Return the field of vLLM's settings that an argument becomes: its default says which, or its name."""
    if place := _place(argument):
        return _field(*place, code)
    if not (isinstance(argument.value, ast.Constant) and isinstance(argument.target, ast.Name)):
        return None
    sections = {place[0] for one in known.values() if (place := _place(one))}
    found = [one for section in sorted(sections) if (one := _field(section, argument.target.id, code))]
    return found[0] if len(found) == 1 else None


def _place(argument: ast.AnnAssign) -> tuple[str, str] | None:
    """Return the class and the field that an argument has its default from; None if it has none."""
    match argument.value:
        case ast.Attribute(value=ast.Name(id=section), attr=name):
            return section, name
        case ast.Call(
            func=ast.Name(id="get_field"), args=[ast.Name(id=section), ast.Constant(value=str(name))]
        ):
            return section, name
    return None


def _field(section: str, name: str, code: ast.Module) -> ast.AnnAssign | None:
    found, _ = _defined(section, code)
    return _fields(found).get(name) if isinstance(found, ast.ClassDef) else None


def _bounds(field: ast.AnnAssign | None) -> dict[str, float]:
    """Return the bounds that pydantic's `Field` sets to a number."""
    found: dict[str, float] = {}
    match field and field.value:
        case ast.Call(func=ast.Name(id="Field"), keywords=keywords):
            for one in keywords:
                if one.arg in _BOUNDS and isinstance(bound := _literal(one.value), int | float):
                    found[one.arg] = bound
    return found


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _values(annotation: ast.AST, code: ast.Module) -> _Values | None:
    """Return the values that an annotation allows; None if that can't be told."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _all_of(_values(one, code) for one in (left, right))
        case ast.Constant(value=None):
            return _Values()
        case ast.Name(id=name) if name in _WORDS:
            return _Values(frozenset({name}))
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)) if name in _CONTAINERS:
            return _Values()
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            return _all_of(_literal_values(values, code))
        case ast.Name(id=name):
            found, there = _defined(name, code)
            if isinstance(found, ast.ClassDef):
                return _members(found)
            return None if found is None else _values(found, there)
    return None


def _literal_values(values: ast.expr, code: ast.Module) -> Iterator[_Values | None]:
    for one in values.elts if isinstance(values, ast.Tuple) else [values]:
        if isinstance(one, ast.Constant) and isinstance(one.value, bool | int | float | str):
            yield _Values(single=(one.value,))
        else:
            yield _values(one, code)


def _members(node: ast.ClassDef) -> _Values | None:
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
    return _Values(single=tuple(found))


def _all_of(parts: Iterable[_Values | None]) -> _Values | None:
    found = _Values()
    for part in parts:
        if part is None:
            return None
        found |= part
    return found


def _defined(name: str, code: ast.Module) -> tuple[ast.AST | None, ast.Module]:
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
                        return _defined(one.name, _module(module))
    return None, code


def _module(name: str) -> ast.Module:
    """Return the code of a module of vLLM, or of a package of modules."""
    file = name.removeprefix("vllm.").replace(".", "/")
    code = source_of("vllm", f"{file}.py")
    return code if code.body else source_of("vllm", f"{file}/__init__.py")
