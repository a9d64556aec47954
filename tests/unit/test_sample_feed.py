"""The one reading of samples: each is decoded once, and only what is fit and admitted counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from infra import gate as gate_module
from infra.roles.context import RoleContext
from producers import sample_feed
from producers.feeder import finished_of
from producers.resampling import Resampling
from producers.sample_feed import AdmittedSample, FeederRoots, SampleFeed, Subscription
from schemas.messages import Sample
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec
from tests.feeding import make_prompt, make_step
from tests.waiting import wait_until

SPEC = make_spec(loss={"kind": "dapo", "resample": 1})


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights are published here; these are what made the samples."""
    monkeypatch.setattr("producers.sample_feed.FeederRoots._published", lambda self, version: "r")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_feed, "_POLL_S", 0.01)


@contextmanager
def feeding(context: RoleContext, groups: range = range(4), trained: int = 0) -> Iterator[SampleFeed]:
    feed = SampleFeed(context, {}, trained, FeederRoots(context)).open()
    feed.admitted(make_prompt(SPEC, group) for group in groups)
    try:
        yield feed
    finally:
        feed.close()


def publish(context: RoleContext, *samples: Sample) -> None:
    for sample in samples:
        context.writer.send(context.topics.samples, encode(sample), key=sample.id)


def keys(subscription: Subscription[AdmittedSample]) -> list[tuple[int, int]]:
    return [taken.key for taken in subscription.take() if not taken.fault]


def test_each_record_is_decoded_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    plain = gate_module.decode
    monkeypatch.setattr(gate_module, "decode", lambda raw, kind: (decoded.append(1), plain(raw, kind))[1])
    context = make_context(SPEC, tmp_path)
    publish(context, *(make_sample(SPEC, group, index) for group in range(4) for index in range(2)))
    with feeding(context) as feed:
        bell = threading.Event()
        subscriptions = [feed.subscribe(lambda taken: taken, bell) for _ in range(4)]
        feed.read_back()
        assert bell.is_set()
        assert [len(keys(one)) for one in subscriptions] == [8] * 4
    assert len(decoded) == 8


def test_only_fit_samples_of_open_groups_count(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    publish(
        context, make_sample(SPEC, 0, 0), make_sample(SPEC, 4, 0), make_sample(SPEC, 5, 0, bundle_groups=2),
        make_sample(SPEC, 5, 1, versions=np.array([0], np.int32)), make_sample(SPEC, 6, 0, problem_id="?"),
        make_sample(SPEC, 6, 1, prompt_tokens=np.array([9], np.int32)), make_sample(SPEC, 7, 7),
        make_sample(SPEC, 7, 0, run="other-1"), make_sample(SPEC, 900, 0),
    )  # fmt: skip
    context.writer.send(context.topics.samples, b"junk", key="0000004-01")
    with feeding(context, range(8), trained=1) as feed:
        finished = feed.subscribe(finished_of)
        feed.read_back()
        assert [one.key for one in finished.take()] == [(4, 0)]


def test_a_sample_that_is_there_before_its_prompt_counts_when_that_is_admitted(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    with feeding(context) as feed:
        all_of_it = feed.subscribe(lambda taken: taken)
        feed.follow()
        publish(context, make_sample(SPEC, 5, 0), make_sample(SPEC, 0, 1))
        wait_until(lambda: keys(all_of_it) == [(0, 1)], what="the one that is admitted")
        feed.admitted([make_prompt(SPEC, 5)])
        wait_until(lambda: keys(all_of_it) == [(5, 0)], what="the one that was held")


def test_samples_of_groups_that_never_come_take_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_feed, "_MOST_HELD", 10)
    context = make_context(SPEC, tmp_path)
    publish(context, *(make_sample(SPEC, 4 + number % 8, number % 2) for number in range(100)))
    with feeding(context) as feed:
        feed.read_back()
        assert len(feed._held) == 10
        monkeypatch.setattr(sample_feed, "_MOST_HELD_BYTES", 1)
        publish(context, make_sample(SPEC, 11, 0))
        feed.read_back()
        assert not feed._held and not feed._held_bytes


def test_a_root_that_the_ledger_contradicts_is_not_fit(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    roots = FeederRoots(context)
    roots.learn(make_step(SPEC, 0, [], root_out="the root"))
    feed = SampleFeed(context, {}, 1, roots).open()
    feed.admitted([make_prompt(SPEC, 4)])
    all_of_it = feed.subscribe(lambda taken: taken)
    publish(context, make_sample(SPEC, 4, 0, roots=["false"]), make_sample(SPEC, 4, 1, roots=["the root"]))
    feed.read_back()
    assert [bool(taken.fault) for taken in all_of_it.take()] == [True, False]
    for version in range(1, 1000):
        roots.learn(make_step(SPEC, version, [], root_out=str(version)))
    assert len(roots._known) <= 256
    assert roots.of(0) == "r", "an old one is asked for again"
    feed.close()


def test_a_sample_whose_weights_are_not_known_yet_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.sample_feed.FeederRoots._published", lambda self, version: None)
    monkeypatch.setattr(sample_feed, "_ASK_AGAIN_S", 0.01)
    context = make_context(SPEC, tmp_path)
    publish(context, make_sample(SPEC, 0, 0), make_sample(SPEC, 0, 1, roots=["false"]))
    with feeding(context) as feed:
        all_of_it = feed.subscribe(lambda taken: taken)
        feed.read_back()
        assert all_of_it.take() == [] and len(feed._held) == 2
        monkeypatch.setattr("producers.sample_feed.FeederRoots._published", lambda self, version: "r")
        feed.follow()
        found: list[AdmittedSample] = []
        wait_until(lambda: found.extend(all_of_it.take()) or len(found) == 2, what="both")
        assert [bool(taken.fault) for taken in found] == [False, True]


def test_what_goes_wrong_is_heard_by_all_who_take(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    publish(context, make_sample(SPEC, 0, 0))

    def fail(taken: AdmittedSample) -> None:
        raise ValueError("no such thing")

    with feeding(context) as feed:
        one, other = feed.subscribe(fail), feed.subscribe(lambda taken: taken)
        feed.follow()
        for subscription in (one, other):
            with pytest.raises(ValueError, match="no such thing"):
                wait_until(subscription.take, what="the error")


def test_trained_groups_are_forgotten(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    with feeding(context, range(12)) as feed:
        resampling = Resampling(context, feed, 0)
        feed.trained(2)
        assert sorted(feed._prompts) == [8, 9, 10, 11]
        publish(
            context,
            make_sample(SPEC, 4, 0),
            make_sample(SPEC, 8, 0, reward=1),
            make_sample(SPEC, 8, 1, reward=1),
        )
        feed.read_back()
        assert [place.group for place in resampling.found(2)] == [8]
        assert resampling.found(3) == [] and not resampling._rewards
