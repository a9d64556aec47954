"""The page about topics."""

from __future__ import annotations

import schemas.messages
from schemas.topics import Topic, Topics
from schemas.wire import Message

_HEAD = """# Topics

A run has the topics below, named by its id: `count-1.prompts` and so on. A record is a msgpack header with
raw arrays ([messages](messages.md)); nothing is pickled. `streamrl rm` removes the topics of a run.

| topic | partitions | kept | records |
|---|---|---|---|
"""


def messages_of(topic: str) -> list[type[Message]]:
    """Return the kinds of messages of a topic, such as `prompts`: their docstrings name it first."""
    kinds = [
        one for one in vars(schemas.messages).values() if isinstance(one, type) and issubclass(one, Message)
    ]
    return [kind for kind in kinds if f"`<run>.{topic}`" in (kind.__doc__ or "").partition(":")[0]]


def topics_page() -> str:
    """Return the page."""
    rows = []
    for topic in Topics("<run>", 3).all():
        name = topic.name.rpartition(".")[2]
        kinds = ", ".join(
            f"[{kind.__name__}](messages.md#{kind.__name__.lower()})" for kind in messages_of(name)
        )
        partitions = "one a length class" if topic.partitions == 3 else str(topic.partitions)
        rows.append(f"| `{topic.name}` | {partitions} | {_kept(topic)} | {kinds} |")
    return _HEAD + "\n".join(rows)


def _kept(topic: Topic) -> str:
    if topic.compacted:
        return "the newest of each key (compacted)"
    if topic.retention_hours is None:
        return "`placement.kafka.retention_hours`"
    if topic.retention_hours < 0:
        return "for ever"
    return "an hour" if topic.retention_hours == 1 else f"{topic.retention_hours} hours"
