"""The start of vLLM on CPUs, without its changes to a compiler that is off."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from producers.engines import quick_start

_IMPORTED = re.compile(r"from vllm\.env_override import (\w+)")


def test_all_that_vllm_takes_from_its_changes_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.env_override", raising=False)
    quick_start.leave_compiler_unchanged()
    found = find_spec("vllm")
    assert found is not None and found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0])
    assert (folder / "env_override.py").is_file(), "vLLM has renamed it: its start takes a third longer again"
    taken = {name for path in folder.rglob("*.py") for name in _IMPORTED.findall(path.read_text())}
    assert taken
    assert [name for name in taken if not hasattr(sys.modules["vllm.env_override"], name)] == []


def test_what_is_imported_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.env_override", sys)
    quick_start.leave_compiler_unchanged()
    assert sys.modules["vllm.env_override"] is sys
