"""What a step has made is hashed where it is, copied beside, and is what it was when it is published."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.learners import lending
from consumers.learners.learner import TorchLearner
from consumers.learners.lending import MadeWeights, made_of
from consumers.learners.snapshot import StateSnapshot
from consumers.steps.checkpoint import Checkpoints
from consumers.steps.publisher import Publisher
from infra.choices import CORES
from infra.waiting import WaitedTooLong
from infra.weights import inspection
from infra.weights.digest import digests_of, tensor_digest
from infra.weights.inspection import Inspected, inspect, inspected
from infra.weights.weights_error import WeightsError
from schemas.runspec import RunSpec
from tests.factories import make_context, make_spec, make_tiny_model
from tests.training import train

SPECS = {
    "float32": make_spec(), "bfloat16": make_spec(model={"dtype": "bfloat16"}),
    "adapter": make_spec(model={"dtype": "bfloat16", "lora": {"rank": 2, "alpha": 4}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("folder") / "model", layers=1, width=16))


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> RunSpec:
    return SPECS[request.param]


@pytest.fixture(params=["1", "3"])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES.variable, request.param)


@pytest.mark.parametrize("here", [True, False], ids=["where it is", "brought here"])
def test_hashes_and_copy_are_those_of_the_weights(
    model: str, spec: RunSpec, cores: None, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchLearner, "_here", lambda self: here)
    learner = TorchLearner(model, spec)
    for _ in range(3):
        train(learner, spec, 1)
        made, expected = learner.made(), learner.weights()
        assert made.found.digests == digests_of(expected)
        assert not made.found.wrong
        copy = made.copy().result(60)
        assert digests_of(copy) == digests_of(expected)
        assert {tensor.dtype for tensor in copy.values()} == {tensor.dtype for tensor in expected.values()}
    learner.close()


@given(
    st.integers(0, 300), st.sampled_from([None, torch.bfloat16]), st.integers(1, 64), st.integers(1, 64),
    st.one_of(st.none(), st.sampled_from([float("nan"), float("inf"), -float("inf"), 3.4e38])), st.data(),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_pass_in_pieces_is_one_over_all(
    size: int, dtype: torch.dtype | None, piece: int, alone: int, bad: float | None, data: st.DataObject
) -> None:
    """3.4e38 is a number in fp32, and none in bf16."""
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size))
    if size and bad is not None:
        tensor[data.draw(st.integers(0, size - 1))] = bad
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspection, "_PIECE", piece)
        patch.setattr(inspection, "_ALONE", alone)
        digest, finite = inspect(tensor, dtype)
        copy = torch.empty(size, dtype=dtype or torch.float32)
        inspection.convert(tensor, copy)
    published = tensor.to(dtype or torch.float32)
    assert digest == tensor_digest(copy)
    if not published.isnan().any():  # of which there are several, and torch takes now this one, now that one
        assert digest == tensor_digest(published)
    assert finite == bool(torch.isfinite(published).all())


def test_what_is_no_number_is_named(cores: None) -> None:
    tensors = {name: torch.zeros(size) for name, size in (("a", 5), ("b", 500), ("c", 50))}
    assert not inspected(tensors).wrong
    tensors["b"][-1] = float("nan")
    tensors["c"][0] = float("inf")
    assert inspected(tensors).wrong == "b"


def test_a_step_waits_until_what_it_changes_is_copied(
    model: str, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copier is held up in the midst of it."""
    go, plain, waits = threading.Event(), lending.convert, threading.Event()

    def slow(*given: Any) -> None:
        waits.set()
        assert go.wait(60)
        plain(*given)

    learner = TorchLearner(model, spec)
    train(learner, spec, 1)
    monkeypatch.setattr(lending, "convert", slow)
    settles, settle = threading.Event(), lending._Copying.settle
    monkeypatch.setattr(lending._Copying, "settle", lambda self: settles.set() or settle(self))
    made, before = learner.made(), digests_of(learner.weights())
    copy = made.copy()
    assert waits.wait(60)
    stepping = threading.Thread(target=lambda: train(learner, spec, 1), daemon=True)
    stepping.start()
    assert settles.wait(60)
    assert digests_of(learner.weights()) == before, "it stands before its optimizer"
    go.set()
    stepping.join(60)
    assert digests_of(copy.result(60)) == before == dict(made.found.digests)
    assert digests_of(learner.weights()) != before
    assert not learner._lent._readings
    learner.close()


