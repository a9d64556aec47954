"""The settings of the broker in infra/containers/compose.yaml: those of the local one, at other addresses."""

from __future__ import annotations

from pathlib import Path

from infra.stack.kafka import KafkaService
from infra.stack.kafka_config import server_properties


def kafka_properties() -> str:
    """Return server.properties for the container `kafka`, which only other containers reach."""
    settings = server_properties(
        data=Path("/var/lib/kafka/data"),
        port=KafkaService.usual_port,
        controller_port=KafkaService.usual_port + 1,
        listen="0.0.0.0",  # noqa: S104 - of the container: compose.yaml does not publish its port
        name="kafka",
    )
    return f"# From infra/stack/kafka_config.py, by `python -m docs.generate`.\n{settings}"
