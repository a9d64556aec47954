"""The wheel, installed alone into an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*words: str | Path, cwd: Path, code: int = 0, **env: str) -> str:
    """Run a command that is expected to end with `code`, and return its output."""
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env={**os.environ, **env}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-4000:]
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Build the wheel into a folder, and return its file."""
    run(
        Path(sys.executable).with_name("uv"), "build", "--wheel", "--no-build-isolation", "--python",
        sys.executable, "-o", folder, ROOT, cwd=folder,
    )  # fmt: skip
    (found,) = folder.glob("*.whl")
    return found


def install_wheel(wheel: Path) -> Path:
    """Make an environment that holds the wheel alone, and return its folder of commands.

    Other packages are found where they are, by `env`.
    """
    uv, environment = Path(sys.executable).with_name("uv"), wheel.parent / "environment"
    run(uv, "venv", "--python", sys.executable, environment, cwd=wheel.parent)
    run(
        uv, "pip", "install", "--python", environment / "bin" / "python", "--no-deps", wheel, cwd=wheel.parent
    )
    return environment / "bin"


def env(folder: Path) -> dict[str, str]:
    """The environment of commands whose home is in a folder."""
    others = sysconfig.get_path("purelib")
    cache = os.environ["STREAMRL_CACHE"]  # Kafka's jars are there: see tests/conftest.py
    return {
        "PYTHONPATH": others, "STREAMRL_HOME": str(folder / "home"), "STREAMRL_CACHE": cache,
        "COLUMNS": "200",
    }  # fmt: skip
