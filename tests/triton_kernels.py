"""Triton's kernels without a GPU: its interpreter runs them, and its compiler builds them for an H100."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOT = Path(__file__).parents[1]
_H100 = ("cuda", 90, 32)

Launch = tuple[str, list[str], dict[str, int]]  # a kernel's name; what it was given, in order; its constants


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

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(module, name)

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(*given: Any, **constants: Any) -> None:
                told = [str(getattr(one, "dtype", one)) for one in given]
                launches.append((self.name, told, constants))
                self.kernel[grid](*given, **constants)

            return launch

    for name in kernel_names(module):
        setattr(module, name, Recorded(name))
    work()
    print(json.dumps(launches))


def kernel_names(module: ModuleType) -> set[str]:
    """Return the names of a module's kernels."""
    return {name for name in vars(module) if name.endswith("_kernel")}


def check_compiles(module: ModuleType, launches: str) -> None:
    """Compile a module's kernels as `print_launches` saw them launched, which must be all of them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    said: list[Launch] = json.loads(launches)
    assert {name for name, _, _ in said} == kernel_names(module)
    for name, told, constants in said:
        kernel = getattr(module, name)
        given = dict(zip(kernel.arg_names, told, strict=False)) | constants
        fixed = {one.name for one in kernel.params if one.is_constexpr}
        source = ASTSource(
            kernel, {one: "constexpr" if one in fixed else _type(given[one]) for one in kernel.arg_names},
            {(kernel.arg_names.index(one),): _number(given[one]) for one in fixed},
        )  # fmt: skip
        made = triton.compile(source, target=GPUTarget(*_H100))
        assert made.asm["cubin"], name


def _type(told: str) -> str:
    """Return Triton's name of the type of a tensor of torch's, or of a number."""
    short = told.removeprefix("torch.")
    names = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    return f"*{names.get(short, short.replace('uint', 'u').replace('int', 'i'))}" if short != told else "i32"


def _number(told: str | float) -> float:
    return told if isinstance(told, float) else int(told)
