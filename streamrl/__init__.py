"""StreamRL: reinforcement learning for language models, generation and training apart and overlapping.

`train` runs a run file, `open_run` reads a run. The other modules here have what a file of your own needs to
add a loss, a learner, an engine, a dispatch policy, a store or a tracker.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.runs import OpenRun, RunFailed, RunResult, open_run, train

__all__ = ["OpenRun", "RunFailed", "RunResult", "__version__", "open_run", "train"]

try:
    __version__ = _version("streamrl")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0"


def __getattr__(name: str) -> Any:
    """Import the names of `streamrl.runs` when they are first used: `import streamrl` itself is light."""
    if name in __all__:
        return getattr(importlib.import_module("streamrl.runs"), name)
    raise AttributeError(f"module 'streamrl' has no attribute {name!r}")
