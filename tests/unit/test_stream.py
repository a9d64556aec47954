"""The sample stream: once each, whole bundles, and what is unfit goes to the dead letters with a reason."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consumers.stream.sample_stream import SampleStream
from infra.bus import read_all
from schemas.messages import DeadLetter, Sample
from schemas.wire import decode, encode
from tests.factories import make_context, make_sample, make_spec
from tests.waiting import wait_until

SPEC = make_spec(algorithm={"groups": 4, "group_size": 2})


def setup(folder: Path, samples: list[Sample], **options: Any) -> tuple[Any, SampleStream]:
    context = make_context(options.pop("spec", SPEC), folder)
    for sample in samples:
        context.writer.send(
            context.topics.samples, encode(sample), key=sample.id, partition=sample.length_class
        )
    stream = SampleStream(
        context, 24, options.get("start", {}), options.get("trained", (0, 0)), lambda version: "r"
    ).open()
    take(stream, len(samples))
    return context, stream


def take(stream: SampleStream, records: int) -> None:
    wait_until(
        lambda: stream.pump(0.01) + 1 and sum(stream.positions.values()) == records, what="the records"
    )
    stream.close()


def reasons(context: Any) -> list[str]:
    return [
        decode(r.value, DeadLetter).reason for r in read_all(context.bus, context.topics.dead, deadline_s=5)
    ]


def test_bundles_come_when_they_are_whole_in_any_order(tmp_path: Path) -> None:
    samples = [make_sample(SPEC, g, i, bundle=g // 2, bundle_groups=2) for g in range(4) for i in range(2)]
    random.Random(3).shuffle(samples)
    _, stream = setup(tmp_path / "some", samples[:-1])
    assert len(stream.complete((0, 0))) == 1
    assert stream.outstanding((0, 0)) == 1
    _, stream = setup(tmp_path / "all", samples)
    bundles = stream.complete((0, 0))
    assert [bundle.number for bundle in bundles] == [0, 1]
    ids = [row.sample.id for bundle in bundles for row in bundle.in_order()]
    assert ids == sorted(sample.id for sample in samples)


def test_delivered_twice_counts_once(tmp_path: Path) -> None:
    sample = make_sample(SPEC, 0, 0)
    context, stream = setup(tmp_path, [sample, sample, make_sample(SPEC, 0, 1)])
    assert (stream.received, stream.duplicates) == (2, 1)
    assert reasons(context) == [
        f"sample {sample.id} came before, and the first one counts: a generator died behind its last write"
    ]


def test_same_seed_other_tokens_is_a_contradiction(tmp_path: Path) -> None:
    sample = make_sample(SPEC, 0, 0)
    other = make_sample(SPEC, 0, 0, length=12)
    context, stream = setup(tmp_path, [sample, other])
    assert stream.received == 1
    assert "other tokens and the same seed" in reasons(context)[0]


def test_what_is_trained_is_not_taken_again(tmp_path: Path) -> None:
    _, stream = setup(tmp_path, [make_sample(SPEC, g, 0) for g in (1, 4)], trained=(1, 0))
    assert (stream.received, stream.duplicates) == (1, 1)


def test_low_watermarks_are_where_the_untrained_begin(tmp_path: Path) -> None:
    spec = make_spec(algorithm={"groups": 4, "group_size": 2, "mode": "async", "staleness": 1})
    samples = [make_sample(spec, g, i, length_class=0) for g in (0, 5, 1, 2, 3) for i in range(2)]
    _, stream = setup(tmp_path, samples, spec=spec)
    assert stream.low_watermarks() == {0: 0, 1: 0}
    stream.trained((0, 0))
    assert stream.low_watermarks() == {0: 2, 1: 0}  # the samples of group 5, of the next iteration
    stream.trained((1, 0))
    assert stream.low_watermarks() == {0: 10, 1: 0}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"run": "other-1"}, "of run other-1"),
        (
            {"tokens": np.array([99], dtype=np.int32), "logprobs": np.zeros(1, np.float32)},
            "not in the vocabulary of 24",
        ),
        ({"tokens": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}, "the answer is empty"),
        ({"logprobs": np.zeros(1, np.float32)}, "have 1 logprobs"),
        ({"logprobs": np.full(3, np.nan, np.float32)}, "above 0 or not finite"),
        ({"logprobs": np.full(3, 0.5, np.float32)}, "above 0 or not finite"),
        ({"size": 3}, "does not fit groups of 2"),
        ({"iteration": 2}, "not of iteration 2"),
        ({"versions": np.array([1], dtype=np.int32)}, "on-policy needs 0"),
        ({"reward": float("inf")}, "reward is not a finite number"),
    ],
)
def test_unfit_samples_are_dead_letters(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    context, stream = setup(tmp_path, [make_sample(SPEC, 0, 0, length=3, **fields), make_sample(SPEC, 0, 1)])
    assert stream.received == 1
    assert reason in reasons(context)[0]


def test_too_old_weights_are_refused_in_async(tmp_path: Path) -> None:
    spec = make_spec(
        algorithm={"mode": "async", "staleness": 1, "groups": 4, "group_size": 2, "iterations": 4}
    )
    old = make_sample(spec, 12, 0, versions=np.array([1], dtype=np.int32))
    context, stream = setup(tmp_path, [old, make_sample(spec, 12, 1)], spec=spec, trained=(2, 0))
    assert stream.received == 1
    assert "weights 1 made it; its iteration allows 2 and newer" in reasons(context)[0]


def test_rubbish_is_a_dead_letter_with_its_bytes(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    context.writer.send(context.topics.samples, b"rubbish", key="x")
    stream = SampleStream(context, 24, {}, (0, 0), lambda version: "r").open()
    take(stream, 1)
    letter = decode(read_all(context.bus, context.topics.dead, deadline_s=5)[0].value, DeadLetter)
    assert letter.raw == b"rubbish"
    assert (letter.topic, letter.partition, letter.offset) == ("test-1.samples", 0, 0)
