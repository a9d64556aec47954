"""Who may import whom: the rooms of the design."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {"schemas", "infra", "producers", "consumers", "flows"}
ALLOWED = {
    "schemas": set(),
    "infra": {"schemas"},
    "producers": {"schemas", "infra"},
    "consumers": {"schemas", "infra"},
    "flows": ROOMS,
}
FOREIGN = {"schemas": {"torch", "kafka", "prefect"}}
FORBIDDEN_EVERYWHERE = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for file in files:
        ours = imports(file) & (ROOMS | {"tests"})
        assert ours <= ALLOWED[room] | {room}, f"{file} imports {ours - ALLOWED[room] - {room}}"
        others = imports(file) & (FOREIGN.get(room, set()) | FORBIDDEN_EVERYWHERE)
        assert not others, f"{file} imports {others}"


def test_no_torch_load() -> None:
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            assert "torch.load(" not in file.read_text(), file


def test_the_example_task_imports_nothing_of_ours() -> None:
    for file in (ROOT / "examples").glob("*.py"):
        assert not imports(file) & ROOMS, file
