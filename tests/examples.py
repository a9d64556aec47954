"""Files that pages of the documentation show, for tests to run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[1] / "docs"
_FILE = re.compile(r'^```\w+ title="(?P<name>[^"]+)"\n(?P<text>.*?)^```', re.M | re.S)
_YAML = re.compile(r"^```yaml\n(.*?)^```", re.M | re.S)


def write_examples(page: str, folder: Path) -> Path:
    """Write the files that a page shows into a folder. Return the path of the first one."""
    found = [(match["name"], match["text"]) for match in _FILE.finditer((DOCS / f"{page}.md").read_text())]
    assert found, f"docs/{page}.md shows no file"
    for name, text in found:
        (folder / name).write_text(text)
    return folder / found[0][0]


def settings_of(page: str) -> dict[str, Any]:
    """Return the part of a run file that a page shows."""
    found = _YAML.search((DOCS / f"{page}.md").read_text())
    assert found, f"docs/{page}.md shows no part of a run file"
    said: dict[str, Any] = yaml.safe_load(found[1])
    return said