@pytest.mark.parametrize("how", ["adopt", "restore", "step"])
def test_a_snapshot_is_what_was_whatever_changes_it(model: str, spec: RunSpec, how: str) -> None:
    learner = TorchLearner(model, spec)
    train(learner, spec, 1)
    start = learner.state()
    train(learner, spec, 1)
    expected = {name: tensor_digest(tensor) for name, tensor in learner.state().items()}
    taken = learner.snapshot()
    pieces = taken.pieces()
    read = {name: bytearray() for name in taken.outlines}
    first, piece = next(pieces)
    read[first] += piece
    if how == "adopt":
        learner.adopt({name: tensor + 1 for name, tensor in learner.weights().items()})
    elif how == "restore":
        learner.restore(start)
    else:
        train(learner, spec, 1)
    for name, piece in pieces:
        read[name] += piece
    assert digests_of(learner.state()) != expected
    for name, value in learner.state().items():
        bits = torch.frombuffer(read[name], dtype=value.dtype).view(value.shape)
        assert tensor_digest(bits) == expected[name], name
    learner.close()


def test_a_copy_that_is_not_what_the_ledger_says_is_not_published(model: str, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(model)
    publisher = Publisher(make_context(make_spec(), tmp_path), 0).open()
    tensors = {"w": torch.arange(10.0)}
    future: lending.Future[dict[str, torch.Tensor]] = lending.Future()
    future.set_result(tensors)
    try:
        publisher.publish(0, MadeWeights(inspected(tensors), lambda: future))
        publisher.drain()
        assert publisher.newest() == 0
        publisher.publish(1, MadeWeights(Inspected({"w": "00"}, ""), lambda: future))
        with pytest.raises(WeightsError, match="version 1 is not published: the copy of the"):
            publisher.drain()
        assert publisher.newest() == 0
    finally:
        publisher.close()


@pytest.mark.parametrize("moves", [True, False])
def test_an_upload_may_take_longer_than_the_deadline_while_the_store_takes_pieces(
    model: str, tmp_path: Path, moves: bool
) -> None:
    (tmp_path / "model").symlink_to(model)
    context = make_context(make_spec(deadlines={"progress_s": 0.5}), tmp_path)
    publisher, ended = Publisher(context, 0).open(), threading.Event()

    def upload() -> None:
        for _ in range(30 if moves else 1000):  # a piece each .05 s: three deadlines
            if ended.wait(0.05):
                return
            if moves:
                publisher.moved()

    publisher.submit(upload)
    if moves:
        publisher.drain()
        assert context.heart.counters["stored_pieces"] == 30
    else:
        with pytest.raises(WaitedTooLong, match="weights and checkpoints to be in the object store"):
            publisher.drain()
    ended.set()
    publisher.close()


def test_pieces_of_weights_and_checkpoints_move_a_publisher(model: str, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(model)
    context = make_context(make_spec(), tmp_path)
    publisher = Publisher(context, 0).open()
    publisher.publish(0, made_of({"w": torch.arange(10.0)}))
    publisher.drain()
    before = context.heart.counters["stored_pieces"]
    checkpoints = Checkpoints(context.store, context.run, moved=publisher.moved)
    checkpoints.begin(StateSnapshot({}, {"w": torch.arange(10.0)}), checkpoints.place(0, 0)).result()
    assert context.heart.counters["stored_pieces"] > before > 0
    publisher.close()


def test_what_waits_behind_a_failure_is_dropped(model: str, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(model)
    publisher, dropped, go = (
        Publisher(make_context(make_spec(), tmp_path), 0).open(),
        threading.Event(),
        threading.Event(),
    )

    def fail() -> None:
        assert go.wait(60)
        raise WeightsError("the store is gone")

    publisher.submit(fail)
    publisher.submit(lambda: pytest.fail("it was run"), dropped=dropped.set)
    go.set()
    assert dropped.wait(60)
    with pytest.raises(WeightsError, match="the store is gone"):
        publisher.check()
    publisher.close()
