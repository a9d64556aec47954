"""Runs a part of a bench in a process of its own: vLLM allows one engine a process, memory starts anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tests.bench._runs import ROOT

_NOTHING: Mapping[str, str] = {}


def result_of(module: str, *words: str, env: Mapping[str, str] = _NOTHING) -> Any:
    """Run a module of this folder; return what it prints behind RESULT. Raises RuntimeError if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.bench.{module}", *words],
        cwd=ROOT, env={**os.environ, **env, "HF_HUB_OFFLINE": "1"}, capture_output=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"tests.bench.{module} failed:\n{done.stderr.decode()[-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))
