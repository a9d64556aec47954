"""Bad input: to the dead letters with the reason, counted; what is needed is made again; the run goes on."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from consumers.stream.sample_stream import SampleStream
from consumers.stream.unfit import NeverFit
from infra.bus import read_all
from infra.roles.context import RoleContext
from schemas.identity import sample_id
from schemas.messages import TRAIN, DeadLetter, Prompt, Sample
from schemas.wire import decode, encode
from tests.factories import make_context, make_sample, make_spec
from tests.fakes.fill import fill
from tests.waiting import wait_until

SPEC = make_spec(algorithm={"groups": 4, "group_size": 2})
GOOD = [make_sample(SPEC, group, index) for group in range(4) for index in range(2)]
QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.tail._POLL_S", 0.01)


def put(context: RoleContext, sample: Sample | bytes, *, key: str | None = None, partition: int = 0) -> None:
    raw = sample if isinstance(sample, bytes) else encode(sample)
    name = key if key is not None else sample.id if isinstance(sample, Sample) else ""
    context.writer.send(context.topics.samples, raw, key=name, partition=partition)


def taken(context: RoleContext, **options: Any) -> SampleStream:
    """A stream that has read all there is."""
    stream = SampleStream(
        context, 24, {}, options.get("trained", (0, 0)), options.get("root_of", lambda _: "r")
    ).open()
    ends = sum(len(part) for part in context.bus.log(context.topics.samples))  # type: ignore[attr-defined]
    try:
        wait_until(lambda: stream.pump(0.01) + 1 and sum(stream.positions.values()) == ends, what="records")
    finally:
        stream.close()
    return stream


def letters(context: RoleContext) -> list[DeadLetter]:
    return [decode(r.value, DeadLetter) for r in read_all(context.bus, context.topics.dead, deadline_s=5)]


def here(stream: SampleStream) -> list[tuple[int, int]]:
    return [
        (row.sample.group, row.sample.index)
        for bundle in stream.complete((0, 0))
        for row in bundle.in_order()
    ]


def edited(sample: Sample, **fields: Any) -> Sample:
    return structs.replace(sample, **fields)


BAD: dict[str, dict[str, Any]] = {
    "its purpose is 'fun'": {"purpose": "fun"},
    "there is no length class 7": {"length_class": 7},
    "a bundle can't have 0 groups; an iteration has 4": {"bundle_groups": 0},
    "an iteration has 1 optimizer steps, and no step 1": {"mini": 1},
    "the prompt has 9 tokens; 8 are the most": {"prompt_tokens": np.full(9, 4, np.int32)},
    "its versions of the weights, or the tokens where they start, are out of order or range": {
        "version_starts": np.array([5], np.int32)
    },
    "it does not say which weights made it": {"roots": []},
    "-1 is no seed": {"seed": -1},
    "nan is no predicted length": {"predicted": float("nan")},
    "it does not say when it was made": {"finished_at": float("inf")},
    "one of its logprobs is above 0 or not finite": {
        "logprobs": np.full(GOOD[0].true_length, np.nan, np.float32)
    },
    "a token of the prompt is not in the vocabulary of 24": {"prompt_tokens": np.array([-1], np.int32)},
}


@pytest.mark.parametrize("reason", BAD)
def test_what_is_unfit_is_asked_for_again(tmp_path: Path, reason: str) -> None:
    context = make_context(SPEC, tmp_path)
    put(context, edited(GOOD[0], **BAD[reason]))
    stream = taken(context)
    (letter,) = letters(context)
    assert (letter.reason, letter.wanted) == (reason, GOOD[0].id)
    assert context.heart.counters["dead_letters"] == 1
    assert stream.received == 0


def test_other_weights_of_the_same_number_are_found(tmp_path: Path) -> None:
    roots = {0: "r"}
    for number, (root, reason) in enumerate(
        (("r", ""), ("other", "it was made by other weights than version 0"))
    ):
        context = make_context(SPEC, tmp_path / str(number))
        put(context, edited(GOOD[0], roots=[root]))
        assert taken(context, root_of=roots.get).received == (not reason)
        assert [letter.reason.startswith(reason) for letter in letters(context)] == ([True] if reason else [])


def test_weights_that_do_not_exist_yet(tmp_path: Path) -> None:
    spec = make_spec(algorithm={"groups": 4, "group_size": 2, "mode": "async", "staleness": 1})
    context = make_context(spec, tmp_path)
    for version in (0, 1):
        put(context, make_sample(spec, 4, version, versions=np.array([version], np.int32)))
    assert taken(context, root_of={0: "r"}.get).received == 1
    assert letters(context)[0].reason == "weights 1 made it; the run's newest are 0"


def test_who_is_not_needed_is_not_asked_for(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    put(context, GOOD[0])
    nan = float("nan")
    unfit = edited(GOOD[0], reward=nan, finished_at=1.0)
    put(context, unfit)  # it is here
    put(context, edited(GOOD[1], run="other-1"))  # nobody here made that
    put(context, edited(GOOD[1], reward=nan), key="nonsense")
    put(context, edited(GOOD[1], reward=nan), key=sample_id(0, 7))
    put(context, edited(GOOD[1], reward=nan), key=sample_id(400, 1))
    taken(context)
    assert [letter.wanted for letter in letters(context)] == [""] * 5
    later = make_context(SPEC, tmp_path / "later")
    put(later, b"rubbish", key=GOOD[1].id)
    taken(later, trained=(1, 0))  # it is trained
    assert [letter.wanted for letter in letters(later)] == [""]


def test_an_unreadable_record_is_asked_for_by_its_key(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    put(context, b"rubbish", key=GOOD[3].id)
    put(context, encode(GOOD[3])[:-1], key=sample_id(-5, 0))  # of an evaluation
    taken(context)
    assert [letter.wanted for letter in letters(context)] == [GOOD[3].id, sample_id(-5, 0)]


def test_a_trainer_that_starts_again_says_nothing_twice(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    put(context, edited(GOOD[0], reward=float("nan")))
    for _ in range(3):
        taken(context)
    assert len(letters(context)) == 1


def test_a_sample_that_is_never_fit_ends_the_run(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    for time in (1.0, 1.0, 2.0, 3.0):  # one of them was delivered twice
        put(context, edited(GOOD[0], reward=float("nan"), finished_at=time))
    with pytest.raises(
        NeverFit, match=r"sample 0000000-00 was made 3 times .* its reward is not a finite number"
    ):
        taken(context)
    stream = taken(context)  # started again, it waits for one that is made after that
    assert stream.received == 0
    put(context, GOOD[0])
    assert taken(context).received == 1


def test_a_sample_of_an_evaluation_that_is_never_fit_ends_nothing(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    for time in (1.0, 2.0, 3.0, 4.0):
        put(context, edited(GOOD[0], reward=float("nan"), finished_at=time), key=sample_id(-5, 0))
    put(context, edited(GOOD[0], reward=float("nan")), key=sample_id(-5, 1))  # evaluation.per_problem is 1
    taken(context)
    assert [letter.wanted for letter in letters(context)] == [sample_id(-5, 0)] * 4 + [""]


def test_a_sample_that_can_t_be_understood_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_context(SPEC, tmp_path)

    def wrong(sample: Sample) -> str:
        raise OverflowError

    monkeypatch.setattr(Sample, "wrong", wrong)
    put(context, GOOD[0])
    assert not here(taken(context))
    assert [letter.wanted for letter in letters(context)] == [GOOD[0].id]


def test_garbage_under_a_sample_s_key_does_not_end_the_run_until_it_has_lasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, clock = make_context(SPEC, tmp_path), [1000.0]
    monkeypatch.setattr("consumers.stream.unfit.time", SimpleNamespace(monotonic=lambda: clock[0]))
    stream = SampleStream(context, 24, {}, (0, 0), lambda _: "r").open()

    def read(count: int) -> None:
        wait_until(lambda: stream.pump(0.01) + 1 and len(letters(context)) == count, what="dead letters")

    for number in range(30):
        put(context, b"rubbish %d" % number, key=GOOD[0].id)
    read(30)
    clock[0] += SPEC.deadlines.progress_s
    put(context, b"more of it", key=GOOD[0].id)
    read(31)
    clock[0] += SPEC.deadlines.progress_s
    put(context, b"and more", key=GOOD[0].id)
    with pytest.raises(NeverFit, match="was made 3 times and was never fit"):
        read(32)
    stream.close()


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "prompt": {"prompt_tokens": np.array([4, 6], np.int32)},
    "problem": {"problem_id": "another"},
    "bundle": {"bundle": 1},
    "bundle_groups": {"bundle_groups": 2},
}


def admit(context: RoleContext, sample: Sample) -> None:
    names = ("run", "group", "size", "problem_id", "epoch", "iteration", "mini", "bundle", "bundle_groups")
    fields = {name: getattr(sample, name) for name in names}
    prompt = fill(Prompt, purpose=TRAIN, tokens=sample.prompt_tokens, **fields)
    context.writer.send(context.topics.prompts, encode(prompt), key=str(sample.group))


@pytest.mark.parametrize("name", CONTRADICTIONS)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_group_that_contradicts_itself(tmp_path: Path, name: str, known: bool, first: bool) -> None:
    """What was admitted says who is right; if that is not known, who was first."""
    context = make_context(SPEC, tmp_path)
    if known:
        admit(context, GOOD[0])
    wrong = edited(GOOD[1], **CONTRADICTIONS[name])
    for sample in [wrong, GOOD[0]] if first else [GOOD[0], wrong]:
        put(context, sample)
    stream = taken(context)
    (letter,) = letters(context)
    loser = GOOD[0] if first and not known else wrong
    assert letter.wanted == loser.id
    assert decode(letter.raw, Sample) == loser
    if known:
        put(context, GOOD[1])
        stream = taken(context)
        assert here(stream) == [(0, 0), (0, 1)]
        assert stream.outstanding((0, 0)) == 6


def test_a_bundle_that_contradicts_itself(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    together = [edited(sample, bundle=0, bundle_groups=2) for sample in GOOD[:4]]
    for sample in (together[0], together[2]):
        admit(context, sample)
    put(context, edited(together[0], bundle_groups=3))
    for sample in together[1:]:
        put(context, sample)
    stream = taken(context)
    assert [letter.wanted for letter in letters(context)] == [GOOD[0].id]
    assert not stream.complete((0, 0))
    put(context, together[0])
    assert here(taken(context)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_group_whose_samples_are_all_wrong_is_not_waited_for_in_vain(tmp_path: Path) -> None:
    """Nothing was odd about group 1 when it came, and it may be trained by now: the run can only end."""
    context = make_context(SPEC, tmp_path)
    for sample in (GOOD[0], GOOD[2]):
        admit(context, sample)
    for sample in GOOD[2:4]:
        put(context, edited(sample, bundle=0))
    for time in range(3):
        put(context, edited(GOOD[0], finished_at=float(time)))
    with pytest.raises(NeverFit, match="its bundle has all its groups without group 0"):
        taken(context)


@given(data=st.data())
@QUICK
def test_whatever_comes_the_good_ones_are_trained(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Good ones, some twice, among bad ones: each good one is there once, each bad one a dead letter."""
    context = make_context(SPEC, tmp_path_factory.mktemp("soup"))
    for sample in GOOD:
        admit(context, sample)
    draw = random.Random(data.draw(st.integers(0, 1 << 32)))
    bad = []
    # one of a group at most: a whole group that agrees with itself is taken for what was admitted
    for place in data.draw(st.lists(st.integers(0, 7), max_size=4, unique_by=lambda place: place // 2)):
        fields = draw.choice([{"run": "other-1"}, *BAD.values(), *CONTRADICTIONS.values()])
        if fields.get("bundle") == GOOD[place].bundle:
            continue  # that is right
        fields = {"logprobs": np.ones(1, np.float32)} if "logprobs" in fields else fields
        bad.append(
            edited(GOOD[place], finished_at=1.0, **{k: v for k, v in fields.items() if k != "finished_at"})
        )
        if "finished_at" in fields:
            bad[-1] = edited(bad[-1], finished_at=float("inf"))
    again = draw.sample(GOOD, draw.randrange(4))
    records = [*GOOD, *bad, *again]
    draw.shuffle(records)
    for sample in records:
        put(context, sample, partition=draw.randrange(2))
    rubbish = data.draw(st.lists(st.binary(max_size=40), max_size=3))
    for number, raw in enumerate(rubbish):
        put(context, raw, key="" if number else data.draw(st.sampled_from(["x", GOOD[3].id])))
    stream = taken(context)
    for _ in range(2):  # what was asked for is made again
        for letter in letters(context):
            if letter.wanted and (asked := [sample for sample in GOOD if sample.id == letter.wanted]):
                put(context, asked[0])
        stream = taken(context)
    assert here(stream) == [(sample.group, sample.index) for sample in GOOD]
    assert all(row == good for row, good in zip(
        [row.sample for bundle in stream.complete((0, 0)) for row in bundle.in_order()], GOOD, strict=True
    ))  # fmt: skip
    found = letters(context)
    assert len({(letter.partition, letter.offset) for letter in found}) == len(found)
    assert {letter.raw for letter in found if letter.raw in rubbish} == set(rubbish)


@given(data=st.data())
@settings(QUICK, max_examples=100)
def test_a_flipped_bit_never_stops_the_trainer(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    context = make_context(SPEC, tmp_path_factory.mktemp("flip"))
    for sample in GOOD[::2]:
        admit(context, sample)
    raw = bytearray(encode(GOOD[0]))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    put(context, bytes(raw), key=GOOD[0].id)
    for sample in GOOD:
        put(context, sample)
    stream = taken(context)
    for bundle in stream.complete((0, 0)):
        for row in bundle.in_order():
            assert row.sample.true_length == row.sample.logprobs.size
            np.array([row.sample.seed], dtype=np.uint64)
    assert stream.outstanding((0, 0)) <= 2
