"""Errors of kafka-python in words: some hold a dump of the whole request and of its answer."""

from __future__ import annotations

from kafka.errors import InvalidReplicationFactorError, PolicyViolationError

from schemas.shortening import printable

_ADVICE: dict[type[BaseException], str] = {
    InvalidReplicationFactorError: "the cluster has fewer brokers than placement.kafka.replication says",
    PolicyViolationError: "a policy of the cluster does not allow it: ask whoever runs the cluster",
}
_DUMPS = ("Request '", "Request(", "Response(")


def said_by_kafka(error: BaseException) -> str:
    """Return the reason of an error in a line, without requests and answers."""
    text = " ".join(str(error).split())
    if any(mark in text for mark in _DUMPS):
        text = str(getattr(error, "description", "") or getattr(error, "message", ""))
    name = type(error).__name__
    said = text if name in text else f"{name}: {text}" if text else name
    advice = next((words for kind, words in _ADVICE.items() if isinstance(error, kind)), "")
    return printable(f"{advice} ({said})" if advice else said, 500)
