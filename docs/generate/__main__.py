"""Writes all generated pages. A test fails if one of them is not as the code says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.generate.architecture import architecture_page, pictures
from docs.generate.commands import commands_page
from docs.generate.detectors import detectors_page
from docs.generate.kafka_of_containers import kafka_properties
from docs.generate.messages import messages_page
from docs.generate.metrics import metrics_page
from docs.generate.models import models_page
from docs.generate.python_names import python_page
from docs.generate.topics import topics_page
from schemas.reference import reference_page

DOCS = Path(__file__).parents[1]
PAGES: dict[str, Callable[[], str]] = {
    "run-file.md": reference_page,
    "architecture.md": architecture_page,
    "reference/commands.md": commands_page,
    "reference/detectors.md": detectors_page,
    "reference/messages.md": messages_page,
    "reference/metrics.md": metrics_page,
    "reference/models.md": models_page,
    "reference/python.md": python_page,
    "reference/topics.md": topics_page,
    "../infra/containers/kafka/server.properties": kafka_properties,
}


def generated() -> dict[str, str]:
    """Return the text of each generated file, by its path in docs/."""
    return {name: f"{page().strip()}\n" for name, page in PAGES.items()} | pictures()


def main() -> None:
    """Write the files."""
    for name, text in generated().items():
        file = DOCS / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    main()
