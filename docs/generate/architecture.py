"""The page about the architecture: the rooms and who imports whom, drawn from the code."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = {
    "flows": "Prefect flows, the command line, and all that starts, watches and reports a run",
    "producers": "the generation service: feeder, length ranker, dispatch, generators, engines",
    "consumers": "the trainer: stream, batches, losses, learners, steps, replay",
    "infra": "the ground that both sides stand on: bus, stores, weights, sites, processes",
    "schemas": "the contract: run file, messages, topics, wire",
}
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 150, 40, 30, 60
_HEAD = """# Architecture

This page is drawn from the code: `python -m docs.generate`. An arrow says "imports"; arrows that follow
from others are left out. `producers` and `consumers` never import each other: all that passes between them
is a record on a topic or an object in the store. No two modules, and no two folders of a room, import each
other in a circle; a test holds that (`tests/unit/test_rooms.py`). [How a run works](how-it-works.md) tells
how the processes work together.

![the rooms](architecture/rooms.svg)
"""

Arrows = dict[str, set[str]]


def architecture_page() -> str:
    """Return the page."""
    return _HEAD + "".join(_room(room, told) for room, told in ROOMS.items())


def pictures() -> dict[str, str]:
    """Return the pictures of the page, by their paths in docs/."""
    rooms = {room: {other for other in _rooms_of(room) if other != room} for room in ROOMS}
    folders = {f"architecture/{room}.svg": _folders(room) for room in ROOMS}
    found = {path: drawn(arrows) for path, arrows in folders.items() if len(arrows) > 1}
    return {"architecture/rooms.svg": drawn(rooms)} | found


def _room(room: str, told: str) -> str:
    lines = [f"\n## {room}\n", f"{told[0].upper()}{told[1:]}.\n"]
    if len(_folders(room)) > 1:
        lines.append(f"![the folders of {room}](architecture/{room}.svg)\n")
    lines += ["| part | subject |", "|---|---|"]
    for part in sorted((ROOT / room).iterdir(), key=lambda one: (one.is_file(), one.name)):
        if part.is_dir() and part.name != "__pycache__":
            lines.append(f"| `{part.name}/` | {_subject(part)} |")
        elif part.suffix == ".py" and part.name != "__init__.py":
            lines.append(f"| `{part.name}` | {_subject(part)} |")
    return "\n".join([*lines, ""])


def _subject(part: Path) -> str:
    """Return the first sentence of a file's or folder's docstring."""
    file = part / "__init__.py" if part.is_dir() else part
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0].replace("\n", " ")


def _imports(file: Path) -> set[str]:
    """Return our modules that a file imports, anywhere in it."""
    nodes = ast.walk(ast.parse(file.read_text()))
    found = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name for name in found if name.partition(".")[0] in ROOMS}


def _rooms_of(room: str) -> set[str]:
    return {name.partition(".")[0] for file in (ROOT / room).rglob("*.py") for name in _imports(file)}


def _folders(room: str) -> Arrows:
    """Return which folder of a room imports which. Files at the room's top belong to none."""
    folders = [one.name for one in (ROOT / room).iterdir() if one.is_dir() and one.name != "__pycache__"]
    found: Arrows = {}
    for folder in sorted(folders):
        names = {name for file in (ROOT / room / folder).rglob("*.py") for name in _imports(file)}
        parts = {name.split(".")[1] for name in names if name.startswith(f"{room}.")}
        found[folder] = (parts & set(folders)) - {folder}
    return found


def floors(arrows: Arrows) -> list[list[str]]:
    """Return the nodes floor by floor, from the top: each imports only from floors below it."""
    height: dict[str, int] = {}

    def of(node: str) -> int:
        if node not in height:
            height[node] = 1 + max((of(other) for other in arrows[node]), default=-1)
        return height[node]

    top = max((of(node) for node in arrows), default=-1)
    return [sorted(node for node in arrows if of(node) == level) for level in range(top, -1, -1)]


def reduced(arrows: Arrows) -> Arrows:
    """Return the arrows without those that follow from others."""

    def reached(node: str) -> set[str]:
        return set().union(*({other} | reached(other) for other in arrows[node]))

    return {
        node: {one for one in others if not any(one in reached(other) for other in others - {one})}
        for node, others in arrows.items()
    }


def drawn(arrows: Arrows) -> str:
    """Return a picture of boxes in floors. Imports that follow from others have no arrow."""
    levels = floors(arrows)
    widest = max(map(len, levels))
    width = widest * (_WIDTH + _GAP_X) + _GAP_X
    at: dict[str, tuple[float, float]] = {}
    for row, level in enumerate(levels):
        left = (width - len(level) * (_WIDTH + _GAP_X) + _GAP_X) / 2
        for column, node in enumerate(level):
            at[node] = left + column * (_WIDTH + _GAP_X), _GAP_X + row * (_HEIGHT + _GAP_Y)
    height = len(levels) * (_HEIGHT + _GAP_Y)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    )
    lines = [
        f'{head}font-family="sans-serif" font-size="14">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'{tip}<path d="M0 0L8 4L0 8z" fill="#667"/></marker>',
    ]
    few = reduced(arrows)
    lines += [_arrow(at[node], at[other]) for node in sorted(few) for other in sorted(few[node])]
    for node, (x, y) in sorted(at.items()):
        lines.append(
            f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#e8eefc" stroke="#456"/>'
            f'<text x="{x + _WIDTH / 2}" y="{y + 25}" text-anchor="middle" fill="#123">{node}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    x1, y1 = start[0] + _WIDTH / 2, start[1] + _HEIGHT
    x2, y2 = end[0] + _WIDTH / 2, end[1]
    bend = (y2 - y1) / 2
    return (
        f'<path d="M{x1} {y1}C{x1} {y1 + bend} {x2} {y2 - bend} {x2} {y2}" fill="none" stroke="#667" '
        'marker-end="url(#tip)"/>'
    )
