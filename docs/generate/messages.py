"""The page about messages: their fields, with the comments that stand beside these in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import schemas.messages

_HEAD = """# Messages

The records of a run's [topics](topics.md). `streamrl.open_run` gives samples and step records as objects
with these fields. Times are in seconds since 1970. A reader refuses a record whose numbers are out of range
or whose fields contradict each other; it goes to the dead letters with the reason. `Float32s` and the like
are numpy arrays, and so are `Int32Differences`, which a packed record has as differences.
"""
_SOURCE = Path(str(schemas.messages.__file__))
_COMMENT = re.compile(r"^ {4}\w+: .*?  # (?P<text>.*)$")


def messages_page() -> str:
    """Return the page."""
    lines = _SOURCE.read_text().splitlines()
    classes = {node.name: node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.ClassDef)}
    bases = {name: [ast.unparse(base) for base in node.bases] for name, node in classes.items()}
    inherited = {base for names in bases.values() for base in names} & classes.keys()
    found = []
    for name, node in classes.items():
        parents = [classes[base] for base in bases[name] if base in inherited]
        if (parents or "Message" in bases[name]) and name not in inherited:
            fields = [one for part in (*parents, node) for one in _fields(part, lines)]
            found.append(_section(node, fields))
    return _HEAD + "".join(found)


def _section(kind: ast.ClassDef, fields: list[tuple[str, str, str]]) -> str:
    doc = (ast.get_docstring(kind) or "").split("\n\n")
    told = "\n\n".join(" ".join(part.split()) for part in doc)
    rows = [f"| `{name}` | `{of}` | {comment} |" for name, of, comment in fields]
    head = [f"\n## {kind.name}\n", f"{told}\n", "| field | type | meaning |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _fields(kind: ast.ClassDef, lines: list[str]) -> Iterator[tuple[str, str, str]]:
    for node in kind.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            of = ast.unparse(node.annotation)
            if not of.startswith("ClassVar"):
                found = _COMMENT.match(lines[(node.end_lineno or node.lineno) - 1])
                yield node.target.id, of.replace("|", "or"), found["text"] if found else ""
