"""Where our own code is: a checkout has the rooms at its top, the wheel has them inside `streamrl`."""

from __future__ import annotations

import os
from pathlib import Path

_PREFIX = __name__.removesuffix("infra.code")  # "" in a checkout, "streamrl." in the wheel
ROOT = Path(__file__).resolve().parents[1 + _PREFIX.count(".")]  # the folder from which our code is imported
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"  # of the checkout; the wheel has a copy


def module(name: str) -> str:
    """Return the full name of one of our modules, such as `consumers.trainer`, to start it by `python -m`."""
    return _PREFIX + name


def child_environment() -> dict[str, str]:
    """Return this process's environment, for a child that shall find our code as this process does."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
