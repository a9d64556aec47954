"""Docstrings and settings are sentences with a subject: none opens with a word that stands for one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from schemas.reference import reference_page

ROOT = Path(__file__).parents[2]
ROOMS = ("streamrl", "schemas", "infra", "producers", "consumers", "flows")
OPENS = re.compile(r"(?:^|(?<=[.:;!?])\s+)(What|Who|Those|They)\b")


def docstrings() -> Iterator[tuple[str, str]]:
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                    yield where, ast.get_docstring(node) or ""


def test_no_sentence_of_a_docstring_opens_with_a_riddle() -> None:
    found = dict(docstrings())
    assert len(found) > 3000
    assert not [where for where, text in found.items() if OPENS.search(text)]


def test_no_sentence_about_a_setting_opens_with_a_riddle() -> None:
    assert not [
        line
        for line in reference_page().splitlines()
        for cell in line.split("|")
        if OPENS.search(cell.strip())
    ]
