"""Triton's kernels without a GPU: its interpreter runs them, and its compiler builds them for an H100."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOT = Path(__file__).parents[1]
_H100 = ("cuda", 90, 32)
_SHARED_BYTES = 232_448  # of its memory that the warps of a program share
_ALIGNED = 16  # bytes of addresses, and what numbers are multiples of, that Triton compiles otherwise

Launch = tuple[str, list[str], dict[str, float]]  # a kernel's name; what it was given, in order; what by name


def interpreted(test: Callable[[], Any]) -> str:
    """Call a function of a test module in a process in which Triton interprets; return what it prints."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(_ROOT)}
    code = f"from {test.__module__} import {test.__name__}; {test.__name__}()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def print_launches(module: ModuleType, work: Callable[[], object]) -> None:
    """Print how a module's kernels are launched while `work` runs."""
    launches: list[Launch] = []
    for name in kernel_names(module):
        setattr(module, name, _Recorded(launches, name, getattr(module, name)))
    work()
    print(json.dumps(launches))


def launches_at(module: ModuleType, work: Callable[[], object]) -> str:
    """Return how `work` would launch a module's kernels. Nothing is computed, and tensors take no memory."""
    from torch._subclasses import FakeTensorMode

    launches: list[Launch] = []
    kernels = {name: getattr(module, name) for name in kernel_names(module)}
    vars(module).update({name: _Recorded(launches, name) for name in kernels})
    try:
        with FakeTensorMode():
            work()
    finally:
        vars(module).update(kernels)
    return json.dumps(launches)


class _Recorded:
    """Stands for a kernel: writes its launches down, and launches it if it is given."""

    def __init__(self, launches: list[Launch], name: str, kernel: Any = None) -> None:
        self._launches, self._name, self._kernel = launches, name, kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*given: Any, **named: Any) -> None:
            told = [str(getattr(one, "dtype", one)) for one in given]
            self._launches.append((self._name, told, named))
            if self._kernel is not None:
                self._kernel[grid](*given, **named)

        return launch


def kernel_names(module: ModuleType) -> frozenset[str]:
    """Return the names of a module's kernels."""
    assert module.__file__
    return kernels_in(Path(module.__file__))


@cache
def kernels_in(file: Path) -> frozenset[str]:
    """Return the names of a file's kernels: Triton's functions that no other of them calls."""
    code = file.read_text()
    if not re.search("^(import|from) triton", code, re.MULTILINE):
        return frozenset()
    compiled = {
        one.name: {inner.id for inner in ast.walk(one) if isinstance(inner, ast.Name)}
        for one in ast.walk(ast.parse(code))
        if isinstance(one, ast.FunctionDef) and any("jit" in ast.unparse(by) for by in one.decorator_list)
    }
    return frozenset(compiled).difference(*compiled.values())


def check_compiles(module: ModuleType, launches: str) -> None:
    """Compile a module's kernels as they were launched, which must be all of them.

    Tensors count as aligned. Raises AssertionError also if a kernel's registers do not hold what it computes.
    """
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    said: list[Launch] = json.loads(launches)
    assert {name for name, _, _ in said} == kernel_names(module)
    built: set[str] = set()
    for name, told, named in said:
        kernel = getattr(module, name)
        given = dict(zip(kernel.arg_names, told, strict=False)) | named
        options = {one: given.pop(one) for one in named.keys() - set(kernel.arg_names)}
        types = {one.name: _type(one, given[one.name]) for one in kernel.params}
        fixed = {(n,): _number(given[one]) for n, one in enumerate(types) if types[one] == "constexpr"}
        alike = {
            (n,): [["tt.divisibility", _ALIGNED]]
            for n, one in enumerate(kernel.params)
            if types[one.name] != "constexpr" and _is_aligned(one, given[one.name])
        }
        if (key := repr((name, types, fixed, alike, options))) not in built:
            built.add(key)
            source = compiler.ASTSource(kernel, types, fixed, alike)
            _check_fits(compiler.compile(source, target=GPUTarget(*_H100), options=options), key)


def _check_fits(made: Any, what: str) -> None:
    """Check what a kernel takes of a multiprocessor. A stack means that registers were too few."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        words = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    uses = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", said))
    assert int(uses["STACK"]) == int(uses["LOCAL"]) == 0, f"registers are spilled: {uses} {what}"
    assert made.metadata.shared <= _SHARED_BYTES, what


def _type(param: Any, told: str | float) -> str:
    """Return Triton's name of the type of what a launch gives a parameter: torch's tensor, or a number."""
    if param.is_constexpr or (told in {"1", 1} and not param.do_not_specialize):
        return "constexpr"
    short = str(told).removeprefix("torch.")
    if short == str(told):
        return "i64" if int(told) >= 1 << 31 else "i32"
    names = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    return f"*{names.get(short, short.replace('uint', 'u').replace('int', 'i'))}"


def _is_aligned(param: Any, told: str | float) -> bool:
    if str(told).startswith("torch."):
        return not param.do_not_specialize_on_alignment
    return not param.do_not_specialize and int(told) % _ALIGNED == 0


def _number(told: str | float) -> float:
    return told if isinstance(told, float) else int(told)
