"""For the command line of a server of vLLM that a generator uses: see docs/how-to/server.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from producers.engines.server_door import ServerDoor

if TYPE_CHECKING:
    from producers.engines.server_worker import ServedWorker

__all__ = ["ServedWorker", "ServerDoor"]


def __getattr__(name: str) -> Any:
    """Import what a worker needs in workers alone: it changes vLLM when it is imported."""
    if name == "ServedWorker":
        from producers.engines.server_worker import ServedWorker

        return ServedWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
