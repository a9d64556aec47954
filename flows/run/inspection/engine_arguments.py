"""Checks a run file's arguments of vLLM by those of the installed one, without importing it.

Where it can't be told which values are allowed, nothing is said: the engine looks again.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from flows.run.inspection.architectures import source_of
from flows.run.inspection.declared_values import allowed_values, declaration_of, out_of_bounds
from producers.engines.vllm_options import VllmOption, unknown_option

_AT_ONCE = "max_num_batched_tokens"


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
    values = allowed_values(known[name].annotation, code)
    if values is not None and (wrong := values.wrong(value)):
        return wrong
    return out_of_bounds(value, _setting(known[name], known, code))


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
    found, _ = declaration_of(section, code)
    return _fields(found).get(name) if isinstance(found, ast.ClassDef) else None
