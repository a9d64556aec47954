"""Documents that are made from the code, links between documents, and the Python that they show."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

from schemas.loading import load_run_file
from schemas.reference import reference_page

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def test_the_page_about_run_files_is_current() -> None:
    written = (ROOT / "docs" / "run-file.md").read_text()
    assert written.strip() == reference_page().strip(), "run: streamrl schema --markdown > docs/run-file.md"


def test_examples_are_valid() -> None:
    for file in (ROOT / "examples").glob("*.yaml"):
        load_run_file(file)


def test_links_lead_somewhere() -> None:
    for file in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", file.read_text()):
            assert (file.parent / target).exists(), f"{file.name} links to {target}"


def test_snippets_import_what_is_there() -> None:
    snippets = [
        one for file in PAGES for one in re.findall(r"^```python\n(.*?)^```", file.read_text(), re.M | re.S)
    ]
    assert len(snippets) > 1
    for node in (node for snippet in snippets for node in ast.walk(ast.parse(snippet))):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
