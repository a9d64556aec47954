"""Two ranks as one learner, and what they say to each other."""

from __future__ import annotations

import dataclasses
import errno
import io
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from consumers.batches.micro_batches import MicroBatch, deal, micro_batch
from consumers.batches.training_rows import Scores, TrainingRow
from consumers.learners.learner import Learner, TorchLearner
from consumers.learners.optimizing import NotFinite
from consumers.losses.loss import loss_of
from consumers.losses.objective import LossStats
from consumers.ranks import rank_processes
from consumers.ranks.choose_learner import learner_of
from consumers.ranks.local_member import LocalMember
from consumers.ranks.member import RankFailed, RanksApart
from consumers.ranks.rank import own_spec
from consumers.ranks.rank_wire import Accumulate, CommandDone, Failed, Setup, batch_from_bytes, batch_to_bytes
from consumers.ranks.ranked_learner import RankedLearner
from consumers.steps.step_record import recipe_of
from infra.ranks.frames import read_frame, write_frame
from infra.stores.store import StoreError
from infra.waiting import WaitedTooLong
from infra.weights.digest import digests_of
from schemas.runspec import RunSpec
from schemas.seams import LOAD
from tests.factories import OWN_LEARNER, make_spec, make_tiny_model
from tests.training import batches_of, rows_of, train

LOSS = {"kind": "ppo", "kl": 0.05}
ALGORITHM = {"groups": 6, "group_size": 4, "max_grad_norm": 1e9}
TRAINER = {"ranks": 2, "least_microbatches": 3}
SPEC = make_spec(loss=LOSS, algorithm=ALGORITHM, trainer=TRAINER)
LEARNERS = ("torch", "fsdp")  # of the same bits, where no norm is cut off


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


def ranked(model: str, spec: RunSpec) -> Learner:
    return learner_of(model, spec, run="test-1", log=logging.getLogger("streamrl.test"))


@pytest.fixture(scope="module")
def alone(model: str) -> tuple[dict[str, str], dict[str, str]]:
    """Digests of weights and state after three steps of a process by itself."""
    learner = TorchLearner(model, SPEC)
    train(learner, SPEC, 3)
    return digests_of(learner.weights()), digests_of(all_but_rng(learner))


def all_but_rng(learner: Learner) -> dict[str, torch.Tensor]:
    """The state of the generator of random numbers is that of the process, and nothing is drawn from it."""
    return {name: tensor for name, tensor in learner.state().items() if name != "rng"}


@pytest.fixture(params=LEARNERS)
def pair(alone: object, model: str, request: pytest.FixtureRequest) -> Iterator[RankedLearner]:
    """Two ranks, of which this process is the first: whatever learns in it now is one of them."""
    trainer = {**TRAINER, "learner": request.param}
    learner = ranked(model, make_spec(loss=LOSS, algorithm=ALGORITHM, trainer=trainer))
    assert isinstance(learner, RankedLearner)
    yield learner
    learner.close()


def dealt(learner: Learner) -> tuple[list[MicroBatch], MicroBatch]:
    """Micro-batches, and one of those that the other rank gets."""
    (scored,) = learner.score([rows_of(SPEC)], learner.loss.needs)
    batches = batches_of(SPEC, scored)
    return batches, batches[deal([batch.cost for batch in batches], 2)[1][0]]


def test_two_ranks_compute_the_bits_of_one(
    pair: Learner, alone: tuple[dict[str, str], dict[str, str]]
) -> None:
    """Whichever rank computes what: with a reference and a critic, and back from where they have been."""
    start = pair.state()
    train(pair, SPEC, 3)
    weights, state = alone
    assert digests_of(pair.weights()) == weights
    assert digests_of(all_but_rng(pair)) == state
    pair.restore(start)
    train(pair, SPEC, 3)
    assert digests_of(pair.weights()) == weights
    pair.adopt({name: tensor + 1 for name, tensor in pair.weights().items()})
    assert digests_of(pair.weights()) != weights


