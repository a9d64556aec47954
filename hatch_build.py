"""Builds the wheel: all rooms inside one package, `streamrl`, with the same names, and the examples.

A checkout has the rooms at its top, and code there says `from infra.bus import Reader`. In the wheel the same
line says `from streamrl.infra.bus import Reader`, so that nothing else stands at the top of an environment.
Only import statements change. A module that is started as a process is named by `infra.code.module`.
"""

from __future__ import annotations

import ast
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "streamrl"
ROOMS = ("flows", "consumers", "producers", "schemas", "infra")


class WheelHook(BuildHookInterface[Any]):
    """Lays the package out in a folder of its own, and has hatchling take that."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds. An editable install imports the checkout as it is."""
        if version == "editable":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="streamrl-wheel-"))
        lay_out(Path(self.root), self._folder / PACKAGE)
        build_data["force_include"][str(self._folder / PACKAGE)] = PACKAGE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling when the wheel is written."""
        if version != "editable":
            shutil.rmtree(self._folder)


def lay_out(checkout: Path, target: Path) -> None:
    """Write the package as it is in the wheel."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(checkout / PACKAGE, target, ignore=ignored)
    for room in ROOMS:
        shutil.copytree(checkout / room, target / room, ignore=ignored)
    shutil.copytree(checkout / "examples", target / "examples", ignore=ignored)
    for file in target.rglob("*.py"):
        file.write_text(inside_package(file.read_text(), str(file.relative_to(target))))


def inside_package(source: str, where: str) -> str:
    """The source with its imports of rooms as they are inside the package."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source, where)):
        if isinstance(node, ast.Import) and any(_is_ours(alias.name) for alias in node.names):
            raise ValueError(f"{where}:{node.lineno}: write `from … import …`: `import infra.bus` has no "
                             "name of its own in the wheel")  # fmt: skip
        if isinstance(node, ast.ImportFrom) and not node.level and _is_ours(node.module or ""):
            line = lines[node.lineno - 1]
            before, after = line[: node.col_offset], line[node.col_offset :]
            lines[node.lineno - 1] = before + after.replace(
                f"from {node.module}", f"from {PACKAGE}.{node.module}", 1
            )
    return "".join(lines)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ROOMS
