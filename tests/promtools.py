"""Prometheus's own tools, as `make promtool` brings them, or those of the machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

_FETCHED = Path(__file__).parents[1] / ".streamrl" / "bin"


def promtool(name: str = "promtool") -> str:
    """The path of `promtool` or `prometheus`. Skips the test if there is none."""
    fetched = _FETCHED / name
    found = str(fetched) if fetched.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not there: `make promtool` fetches it from Debian's packages")
    return found
