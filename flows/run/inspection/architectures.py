"""Finds the kinds of models that the installed transformers and vLLM know, without importing them."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

_GENERATING = {"_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS"}


@cache
def trained() -> dict[str, str]:
    """Return the classes of transformers' causal language models by model_type. Empty without a table."""
    for name, value in _tables("transformers", "models/auto/modeling_auto.py"):
        if name == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES" and isinstance(value, ast.Call) and value.args:
            pairs = literal_of(value.args[0])
            return {str(key): str(one) for key, one in pairs} if isinstance(pairs, list) else {}
    return {}


@cache
def generated() -> frozenset[str]:
    """Return the classes that vLLM generates with. Empty if its table is not found."""
    return frozenset(_engine_modules())


def engine_code(name: str) -> str:
    """Return the code of vLLM's file that has a class, without importing it. Empty if it is not found."""
    module = _engine_modules().get(name)
    return ast.unparse(source_of("vllm", f"model_executor/models/{module}.py")) if module else ""


@cache
def _engine_modules() -> dict[str, str]:
    """Return the modules of the classes that vLLM generates with; empty where one can't be told."""
    found: dict[str, str] = {}
    for table, value in _tables("vllm", "model_executor/models/registry.py"):
        if table in _GENERATING and isinstance(value, ast.Dict):
            for key, place in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant):
                    told = literal_of(place.elts[0]) if isinstance(place, ast.Tuple) else ""
                    found.setdefault(str(key.value), str(told or ""))
    return found


def _tables(package: str, file: str) -> list[tuple[str, ast.expr]]:
    """Return the names that a package's file assigns at its top level, each with the expression."""
    tables: list[tuple[str, ast.expr]] = []
    for node in source_of(package, file).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        tables += [(one.id, value) for one in targets if isinstance(one, ast.Name) and value is not None]
    return tables


def source_of(package: str, file: str) -> ast.Module:
    """Return the code of a file of an installed package, without importing it; no code if it is not there."""
    try:
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            return ast.Module([], [])
        return ast.parse((Path(found.origin).parent / file).read_text())
    except (ImportError, OSError, ValueError, SyntaxError):
        return ast.Module([], [])


def literal_of(node: ast.expr) -> object:
    """Return the value that an expression writes out; None if it is computed."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