@pytest.mark.thorough(but=["fsdp"])
def test_a_loss_that_is_no_number_names_its_samples(pair: Learner) -> None:
    """On whichever rank it is met; here it is the other one, which ends with it."""
    batches, bad = dealt(pair)
    bad.advantage[0] = float("nan")
    with pytest.raises(NotFinite, match="the loss is nan") as caught:
        pair.accumulate(batches)
    assert [row.sample.id for row in caught.value.rows] == [row.sample.id for row in bad.rows]


def test_a_rank_that_failed_is_read_however_long_this_one_still_computes(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watching thread would end the process, and no record would name the samples of the step."""
    monkeypatch.setattr(rank_processes, "_GRACE_S", 0.1)
    learner = ranked(model, SPEC)
    assert isinstance(learner, RankedLearner)
    try:
        batches, bad = dealt(learner)
        bad.advantage[0] = float("nan")
        crew, here = learner._crew, learner._local.accumulate

        def slowly(mine: Sequence[MicroBatch]) -> list[LossStats]:
            assert crew._died.wait(300)
            assert not crew._known.wait(10 * rank_processes._GRACE_S)
            return here(mine)

        monkeypatch.setattr(learner._local, "accumulate", slowly)
        with pytest.raises(NotFinite, match="the loss is nan") as caught:
            learner.accumulate(batches)
        assert [row.sample.id for row in caught.value.rows] == [row.sample.id for row in bad.rows]
    finally:
        learner.close()


@pytest.mark.thorough(but=["fsdp"])
def test_a_gradient_that_sums_can_not_hold_names_its_samples(pair: Learner) -> None:
    """The rank that computed it looks at it, whichever rank adds it up."""
    batches, bad = dealt(pair)
    bad.advantage.fill_(1e25)
    with pytest.raises(NotFinite, match="too large for exact sums") as caught:
        pair.accumulate(batches)
    assert [row.sample.id for row in caught.value.rows] == [row.sample.id for row in bad.rows]


@pytest.mark.thorough(but=["fsdp"])
def test_a_step_that_is_no_number_is_said_by_the_trainer(pair: RankedLearner) -> None:
    """All ranks meet it; the others end with it, and must not take the trainer along before it has spoken."""
    (scored,) = pair.score([rows_of(SPEC)], pair.loss.needs)
    pair.accumulate(batches_of(SPEC, scored))
    with pytest.raises(NotFinite, match="the gradient's norm is"):
        pair.step(0.0)
    assert pair._crew._known.is_set()


class Filled:
    """Another rank, which computes fillers alone, and meets one whose loss is no number."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        yield

    def send(self, rank: int, command: Accumulate) -> None:
        assert (rank, command.batches, command.rounds) == (1, [], 1)

    def replies(self) -> list[CommandDone]:
        raise RankFailed(1, Failed("the loss is nan", 0))


def test_a_filler_that_is_no_number_has_no_samples() -> None:
    spec = make_spec()
    learner = object.__new__(RankedLearner)
    learner._ranks, learner._crew = 2, cast(Any, Filled())
    learner._local = cast(Any, SimpleNamespace(lockstep=True, accumulate=lambda batches: []))
    with pytest.raises(NotFinite, match="the loss is nan") as caught:
        learner.accumulate(batches_of(spec, rows_of(spec))[:1])
    assert not caught.value.rows


def test_ranks_end_if_one_of_them_can_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[LocalMember] = []
    plain = LocalMember.open

    def opened(self: LocalMember) -> LocalMember:
        if started:
            raise OSError(errno.EAGAIN, "no more processes")
        started.append(self)
        return plain(self)

    monkeypatch.setattr(LocalMember, "open", opened)
    with pytest.raises(OSError, match="no more processes"):
        ranked("nowhere", make_spec(trainer={"ranks": 3}))
    assert started[0].process.poll() is not None


def test_a_micro_batch_travels_to_the_bit() -> None:
    draw = np.random.default_rng(1)
    rows = [
        TrainingRow(row.sample, 0, 0, Scores(*(draw.random(row.sample.tokens.size) for _ in range(3))))
        for row in rows_of(SPEC)[:5]
    ]
    loss = loss_of(SPEC)
    for batch in (micro_batch(rows, loss.advantages(rows), loss, 0), micro_batch(rows, None, loss, 0)):
        again = batch_from_bytes(batch_to_bytes(batch))
        for field in dataclasses.fields(MicroBatch):
            one, other = getattr(batch, field.name), getattr(again, field.name)
            if isinstance(one, torch.Tensor):
                assert one.dtype == other.dtype, field.name
                assert torch.equal(one, other), field.name
            elif one is None:
                assert other is None, field.name
        assert torch.equal(batch.packing.positions, again.packing.positions)
        assert batch.packing.places == again.packing.places


def test_a_frame_that_was_cut_off_is_none() -> None:
    file = io.BytesIO()
    write_frame(file, CommandDone())
    whole = file.getvalue()
    assert read_frame(io.BytesIO(whole)) == whole[8:]
    for size in range(len(whole)):
        assert read_frame(io.BytesIO(whole[:size])) is None


def test_a_rank_that_takes_no_command_is_named() -> None:
    """A process that is stopped takes as much as a pipe holds, and no more."""
    member = LocalMember(3, threading.Event())
    pipe = subprocess.PIPE
    member.process = subprocess.Popen(["sleep", "600"], stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        member.send(Accumulate([b"little"], 1), 0.2)
        with pytest.raises(
            WaitedTooLong, match=rf"rank 3 \(process {member.process.pid}\) to take a command"
        ):
            member.send(Accumulate([bytes(1 << 20)], 1), 0.2)
    finally:
        member.process.kill()
        member.process.communicate()


def test_a_rank_whose_own_process_outlives_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a compiler's or a loader's, which holds the rank's stderr open."""
    program = "echo no more memory >&2; sleep 600 & echo $!; exit 3"
    monkeypatch.setattr(
        "infra.supervise.children.start_child",
        lambda words, **said: subprocess.Popen(["sh", "-c", program], **said),
    )
    died = threading.Event()
    member = LocalMember(1, died).open()
    assert member.process.stdout is not None
    left = int(member.process.stdout.readline())
    try:
        assert member.ended.wait(60) and died.is_set()
        assert member.how() == "ended with exit code 3; its last lines:\nno more memory"
    finally:
        os.kill(left, signal.SIGKILL)
        reader = next((one for one in threading.enumerate() if one.name == "rank-1-log"), None)
        if reader is not None:
            reader.join()
        with member.process:
            pass  # closes its pipes


def test_a_reference_that_is_the_starting_model_is_this_machine_s_copy() -> None:
    for reference, expected in (("/there/model", None), ("/there/other", "/there/other")):
        said = make_spec(loss={"kl": 0.1, "reference": reference}).model_dump_json()
        setup = Setup("test-1", "/there/model", said, 1, 2, 0, "10.0.0.1", 29400)
        assert own_spec(setup).loss.reference == expected


def test_deepspeed_adds_floats() -> None:
    assert make_spec().trainer.sums_exactly
    assert not make_spec(trainer={"learner": "deepspeed"}).trainer.sums_exactly
    with pytest.raises(ValidationError, match="exact_sums needs learner torch"):
        make_spec(trainer={"learner": "deepspeed", "exact_sums": True})


def test_fsdp_adds_exactly_unless_it_is_told_otherwise() -> None:
    """Its steps are replayed to the bit by itself, and not by the learner torch, whose norm differs."""
    exact, floats = (
        make_spec(trainer={"learner": "fsdp", "ranks": 2, **said}) for said in ({}, {"exact_sums": False})
    )
    assert exact.trainer.sums_exactly
    assert not floats.trainer.sums_exactly
    other_ranks = make_spec(trainer={"learner": "fsdp", "ranks": 4})
    assert recipe_of(exact) == recipe_of(other_ranks)
    assert len({recipe_of(one) for one in (exact, floats, make_spec())}) == 3
    with pytest.raises(ValidationError, match=r"model\.lora is for trainer\.learner torch or fsdp"):
        make_spec(model={"lora": {}}, trainer={"learner": "deepspeed"})


@pytest.mark.thorough(but=["fsdp"])
def test_a_state_that_can_not_be_read_is_restored_over(pair: Learner) -> None:
    """The others are told, and wait for the next one: an older checkpoint stands in."""
    start = pair.state()
    train(pair, SPEC, 1)
    weights = digests_of(pair.weights())

    class Torn(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            if name.startswith("optimizer."):
                raise StoreError("the state is damaged")
            return super().__getitem__(name)

        def get(self, name: str, default: object = None) -> torch.Tensor:  # type: ignore[override]
            return self[name]

    with pytest.raises(StoreError, match="the state is damaged"):
        pair.restore(Torn(pair.state()))
    pair.restore(start)
    train(pair, SPEC, 1)
    assert digests_of(pair.weights()) == weights


def test_a_learner_of_one_s_own_adds_alike_on_all_ranks(
    model: str, alone: tuple[dict[str, str], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a spec that was read as a rank's process reads it: without code that is not ours."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN_LEARNER)
    trainer = {**TRAINER, "import": "own.py:Gentle"}
    asked = RunSpec.model_validate({**SPEC.model_dump(mode="json"), "trainer": trainer}, context=LOAD)
    spec = RunSpec.model_validate(asked.model_dump(mode="json"))
    assert not spec.trainer.is_read
    learner = ranked(model, spec)
    train(learner, spec, 3)
    assert digests_of(learner.weights()) == alone[0]
    learner.close()


# Rank 2's weights change before its second step and before its fourth.
DRIFTING = """
import torch
from consumers.learners import collective
from consumers.learners.fsdp_learner import FsdpSettings
from consumers.learners.torch_learner import TorchSettings

class _Drifting:
    def make(self, model, spec):
        learner = super().make(model, spec)
        plain, taken = learner.step, []

        def step(total):
            taken.append(total)
            if collective.rank_number() == 2 and len(taken) in (2, 4):
                with torch.no_grad():
                    next(iter(learner._named.values())).view(-1)[0] += 1e-6
            return plain(total)

        learner.step = step
        return learner

class DriftingTorch(_Drifting, TorchSettings):
    "Settings of a learner with whole weights."

class DriftingFsdp(_Drifting, FsdpSettings):
    "Settings of a learner with shards of weights, and a whole adapter."
"""


@pytest.mark.parametrize(("name", "lora"), [("DriftingTorch", None), ("DriftingFsdp", {"rank": 4})])
def test_a_rank_whose_weights_drift_ends_the_step(
    model: str, alone: object, tmp_path: Path, name: str, lora: dict[str, int] | None
) -> None:
    """By name, and by the optimizer's step. A state of rank 0 makes all ranks one again."""
    (tmp_path / "own.py").write_text(DRIFTING)
    trainer = {**TRAINER, "ranks": 3, "import": f"{tmp_path / 'own.py'}:{name}"}
    asked = make_spec(loss=LOSS, algorithm=ALGORITHM, model={"lora": lora}, trainer=trainer)
    spec = RunSpec.model_validate(asked.model_dump(mode="json"), context=LOAD)
    learner = ranked(model, spec)
    try:
        train(learner, spec, 1)
        state = learner.state()
        with pytest.raises(
            RanksApart, match=r"^after optimizer step 2 the weights of rank 2 \(process \d+\) are "
        ):
            train(learner, spec, 1)
        learner.restore(state)
        train(learner, spec, 1)
        with pytest.raises(RanksApart, match=r"^after optimizer step 3 the weights of rank 2 "):
            train(learner, spec, 1)
    finally:
        learner.close()
