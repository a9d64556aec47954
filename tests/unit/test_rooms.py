"""Who may import whom: the rooms of the design."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
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


@cache
def nodes(file: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(file.read_text())))


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in nodes(file):
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


@cache
def modules() -> dict[str, Path]:
    found = {}
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            found[".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = file
    return found


@cache
def arrows() -> dict[str, set[str]]:
    """By module, the modules that it imports, also inside of functions."""
    known = modules()
    found: dict[str, set[str]] = {name: set() for name in known}
    for name, file in known.items():
        for node in nodes(file):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = {f"{node.module}.{alias.name}" for alias in node.names} & known.keys()
                found[name] |= names or ({node.module} & known.keys())
    return found


def circle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """Some nodes that lead to each other in a circle; none if there is no circle."""
    left = {node: set(others) for node, others in graph.items()}
    while ground := [node for node, others in left.items() if not others & left.keys()]:
        for node in ground:
            del left[node]
    return sorted(left)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = arrows()
    assert sum(map(len, graph.values())) > 1000
    assert not circle_in(graph)


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_no_folders_and_files_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    def part(name: str) -> str:
        return ".".join(name.split(".")[:2])

    graph: dict[str, set[str]] = {}
    for name, others in arrows().items():
        if name.startswith(f"{room}."):
            mine = graph.setdefault(part(name), set())
            mine |= {part(other) for other in others if other.startswith(f"{room}.")} - {part(name)}
    assert len(graph) > 5
    assert not circle_in(graph)


def test_at_the_top_of_flows_are_prefect_flows_alone() -> None:
    files = [file for file in (ROOT / "flows").glob("*.py") if file.name != "__init__.py"]
    assert len(files) >= 4
    assert not [file.name for file in files if "@flow(" not in file.read_text()]


def test_no_torch_load() -> None:
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            assert "torch.load(" not in file.read_text(), file


def test_the_example_task_imports_nothing_of_ours() -> None:
    for file in (ROOT / "examples").glob("*.py"):
        assert not imports(file) & ROOMS, file


def test_no_constructor_starts_a_thread_or_a_process_or_opens_a_topic() -> None:
    """`open()` or `with` does: whoever only makes an object leaves nothing behind."""
    found = []
    for name, file in modules().items():
        for kind in (node for node in nodes(file) if isinstance(node, ast.ClassDef)):
            for method in kind.body:
                if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "__post_init__"):
                    calls = [node.func for node in ast.walk(method) if isinstance(node, ast.Call)]
                    attributes = {one.attr for one in calls if isinstance(one, ast.Attribute)}
                    names = {one.id for one in calls if isinstance(one, ast.Name)}
                    if {"start", "reader"} & attributes or {"start_child"} & (names | attributes):
                        found.append(f"{name}.{kind.name}")
    assert not found
