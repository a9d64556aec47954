"""One word for one thing: no two modules have a public name in common, and the glossary is in order."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("schemas", "infra", "producers", "consumers", "flows")
EACH_HAS_ONE = {
    "main": "a module that is started as a process",
    "body": "a role",
}
SCANNERS = ("kernels.py", "scan_plain.py", "scan_fast.py")  # one of them is chosen
WORD = re.compile(r"\*\*(?P<word>[a-z][a-z -]*)\*\*: [^ ].*\.")


def public_names(file: Path) -> Iterator[str]:
    for node in ast.parse(file.read_text()).body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            targets = [ast.Name(node.name)]
        elif isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        yield from (one.id for one in targets if isinstance(one, ast.Name) and not one.id.startswith("_"))


def modules() -> list[Path]:
    """All but the commands: a command and the Prefect flow that does the same have one name."""
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    return [file for file in files if "cli" not in file.parts]


def test_no_two_modules_have_a_public_name_in_common() -> None:
    found = defaultdict(set)
    for file in modules():
        for name in public_names(file):
            where = "a scanner" if file.name in SCANNERS else str(file.relative_to(ROOT))
            found[name].add(where)
    assert len(found) > 1000
    twice = {name: sorted(files) for name, files in found.items() if len(files) > 1}
    assert not {name: files for name, files in twice.items() if name not in EACH_HAS_ONE}


def test_the_glossary_has_one_line_a_word_in_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("**")]
    assert len(lines) > 50
    assert not [line for line in lines if not WORD.fullmatch(line)]
    words = [line.split("**")[1] for line in lines]
    assert words == sorted(set(words))


def test_no_two_files_have_a_name_in_common() -> None:
    """But for commands: `streamrl replay` is in `replay.py`."""
    names = Counter(file.name for file in modules() if not file.name.startswith("__"))
    assert len(names) > 300
    assert not [name for name, count in names.items() if count > 1]
