"""Imports the user's own code: `FILE.py:name` or `module:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from schemas.shortening import printable


class BadImport(ValueError):
    """The user's code can't be imported. The message names the file and the reason."""


def said(error: BaseException) -> str:
    """Describe an error of the user's code: its type and the start of its message."""
    return printable(f"{type(error).__name__}: {error}", 1_000)


def imported(where: str, what: str = "function") -> Any:
    """Return what `FILE.py:name` or `module:name` names; None if the module lacks it. Raises BadImport."""
    source, colon, name = where.rpartition(":")
    if not colon or not source or not name:
        raise BadImport(f"{where}: write it as FILE.py:{what} or module:{what}")
    return getattr(load_module(source), name, None)


def load_module(source: str) -> ModuleType:
    """Import a module by file or by dotted name. Raises BadImport if that fails."""
    if not source.endswith(".py"):
        try:
            return importlib.import_module(source)
        except (Exception, SystemExit) as error:
            raise BadImport(f"module {source} can't be imported: {said(error)}") from error
    path = Path(source).resolve()
    if not path.is_file():
        raise BadImport(f"{path}: no such file")
    name = f"streamrl_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise BadImport(f"{path} can't be imported: {said(error)}") from error
    return module
