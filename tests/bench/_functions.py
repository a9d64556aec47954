"""Real text with real lengths: functions of the standard library and of sympy, which torch brings along.

The prompt is a function's head with its docstring, the answer its body, as in tests of code generation. No
package at hand ships prompts with answers of a model; these were written by people, one answer per prompt.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from producers.ranker.ranker import Answered, question_of

_TOKEN = re.compile(r"[A-Za-z_]+|\d|[^\sA-Za-z_\d]|\n *")
_VOCABULARY = 150_000
_SHORTEST = 3  # tokens of a body


def functions(rng: np.random.Generator) -> list[Answered]:
    """Return the functions in any order."""
    paths = sysconfig.get_paths()
    texts: dict[str, str] = {}
    for folder in (Path(paths["stdlib"]), Path(paths["purelib"]) / "sympy"):
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder).parts
            if not {"site-packages", "test", "tests"}.intersection(inside):
                texts.update(_of(path))
    pairs = [(head, _TOKEN.findall(body)) for head, body in texts.items()]
    found = [
        Answered(question_of(str(place), None, _tokens(head)), [len(body)])
        for place, (head, body) in enumerate(pairs)
        if len(body) >= _SHORTEST
    ]
    return [found[place] for place in rng.permutation(len(found))]


def _of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield head and body of each function that has a docstring."""
    try:
        text = path.read_text()
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # examples of what can't be parsed
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and ast.get_docstring(node):
            end = node.body[0].end_lineno
            yield "\n".join(lines[node.lineno - 1 : end]), "\n".join(lines[end : node.end_lineno])


def _tokens(text: str) -> list[int]:
    return [zlib.crc32(word.encode()) % _VOCABULARY for word in _TOKEN.findall(text)]
