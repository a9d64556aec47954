"""Which weights made a sample is checked by what the trainer knows itself, never passed over as unknown."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from consumers.batches.log_places import fetch
from consumers.steps.checkpoint import Checkpoints
from consumers.stream.roots import TrainerRoots
from consumers.stream.sample_stream import SampleStream
from infra.bus import read_all
from infra.weights.versions import WeightStore
from schemas.messages import DeadLetter
from schemas.wire import decode, encode
from tests.factories import make_context, make_sample, make_spec, make_tiny_model
from tests.fakes.crashing import AFTER, Crash, World, hurry
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    hurry(monkeypatch, model, make_spec())


def letters(world: World) -> list[DeadLetter]:
    records = read_all(world.context.bus, world.context.topics.dead, deadline_s=5)
    return [decode(record.value, DeadLetter) for record in records]


@pytest.mark.parametrize("algorithm", [{}, {"mode": "async", "staleness": 1}], ids=["sync", "async"])
def test_samples_with_a_false_root_are_never_trained(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    """They come while the version has no manifest yet, of all that may be made of it."""
    spec = make_spec(
        algorithm={"iterations": 6, "groups": 5, "group_size": 2, "learning_rate": 1e-2} | algorithm,
        trainer={"keep_weights": 8},
    )
    world = World(make_context(spec, tmp_path), model)
    publish, forged = WeightStore.publish, []

    def late(self: WeightStore, version: int, *args: Any, **options: Any) -> Any:
        new = range(version * 5, min(version + 1, 6) * 5)
        lies = [
            make_sample(spec, group, index, versions=np.array([version], np.int32), roots=["false"])
            for group in new
            for index in range(2)
        ]
        for lie in lies:
            world.context.writer.send(
                world.context.topics.samples, encode(lie), key=lie.id, partition=lie.length_class
            )
        forged.extend(lies)
        with suppress(AssertionError):  # the trainer meets them before there is a manifest
            wait_until(lambda: len(letters(world)) >= len(forged), what="letters", deadline_s=0.5)
        return publish(self, version, *args, **options)

    monkeypatch.setattr(WeightStore, "publish", late)
    world.live()
    assert len(forged) == 60
    trained = [
        row.sample
        for step in world.ledger()
        for row in fetch(
            world.context.bus, world.context.topics.samples,
            list(zip(step.partitions.tolist(), step.offsets.tolist(), strict=True)), what="", deadline_s=5,
        )
    ]  # fmt: skip
    assert len(trained) == 60
    assert [sample.id for sample in trained if sample.roots == ["false"]] == []


def test_a_trainer_that_starts_again_knows_the_roots_without_manifests(tmp_path: Path, model: str) -> None:
    spec = make_spec(
        algorithm={"iterations": 6, "groups": 2, "group_size": 2, "mode": "async", "staleness": 2},
        trainer={"checkpoint_every": 2, "keep_weights": 6},
    )
    world = World(make_context(spec, tmp_path), model)
    world.live(Crash("put runs/test-1/checkpoints/i000004-e00/manifest.json 1", AFTER))
    found = Checkpoints(world.context.store, "test-1").latest(print)
    assert found is not None
    steps = world.ledger()
    assert found[0].roots[4] == found[0].root == steps[3].root_out
    assert {found[0].roots[version] for version in (1, 2, 3)} == {step.root_out for step in steps[:3]}
    assert not world.live().dead
    last = Checkpoints(world.context.store, "test-1").latest(print)
    assert last is not None and len(last[0].roots) <= 4


def test_what_is_kept_is_bounded_and_what_nobody_knows_is_none() -> None:
    asked: list[int] = []

    def published(version: int) -> str | None:
        asked.append(version)
        return "old" if version == 3 else None

    roots = TrainerRoots(make_spec(algorithm={"mode": "async", "staleness": 3}), published)
    for version in range(100_000):
        roots.keep(version, f"r{version}")
    assert len(roots.known()) == 5
    assert roots.of(99_999) == "r99999" and asked == []
    assert roots.of(3) == "old"
    assert roots.of(5) is None
    for version in range(1000):
        roots.of(version)
    assert len(roots._asked) <= 20
    assert len(asked) >= 1000


def test_a_root_that_nobody_knows_is_a_fault(tmp_path: Path) -> None:
    spec = make_spec(algorithm={"groups": 2, "group_size": 2})
    context = make_context(spec, tmp_path)
    sample = make_sample(spec, 0, 0)
    for one in (sample, structs.replace(sample, index=1)):
        context.writer.send(context.topics.samples, encode(one), key=one.id)
    stream = SampleStream(context, 24, {}, (0, 0), lambda version: None).open()
    wait_until(lambda: stream.pump(0.01) + 1 and stream.positions[0] == 2, what="the samples")
    stream.close()
    found = [
        decode(one.value, DeadLetter) for one in read_all(context.bus, context.topics.dead, deadline_s=5)
    ]
    assert {one.reason for one in found} == {
        "weights 0 made it, and nobody knows the root of that version any more"
    }
    assert {one.wanted for one in found} == {"0000000-00", "0000000-01"}
