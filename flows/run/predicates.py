"""Conditions on the metrics of a step, such as `grad_norm > 10 or nan`, that a user writes for `bisect`.

A condition is parsed, never evaluated as Python: only numbers, names, comparisons, arithmetic, and, or, not,
and a few functions. Names are the metrics of a step; `nan` says whether one of its numbers is not finite, and
`gap` is `logprob_gap`. Names of a replay, such as `apart_logprobs`, say how far a stage is from its record.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import Explained
from schemas.importing import said
from schemas.metrics import METRICS, REWARD_PART
from schemas.shortening import shown
from schemas.stages import Stage

Values = Mapping[str, float]
APART = "apart_"  # before a stage's name: by how much a replay differs from the record
SHORT = {"gap": "logprob_gap"}
_LONGEST = 1000  # characters of an expression
_DEEPEST = 50

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_FUNCTIONS: dict[str, tuple[Callable[..., float], range]] = {  # each with how many values it takes
    "abs": (abs, range(1, 2)), "min": (min, range(2, 100)), "max": (max, range(2, 100)),
    "log": (math.log, range(1, 3)),
}  # fmt: skip
_OTHER = {"different", "nan", *SHORT}


class BadPredicate(Explained):
    """An expression that can't be understood; the message names the part."""


@dataclass(frozen=True)
class Predicate:
    """A condition on a step."""

    text: str
    holds: Callable[[Values], bool]
    replays: bool  # whether it needs a replay: the ledger alone does not say


def predicate(text: str) -> Predicate:
    """Parse an expression, or import a predicate by `FILE.py:function`. Raises BadPredicate."""
    if text.partition(":")[0].endswith(".py"):
        return Predicate(text, _imported(text), False)
    if len(text) > _LONGEST:
        raise BadPredicate(f"--when has {len(text)} characters; {_LONGEST} are the most")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadPredicate(
            f"--when {shown(text)} is no expression, such as 'grad_norm > 10 or nan': {error}"
        ) from None
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(_FUNCTIONS)
    _check(names)
    held = _compiled(tree, 0)

    replays = any(name.startswith(APART) or name == "different" for name in names)
    return Predicate(text, lambda values: bool(held(values)), replays)


def _check(names: set[str]) -> None:
    known = {*METRICS, *_OTHER, *(f"{APART}{stage.name.lower()}" for stage in Stage)}
    for name in sorted(names):
        if name not in known and not name.startswith((REWARD_PART, "tokens_class_")):
            raise BadPredicate(
                f"--when: a step has no value {name[:60]}; it has {', '.join(sorted(_OTHER))}, the metrics "
                f"(docs/reference/metrics.md), and, by a replay, {APART}logprobs and so on for each stage"
            )


def _compiled(node: ast.expr, depth: int) -> Callable[[Values], Any]:
    if depth > _DEEPEST:
        raise BadPredicate("--when is nested too deeply")
    inside = lambda one: _compiled(one, depth + 1)  # noqa: E731
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return lambda values: value
        case ast.Name(id=name):
            key = SHORT.get(name, name)
            return lambda values: values.get(key, math.nan)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            one = inside(operand)
            return lambda values: not one(values)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            one = inside(operand)
            return lambda values: -one(values)
        case ast.BoolOp(op=op, values=parts):
            found, all_ = [inside(part) for part in parts], isinstance(op, ast.And)
            return lambda values: (all if all_ else any)(part(values) for part in found)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _ARITHMETIC:
            apply, a, b = _ARITHMETIC[type(op)], inside(left), inside(right)
            return lambda values: _defined(apply, a(values), b(values))
        case ast.Compare(left=left, ops=ops, comparators=rights) if all(type(op) in _COMPARE for op in ops):
            terms, signs = [inside(one) for one in (left, *rights)], [_COMPARE[type(op)] for op in ops]

            def compare(values: Values) -> bool:
                found = [term(values) for term in terms]
                return all(sign(a, b) for sign, a, b in zip(signs, found, found[1:], strict=False))

            return compare
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if (
            name in _FUNCTIONS and len(args) in _FUNCTIONS[name][1]
        ):
            function, given = _FUNCTIONS[name][0], [inside(one) for one in args]
            return lambda values: _defined(function, *(one(values) for one in given))
    raise BadPredicate(
        f"--when: {shown(ast.unparse(node))} can't be used: write numbers, metrics, comparisons, and, or, "
        f"not, + - * / and {', '.join(_FUNCTIONS)}"
    )


def _defined(function: Callable[..., float], *given: Any) -> float:
    """Return the value of a function; NaN where it has none, as a division by 0 or the logarithm of -1."""
    try:
        return function(*given)
    except (ArithmeticError, ValueError):
        return math.nan


def _imported(text: str) -> Callable[[Values], bool]:
    """Import a user's predicate: a function that gets the step's values and says whether it holds."""
    path, _, name = text.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise BadPredicate(f"--when {text}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function: Callable[[Values], bool] = getattr(module, name)
    except Exception as error:
        raise BadPredicate(f"--when {text} can't be imported: {error!r}") from error
    if not callable(function):
        raise BadPredicate(f"--when {text}: it is no function")

    def holds(values: Values) -> bool:
        try:
            return bool(function(dict(values)))
        except Exception as error:  # the user's code may raise anything
            step = f"{values.get('step', math.nan):g}"
            raise BadPredicate(f"--when {text} failed at step {step}: {said(error)}") from error

    return holds
