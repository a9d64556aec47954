"""Trains a length ranker from the samples that runs recorded, and stores it for other runs to start with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flows.run.locations import named_store, store_option
from infra.run_handle import opened_run
from infra.runs import find
from producers.ranker.offline import Quality, RecordedIterations, judged, recorded, split, train_ranker
from producers.ranker.states import RankerError, States
from producers.ranking import backbone_of

_READ_S = 60.0
_LEAST = 50  # minimum groups to train from


@dataclass(frozen=True)
class Retrained:
    """A trained ranker. `quality`: how well a trial ranker ranks problems that it was not trained on."""

    key: str  # for `lengths.start`
    url: str
    groups: int
    quality: Quality


def retrain(
    runs: Sequence[str],
    *,
    store: str = "local",
    name: str | None = None,
    archive_alone: bool = False,
    progress: Callable[[float, str], None] = lambda share, text: None,
) -> Retrained:
    """Train a trial ranker and judge it by a fifth of the problems; then train one on all, and store it."""
    opened = named_store(store)
    iterations: RecordedIterations = []
    for number, run in enumerate(runs):
        progress(0.1 * number / len(runs), f"reading what {run} recorded")
        record = find(opened, run)
        with opened_run(
            opened, record, "streamrl-ranker", archive_alone=archive_alone, store_option=store_option(store)
        ) as handle:
            iterations += recorded(handle.bus, handle.topics, deadline_s=_READ_S)
    groups = sum(len(iteration) for iteration in iterations)
    if groups < _LEAST:
        raise RankerError(
            f"{', '.join(runs)}: {groups} finished groups are on the log; to train a ranker takes {_LEAST}"
        )
    spec = record.spec  # of the newest run, which comes last
    backbone = backbone_of(spec.lengths.backbone)
    some, held_out = split(iterations)
    judge = train_ranker(
        some, backbone, seed=spec.seed, progress=lambda share: progress(0.1 + 0.4 * share, "trial")
    )
    ranker = train_ranker(
        iterations, backbone, seed=spec.seed, progress=lambda share: progress(0.5 + 0.5 * share, "training")
    )
    states = States.to_start_from(opened, name or spec.run)
    number = max(states.numbers(), default=0) + 1
    states.put(number, ranker)
    return Retrained(states.key(number), opened.url, groups, judged(judge, held_out))
