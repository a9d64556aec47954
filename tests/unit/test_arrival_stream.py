"""The stream of order arrival: the first whole groups, and none is trained twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from consumers.stream.arrival_stream import ArrivalStream
from infra.bus import read_all
from schemas.identity import ROUND
from schemas.messages import Sample
from schemas.runspec import RunSpec
from schemas.taken import TakenGroups
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec
from tests.feeding import make_step
from tests.waiting import wait_until


def spec_of(**sections: Any) -> RunSpec:
    algorithm = {
        "mode": "async", "order": "arrival", "groups": 2, "group_size": 2, "staleness": 1, "staleness_cap": 2,
    }  # fmt: skip
    return make_spec(algorithm={**algorithm, **sections.pop("algorithm", {})}, **sections)


SPEC = spec_of()


class Log:
    """A run's samples, and a stream that reads them."""

    def __init__(self, folder: Path, spec: RunSpec = SPEC) -> None:
        self.context, self.spec = make_context(spec, folder), spec
        self.taken = TakenGroups(spec.algorithm)
        self.count = 0
        self.stream = self.open((0, 0), {})

    def open(self, trained: tuple[int, int], start: Mapping[int, int]) -> ArrivalStream:
        return ArrivalStream(self.context, 24, start, trained, lambda version: "r", taken=self.taken).open()

    def come(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self.count += 1
            topic = self.context.topics.samples
            self.context.writer.send(topic, encode(sample), key=sample.id, partition=sample.length_class)
        self.take(self.stream)

    def take(self, stream: ArrivalStream) -> None:
        wait_until(
            lambda: stream.pump(0.01) + 1 and sum(stream.positions.values()) == self.count, what="the records"
        )

    def train(self, stream: ArrivalStream, key: tuple[int, int]) -> list[int]:
        """Train what the step has chosen, as the trainer does."""
        bundles = stream.complete(key)
        groups = [bundle.number for bundle in bundles]
        again = [bundle.number for bundle in bundles if not bundle.settled(self.spec.loss.most_draws)]
        samples = [make_sample(self.spec, group, 0) for group in groups]
        self.taken.add(make_step(self.spec, key[0], samples, mini=key[1]), again)
        stream.trained(key)
        return groups


def group(number: int, spec: RunSpec = SPEC, **fields: Any) -> list[Sample]:
    """Its samples, in the one partition whose order is that of arrival."""
    return [make_sample(spec, number, index, length_class=0, **fields) for index in range(2)]


def test_a_step_takes_the_groups_that_are_whole_first(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.come([*group(3), *group(0)[:1], *group(1)[:1]])
    assert [bundle.number for bundle in log.stream.complete((0, 0))] == [3]
    assert log.stream.outstanding((0, 0)) == 1
    log.come([*group(2), group(1)[1], group(0)[1]])
    assert [bundle.number for bundle in log.stream.complete((0, 0))] == [2, 3]
    assert log.stream.outstanding((0, 0)) == 0
    assert [rows[0].sample.group for rows in log.stream.groups((0, 0))] == [3, 2]
    assert log.train(log.stream, (0, 0)) == [2, 3]
    assert [bundle.number for bundle in log.stream.complete((1, 0))] == [0, 1]


def test_a_group_that_would_get_too_old_is_waited_for(tmp_path: Path) -> None:
    """Version 0 admits groups 0 to 3; iteration 2 is the last one that may train them."""
    log = Log(tmp_path)
    log.come([*group(0), *group(2)])
    assert log.train(log.stream, (0, 0)) == [0, 2]
    log.come([*group(4), *group(5)])
    assert log.train(log.stream, (1, 0)) == [4, 5]
    log.come([*group(6), *group(7)])  # whole, but 1 and 3 must not become older
    assert log.stream.complete((2, 0)) == [] and log.stream.outstanding((2, 0)) == 4
    log.come([*group(3), *group(1)])
    assert log.train(log.stream, (2, 0)) == [1, 3]


def test_what_is_trained_is_passed_over_after_a_restart(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.come([*group(3), *group(0)[:1], *group(2)])
    assert log.train(log.stream, (0, 0)) == [2, 3]
    marks = log.stream.low_watermarks()
    assert marks[0] == 2  # the sample of group 0: those before it are trained
    log.stream.close()
    again = log.open((1, 0), marks)
    log.take(again)
    assert (again.received, again.duplicates) == (1, 2)
    log.stream = again
    log.come(group(3))  # made twice
    assert again.duplicates == 4 and not read_all(log.context.bus, log.context.topics.dead, deadline_s=5)


def test_a_step_of_another_trainer_leaves_what_it_did_not_take(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.come([*group(3), *group(2), *group(1), *group(0)])
    assert [bundle.number for bundle in log.stream.complete((0, 0))] == [2, 3]
    log.taken.add(make_step(SPEC, 0, [make_sample(SPEC, number, 0) for number in (0, 3)]))
    log.stream.trained((0, 0))
    assert [bundle.number for bundle in log.stream.complete((1, 0))] == [1, 2]


def test_a_group_that_teaches_nothing_takes_no_place(tmp_path: Path) -> None:
    spec = spec_of(loss={"kind": "dapo", "resample": 2})
    log = Log(tmp_path, spec)
    log.come([*group(0, spec, reward=1.0), *group(1, spec), *group(2, spec)])
    assert log.train(log.stream, (0, 0)) == [0, 1, 2]
    assert log.taken.redrawn() == [0]
    log.come([*group(0 + ROUND, spec), *group(3, spec)])
    assert log.train(log.stream, (1, 0)) == [3, ROUND]
    assert log.taken.redrawn() == [0] and log.taken.known() == [0, 1, 2, 3, ROUND]


def test_a_sample_that_names_a_step_or_a_bundle_is_unfit(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.come([make_sample(SPEC, 0, 0, bundle=1), make_sample(SPEC, 0, 0, iteration=0)])
    assert log.stream.received == 0
