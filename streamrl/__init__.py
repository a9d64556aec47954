"""StreamRL: reinforcement learning for language models, generation and training apart and overlapping."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version

try:
    __version__ = _version("streamrl")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0"
