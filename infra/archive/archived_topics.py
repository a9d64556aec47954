"""The topics of a run that are archived, and the kind of message on each."""

from __future__ import annotations

from schemas.messages import (
    DeadLetter,
    Evaluation,
    Prompt,
    RankerAnnouncement,
    Sample,
    StepRecord,
    WeightsAnnouncement,
)
from schemas.topics import Topic, Topics
from schemas.wire import Message

KINDS: dict[str, type[Message]] = {
    "prompts": Prompt, "samples": Sample, "ledger": StepRecord, "weights": WeightsAnnouncement,
    "ranker": RankerAnnouncement, "evals": Evaluation, "dead": DeadLetter,
}  # fmt: skip
BY_ITERATION = ("prompts", "samples")  # the others have too few records: they get a file a window


def archived_topics(topics: Topics) -> dict[str, Topic]:
    """Return the topics of a run that are archived, by their short names, such as `samples`."""
    return {name: getattr(topics, name) for name in KINDS}


def split_name(topic: str) -> tuple[str, str]:
    """Return the run and the short name of a topic: `count-1.samples` is `samples` of `count-1`."""
    run, _, short = topic.rpartition(".")
    return run, short
