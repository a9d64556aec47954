"""A learner that is timed does the trainer's work, and a version of it comes to the store."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from consumers.learners.learner import TorchLearner
from consumers.timed_training import TimedTraining
from flows.planning.measuring_learner import made_up, train_point
from flows.planning.measuring_weights import scratch, store_speed
from infra.stores.opening import open_store
from infra.stores.store import Store
from infra.weights.versions import WeightStore
from producers.first_prompts import FirstPrompt
from schemas.messages import Sample
from schemas.runspec import RunSpec
from schemas.wire import decode, encode
from tests.factories import make_spec, make_tiny_model

PROMPTS = [FirstPrompt("one", "{}", [2, 3]), FirstPrompt("two", "{}", [4, 5, 6])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def spec() -> RunSpec:
    return make_spec(trainer={"microbatch_tokens": 64, "bundle_tokens": 32})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/store")


def test_made_up_samples_fill_bundles_of_whole_groups(spec: RunSpec) -> None:
    found = made_up(spec, PROMPTS, [3, 5, 9])
    samples = [decode(raw, Sample) for raw in found.records]
    repeats = [(one, members) for one in found.bundles for members in one.repeats]
    used = [number for _, members in repeats for number in members]
    assert sorted(used) == list(range(len(samples)))
    assert {one.held_out for one in found.bundles} == {True, False}
    for _, members in repeats:
        groups = {samples[number].group for number in members}
        assert len(members) == len(groups) * spec.algorithm.group_size
    for bundle in found.bundles:
        sizes = {sum(samples[number].true_length for number in members) for members in bundle.repeats}
        assert len(sizes) > 1, "libraries would know the shape"
    assert max(one.true_length for one in samples) == spec.sampling.max_tokens
    assert all(one.tokens.max() < 24 for one in samples)  # tokens of the prompts, which any model has


def test_without_drawn_lengths_there_are_samples_too(spec: RunSpec) -> None:
    assert made_up(spec, PROMPTS, []).bundles


def test_calls_steps_and_versions(model: str, spec: RunSpec, store: Store) -> None:
    learner = TorchLearner(model, spec)
    timed = TimedTraining(spec, model, learner)
    first = timed.root()
    made = made_up(spec, PROMPTS, [3, 5, 9])
    assert timed.take(made.records) > 0
    bundles = [members for one in made.bundles for members in one.repeats]
    table = timed.train(bundles)
    sizes = [decode(made.records[n], Sample).true_length + len(PROMPTS[0].tokens) for n in bundles[0]]
    assert table.samples[0] == len(bundles[0])
    assert abs(table.tokens[0] - sum(sizes)) <= len(sizes)  # prompts have 2 or 3 tokens
    assert table.context[0] >= table.tokens[0]
    assert min(table.micro_batches) >= 1
    assert min(table.seconds) > 0
    with scratch(store) as prefix:
        versions = f"{prefix}/weights"
        assert timed.put(store, versions, 0).delta_bytes > 0
        step = timed.step()
        assert min(step.step_s, step.hash_s, step.record_s) > 0
        assert step.samples == len(made.records)
        assert step.root != first
        put = timed.put(store, versions, 1)
        assert (put.root, put.version) == (step.root, 1)
        assert 0 < put.delta_bytes <= 1.1 * put.whole_bytes
        manifest, copy = WeightStore(store, "profile-1", prefix=versions).update(None, 1, root=step.root)
        assert manifest.root == step.root
        assert copy.tensors().keys() == learner.weights().keys()
    assert store.list("profiles") == []
    assert timed.snapshot() > 0
    learner.close()


def test_groups_without_a_gradient_are_no_calls(model: str, spec: RunSpec) -> None:
    learner = TorchLearner(model, spec)
    timed = TimedTraining(spec, model, learner)
    records = made_up(spec, PROMPTS, [3]).records[:2]
    timed.take([encode(msgspec.structs.replace(decode(raw, Sample), reward=1.0)) for raw in records])
    assert timed.train([[0, 1]]).seconds == []
    assert train_point([timed.train([[0, 1]])], held_out=False) is None
    learner.close()


def test_a_scratch_folder_is_removed_whatever_happens(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), scratch(store) as prefix:
        store.put(f"{prefix}/a/b", b"x")
        raise ZeroDivisionError
    assert store.list("profiles") == []


def test_the_speed_of_a_store(store: Store) -> None:
    with scratch(store) as prefix:
        speed, latency = store_speed(store, prefix)
    assert speed > 1e5
    assert 0 < latency < 5
