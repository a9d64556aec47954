"""Samples drawn again: weights change at the same tokens, whatever company a sample was drawn in."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from infra.weights.bits import model_of
from infra.weights.digest import digests_of, model_digests, root_digest
from infra.weights.patch import Patch, PatchFile
from infra.weights.weights_error import WeightsError
from producers import regenerating
from producers.engines.engine import DrawnAnswer, Pace, SampleRequest
from producers.engines.engine_messages import AnswerReport, Paced, Ready, Report
from producers.engines.engine_process import answer
from producers.engines.redraw_process import serve_redraws
from producers.engines.redrawing import OutOfStep, RedrawBatch, RedrawnWeights, redraw
from producers.regenerating import Redrawn, Regenerating, RegenerationError, batches_of
from schemas.identity import derive_seed
from schemas.messages import Sample
from tests.factories import make_sample, make_spec

_LONGEST = 12


class HashingEngine:
    """Each token follows from the seed, the weights, and the weights that made each entry of the KV cache."""

    def __init__(self, slots: int = 1 << 10) -> None:
        self.slots, self.model, self.root = slots, dict[str, Any](), ""
        self.requests: dict[str, SampleRequest] = {}
        self.cache: dict[str, list[str]] = {}
        self.drawn: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}

    def submit(self, request: SampleRequest) -> None:
        self.requests[request.id] = request
        self.cache[request.id], self.drawn[request.id], self.logprobs[request.id] = [], [], []

    def step(self, wait_s: float) -> list[DrawnAnswer]:
        done = []
        for name in list(self.requests)[: self.slots]:
            request, cache, drawn = self.requests[name], self.cache[name], self.drawn[name]
            cache.append(self.root)
            said = derive_seed(request.seed, len(drawn), *cache)
            drawn.append(said % 20)
            self.logprobs[name].append(-1.0 - (said >> 20) % (1 << 20) / (1 << 20))
            if drawn[-1] == 0 or len(drawn) == request.max_tokens:
                done.append(name)
        return [self._end(name) for name in done]

    def _end(self, name: str) -> DrawnAnswer:
        tokens = np.array(self.drawn.pop(name), dtype=np.int32)
        logprobs = np.array(self.logprobs.pop(name), dtype=np.float32)
        del self.requests[name], self.cache[name]
        return DrawnAnswer(name, tokens, logprobs, "length" if tokens[-1] else "stop")

    def unfinished(self) -> dict[str, int]:
        return {name: len(drawn) for name, drawn in self.drawn.items()}

    def abort(self, ids: Sequence[str]) -> None:
        for name in ids:
            del self.requests[name], self.cache[name], self.drawn[name], self.logprobs[name]

    def prepare(self, patch: Patch) -> None:
        assert patch.since in (None, self.root)
        self.prepared = patch

    def install(self, *, recompute: bool) -> dict[str, int]:
        self.prepared.apply(self.model)
        self.root = self.prepared.root
        if recompute:
            self.cache = {name: [self.root] * len(cache) for name, cache in self.cache.items()}
        return self.unfinished()

    def digests(self) -> dict[str, str]:
        return model_digests(self.model)

    def hand_over(self, ids: Sequence[str]) -> list[DrawnAnswer]:
        raise NotImplementedError

    def pace(self) -> Pace:
        return Pace([1], [1.0])

    def close(self) -> None:
        pass


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), float(version))}


def root(version: int) -> str:
    return root_digest(digests_of(tensors(version)))


def patch(version: int) -> PatchFile:
    return PatchFile({}, model_of(tensors(version)), since=None, root=root(version))


def recorded(
    begins: Sequence[int], installs: Sequence[int], *, recompute: bool, moves: Sequence[tuple[int, int]] = ()
) -> list[Sample]:
    """Samples of a generator that begins them, and installs versions, before these decode steps.

    `moves`: decode steps before which a sample's KV cache is computed anew, as another generator does it.
    """
    engine, spec = HashingEngine(), make_spec()
    found: list[Sample] = []
    notes: dict[str, tuple[list[int], list[int]]] = {}
    for moment in range(max([*begins, *installs]) + _LONGEST + 1):
        for version, at in enumerate(installs):
            if at == moment:
                engine.prepare(patch(version).read())
                for name, tokens in engine.install(recompute=recompute).items():
                    starts, versions = notes[name]
                    if starts[-1] == tokens:
                        versions[-1] = version
                    else:
                        starts.append(tokens)
                        versions.append(version)
        for number, at in enumerate(begins):
            if at == moment and moment >= installs[0]:
                name = f"{number:07d}-00"
                engine.submit(SampleRequest(name, [4, 5], _LONGEST, number, 1.0))
                now = max(version for version, when in enumerate(installs) if when <= moment)
                notes[name] = [0], [now]
        for at, number in moves:
            if at == moment and (cache := engine.cache.get(f"{number:07d}-00")):
                cache[:] = [engine.root] * len(cache)
        for one in engine.step(0.0):
            starts, versions = notes[one.id]
            found.append(
                make_sample(
                    spec, int(one.id[:7]), 0, seed=int(one.id[:7]), tokens=one.tokens, logprobs=one.logprobs,
                    version_starts=np.array(starts, dtype=np.int32), finish=one.finish,
                    versions=np.array(versions, dtype=np.int32), roots=[root(one) for one in versions],
                )
            )  # fmt: skip
    return found


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[HashingEngine]:
    """The engines that regenerating starts, in this process."""
    return use_hashing(monkeypatch)


def use_hashing(monkeypatch: pytest.MonkeyPatch, slots: int = 1 << 10) -> list[HashingEngine]:
    made: list[HashingEngine] = []

    class InThisProcess:
        def __init__(self, options: object, *, start_s: float) -> None:
            made.append(HashingEngine(slots))

        def open(self) -> InThisProcess:
            return self

        def draw(self, batch: RedrawBatch) -> list[DrawnAnswer] | None:
            try:
                return redraw(made[-1], batch)
            except OutOfStep:
                return None

        def close(self) -> None:
            pass

    monkeypatch.setattr(regenerating, "RedrawEngine", InThisProcess)
    return made


def regenerated(samples: Sequence[Sample], *, on_update: str, **sections: Any) -> list[Redrawn]:
    spec = make_spec(
        generator={"on_update": on_update, "slots": 4}, sampling={"max_tokens": _LONGEST}, **sections
    )
    again = Regenerating("model", spec, lambda version, said: tensors(version))
    try:
        return again.again(samples)
    finally:
        again.close()


_STEPS = st.lists(st.integers(0, 15), min_size=1, max_size=10)


@settings(deadline=None)
@given(
    _STEPS, st.lists(st.integers(1, 6), max_size=3), st.booleans(), st.booleans(),
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 9)), max_size=5),
)  # fmt: skip
def test_every_sample_comes_again_with_the_same_bits(
    begins: list[int], gaps: list[int], recompute: bool, crowded: bool, moves: list[tuple[int, int]]
) -> None:
    installs = np.cumsum([0, *gaps]).tolist()
    samples = recorded(begins, installs, recompute=recompute, moves=moves)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_hashing(monkeypatch, slots=2 if crowded else 1 << 10)  # crowded: samples come out of step
        found = regenerated(samples, on_update="recompute" if recompute else "continue")
    assert [one.sample.id for one in found] == [one.id for one in samples]
    assert all(one.equal and one.has_tokens and one.apart == 0.0 for one in found)


def test_where_a_sample_moved_is_found_out(engines: list[HashingEngine]) -> None:
    samples = recorded([0, 0, 0, 0], [0, 3, 5], recompute=False, moves=[(4, 1), (6, 1), (4, 3)])
    assert {one.id for one in samples if one.tokens.size > 6} >= {"0000001-00", "0000003-00"}
    found = regenerated(samples, on_update="continue")
    assert all(one.equal for one in found)
    moved = {one.sample.id: one.anew for one in found if one.anew}
    assert moved == {"0000001-00": (4, 6), "0000003-00": (4,)}


def test_an_engine_goes_on_where_all_samples_ended_before_their_change(
    engines: list[HashingEngine],
) -> None:
    samples = recorded([0], [0, 3], recompute=False) + recorded([9], [0, 3], recompute=False)
    (first,) = [one for one in samples if one.versions.size > 1][:1]
    late = structs.replace(first, version_starts=np.array([0, _LONGEST + 5], dtype=np.int32))
    assert not regenerated([late, structs.replace(samples[-1], group=1)], on_update="continue")[0].equal


def test_the_other_way_to_update_shows(engines: list[HashingEngine]) -> None:
    samples = recorded([0, 1], [0, 4], recompute=False)
    assert any(one.versions.size > 1 for one in samples)
    found = regenerated(samples, on_update="recompute")
    assert [one.equal for one in found] == [one.versions.size == 1 for one in samples]


def test_the_first_token_that_differs_is_named(engines: list[HashingEngine]) -> None:
    sample = max(recorded(range(6), [0], recompute=False), key=lambda one: one.tokens.size)
    other = sample.logprobs.copy()
    other[2] = np.nextafter(other[2], np.float32(-9))
    (found,) = regenerated([structs.replace(sample, logprobs=other)], on_update="wait")
    assert (found.equal, found.first_other, found.has_tokens) == (False, 2, True)
    assert 0 < found.apart < 1e-5
    tokens = sample.tokens.copy()
    tokens[3] += 1
    (found,) = regenerated([structs.replace(sample, tokens=tokens)], on_update="wait")
    assert (found.first_other, found.same_tokens, found.has_tokens) == (3, 3, False)
    (found,) = regenerated([structs.replace(sample, finish="abort")], on_update="wait")
    assert (found.first_other, found.apart) == (sample.tokens.size, 0.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=40), st.integers(1, 9))
def test_batches_hold_what_changed_alike_and_has_room(some: list[tuple[int, int]], slots: int) -> None:
    spec = make_spec()
    samples = [
        make_sample(
            spec, n, 0, length=length, versions=np.array([made_by], dtype=np.int32), roots=[str(made_by)]
        )
        for n, (made_by, length) in enumerate(some)
    ]  # fmt: skip
    batches = list(batches_of(samples, slots))
    assert sorted(one.id for batch in batches for one in batch) == sorted(one.id for one in samples)
    assert all(len(batch) <= slots and len({one.roots[0] for one in batch}) == 1 for batch in batches)
    assert [batch[0].roots[0] for batch in batches] == sorted(batch[0].roots[0] for batch in batches)


def test_an_engine_that_holds_other_weights_is_not_believed(engines: list[HashingEngine]) -> None:
    file = patch(1)
    batch = RedrawBatch(
        first=RedrawnWeights(str(file.path), {"w": "other"}), begins=[], requests=[], changes=[], weights=[],
        recompute=[],
    )  # fmt: skip
    with pytest.raises(WeightsError, match="does not hold the weights"):
        redraw(HashingEngine(), batch)


def test_no_engine_starts_for_weights_that_are_not_there(engines: list[HashingEngine]) -> None:
    def gone(version: int, said: str) -> Any:
        raise RegenerationError("gone")

    with pytest.raises(RegenerationError, match="gone"):
        Regenerating("model", make_spec(), gone).again(recorded([0], [0], recompute=False))
    assert not engines


def test_the_process_answers_batch_after_batch(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    thread = threading.Thread(target=answer, args=(theirs, lambda: HashingEngine(1), serve_redraws))
    thread.start()
    decode = msgspec.msgpack.Decoder(list[Report]).decode

    def said() -> Iterator[Report]:
        assert ours.poll(20)
        yield from decode(ours.recv_bytes())

    assert [type(one) for one in said()] == [Paced, Ready]
    files = patch(0), patch(1)
    first, second = (RedrawnWeights(str(file.path), digests_of(tensors(n))) for n, file in enumerate(files))
    requests = [SampleRequest(f"{n:07d}-00", [4], 3, 100 + n, 1.0) for n in range(2)]
    two = RedrawBatch(
        first=first, begins=[0, 0], requests=requests, changes=[2], weights=[second], recompute=[False]
    )
    ours.send_bytes(msgspec.msgpack.encode(two))
    assert not list(said())  # one slot for two samples: they are out of step
    one = structs.replace(two, begins=[0], requests=requests[:1])
    for _ in range(2):
        ours.send_bytes(msgspec.msgpack.encode(one))
        (found,) = said()
        assert isinstance(found, AnswerReport) and found.id == requests[0].id
    ours.close()
    thread.join(20)
    assert not thread.is_alive()
