"""Checks a run file's arguments of vLLM by the names and types of the installed one, without importing it.

An annotation may be an alias of another module, or a class. Where a type can't be told, nothing is said: the
engine looks again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from flows.run.inspection.architectures import source_of
from producers.engines.vllm_options import VllmOption, unknown_option
from schemas.shortening import shown

_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a string"}
_CONTAINERS = ("dict", "list", "set", "tuple", "type")  # no option's value is one
_AT_ONCE = "max_num_batched_tokens"


def wrong_options(options: Mapping[str, VllmOption], slots: int) -> list[str]:
    """Return what the installed vLLM would refuse of `generator.options`. Empty if it is not found."""
    code = source_of("vllm", "engine/arg_utils.py") if options else ast.Module([], [])
    known = _annotations(code)
    if not known:
        return []
    found = [unknown_option(name, known) for name in options if name not in known]
    found += [
        f"generator.options.{name}: {wrong}"
        for name, value in options.items()
        if name in known and (wrong := _wrong_type(value, _types(known[name], code)))
    ]
    if type(most := options.get(_AT_ONCE)) is int and most < slots:
        found.append(
            f"generator.options.{_AT_ONCE}: it is {most}, and each of the {slots} samples of generator.slots "
            f"takes a token of a step: set it to {slots} or more, or lower generator.slots"
        )
    return found


def _wrong_type(value: VllmOption, types: set[str] | None) -> str:
    """Say that a value is of none of the types; empty if it is of one, or they can't be told."""
    kind = type(value).__name__
    if types is None or kind in types or (kind == "int" and "float" in types):
        return ""
    takes = " or ".join(words for one, words in _WORDS.items() if one in types) or "no plain value"
    return f"it is {shown(value)}; vLLM takes {takes}"


def _annotations(code: ast.Module) -> dict[str, ast.expr]:
    """Return vLLM's arguments with their annotations. Empty if they are not found, or not all."""
    for node in code.body:
        # a class that takes fields from others has more of them than stand there
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs" and not node.bases:
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            return {one.target.id: one.annotation for one in fields if isinstance(one.target, ast.Name)}
    return {}


def _types(annotation: ast.expr, code: ast.Module) -> set[str] | None:
    """Return the names of plain types that an annotation allows; None if that can't be told."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _all_of(_types(one, code) for one in (left, right))
        case ast.Constant(value=None):
            return set()
        case ast.Name(id=name) if name in _WORDS:
            return {name}
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)) if name in _CONTAINERS:
            return set()
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            return _all_of(_literal_types(values, code))
        case ast.Name(id=name):
            return _types_of_alias(name, code)
    return None


def _literal_types(values: ast.expr, code: ast.Module) -> Iterator[set[str] | None]:
    for one in values.elts if isinstance(values, ast.Tuple) else [values]:
        yield {type(one.value).__name__} if isinstance(one, ast.Constant) else _types(one, code)


def _all_of(parts: Iterable[set[str] | None]) -> set[str] | None:
    found: set[str] = set()
    for part in parts:
        if part is None:
            return None
        found |= part
    return found


def _types_of_alias(name: str, code: ast.Module) -> set[str] | None:
    """Return the types of a name that a module assigns, or imports from another one of vLLM."""
    for node in code.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return _types(value, code)
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                return _types(value, code)
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.startswith("vllm."):
                for one in names:
                    if name == (one.asname or one.name):
                        file = module.removeprefix("vllm.").replace(".", "/")
                        return _types_of_alias(one.name, source_of("vllm", f"{file}.py"))
    return None
