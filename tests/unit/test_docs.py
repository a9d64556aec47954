"""Documents that are made from the code, and links between documents."""

from __future__ import annotations

import re
from pathlib import Path

from schemas.loading import load_run_file
from schemas.reference import reference_page

ROOT = Path(__file__).parents[2]


def test_the_page_about_run_files_is_current() -> None:
    written = (ROOT / "docs" / "run-file.md").read_text()
    assert written.strip() == reference_page().strip(), "run: streamrl schema --markdown > docs/run-file.md"


def test_examples_are_valid() -> None:
    for file in (ROOT / "examples").glob("*.yaml"):
        load_run_file(file)


def test_links_lead_somewhere() -> None:
    for file in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", file.read_text()):
            assert (file.parent / target).exists(), f"{file.name} links to {target}"
