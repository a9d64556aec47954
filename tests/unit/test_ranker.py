"""The length ranker: what it learns, that it follows from what it saw alone, and how it is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.errors import Explained
from infra.stores.opening import open_store
from producers.ranker.network import Network, text_of
from producers.ranker.ranker import (
    KEPT_GROUPS,
    Answered,
    NoBackbone,
    Question,
    Ranker,
    question_of,
    recall_of_longest,
)
from producers.ranker.states import (
    RankerError,
    States,
    backbone_name,
    check_start,
    packed_ranker,
    start_from,
    unpacked_ranker,
)


def fresh(seed: int = 1) -> Ranker:
    return Ranker.fresh(seed, NoBackbone(), typical=20.0)


def iteration(rng: np.random.Generator, count: int = 32, first: int = 0) -> list[Answered]:
    """Prompts of three words; the answer has what each word costs."""
    found = []
    for number in range(first, first + count):
        words = rng.integers(0, 12, 3)
        cost = float(np.sum(3.0 * 1.6**words))
        found.append(
            Answered(
                question_of(str(number), None, words.tolist()),
                [max(1, round(cost * noise)) for noise in np.exp(rng.normal(0, 0.1, 4))],
            )
        )
    return found


def error(ranker: Ranker, groups: Sequence[Answered]) -> float:
    said = ranker.predict([group.question for group in groups])
    true = [np.mean(np.log(group.lengths)) for group in groups]
    return float(np.sqrt(np.mean((np.log(said) - true) ** 2)))


@given(st.integers(0, 1000), st.lists(st.integers(1, 6), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_gradients_are_those_of_the_error(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    dense = rng.normal(size=(len(sizes), 2))
    text = text_of([rng.integers(0, 50, size) for size in sizes], dense)
    network = Network.fresh(seed, 2)
    network._at = {name: value.astype(np.float64) for name, value in network._at.items()}
    for name in ("token_adds", "hidden_bias", "scale_bias"):  # where they are zero two branches meet
        network._at[name] += rng.normal(0, 0.3, network._at[name].shape)
    target, weight = rng.normal(size=len(sizes)), rng.random(len(sizes)) + 0.1
    pull = (network._forward(text)[0] - target) * weight
    gradients, tables = network._backward(text, network._forward(text)[1], pull)
    whole = dict(gradients)
    for name, (rows, values) in tables.items():
        whole[name] = np.zeros_like(network._at[name])
        whole[name][rows] = values

    def loss() -> float:
        return float(np.sum(0.5 * weight * (network._forward(text)[0] - target) ** 2))

    for name, parameter in network._at.items():
        place = np.unravel_index(int(np.argmax(np.abs(whole[name]))), parameter.shape)
        kept, step = parameter[place], 1e-6
        parameter[place] = kept + step
        above = loss()
        parameter[place] = kept - step
        below = loss()
        parameter[place] = kept
        assert whole[name][place] == pytest.approx((above - below) / (2 * step), rel=1e-3, abs=1e-6), name


def test_it_learns_what_words_cost() -> None:
    rng = np.random.default_rng(1)
    ranker, unseen = fresh(), iteration(np.random.default_rng(2), 200, first=10_000)
    before = error(ranker, unseen)
    for number in range(12):
        ranker = ranker.learned(iteration(rng, first=number * 32))
    said = ranker.predict([group.question for group in unseen])
    assert error(ranker, unseen) < 0.4 * before
    assert recall_of_longest(said, [np.mean(group.lengths) for group in unseen], 0.2) > 0.8


def test_a_prompt_that_always_takes_longer_is_remembered() -> None:
    rng = np.random.default_rng(3)
    ranker = fresh()
    own = np.exp(rng.normal(0, 0.7, 400))  # nothing in the prompt tells it
    words = [rng.integers(0, 12, 3).tolist() for _ in own]
    groups = [
        Answered(question_of(str(n), None, words[n]), [round(100 * factor)] * 4)
        for n, factor in enumerate(own)
    ]
    for _ in range(3):
        for start in range(0, len(groups), 50):
            ranker = ranker.learned(groups[start : start + 50])
    without = Ranker(ranker._network, ranker.backbone, centre=ranker._centre)
    assert error(ranker, groups) < 0.3 * error(without, groups)


def test_the_kind_of_a_problem_is_read() -> None:
    def of_kind(kind: int, number: int) -> Answered:
        return Answered(question_of(f"{kind}-{number}", str(kind), [5, 5, 5]), [10 * 3**kind] * 2)

    ranker = fresh()
    for number in range(8):
        ranker = ranker.learned([of_kind(kind, number) for kind in (0, 1, 2)])
    short, middle, long = ranker.predict([of_kind(kind, 99).question for kind in (0, 1, 2)])
    assert short < middle < long


def test_the_same_windows_give_the_same_bits_and_a_ranker_never_changes() -> None:
    iterations = [iteration(np.random.default_rng(number), first=number * 32) for number in range(3)]
    first, second = fresh(), fresh()
    questions = [group.question for group in iterations[0]]
    for groups in iterations:
        first = first.learned(groups)
    said = first.predict(questions)
    first.learned(iterations[0])
    for number, groups in enumerate(iterations):
        if number == 1:  # as after a restart
            second = unpacked_ranker(packed_ranker(second), NoBackbone(), "here")
        second = second.learned(groups)
    assert first.predict(questions).tobytes() == said.tobytes()
    assert {name: value.tobytes() for name, value in first.arrays().items()} == {
        name: value.tobytes() for name, value in second.arrays().items()
    }
    assert second.version == 3 and second.name == "none/3"


def test_it_keeps_the_newest_groups_only() -> None:
    ranker = fresh()
    few = iteration(np.random.default_rng(0), 8)
    many = [Answered(Question(number, few[0].question.text), [5]) for number in range(100, 100 + KEPT_GROUPS)]
    ranker = ranker.learned(few).learned(many)
    assert len(ranker._kept) == KEPT_GROUPS and few[0].question.key not in ranker._kept


def test_prompts_of_any_length_and_token_are_read() -> None:
    rng = np.random.default_rng(0)
    questions = [
        Question(1, rng.integers(0, 2**31 - 1, 5000).astype(np.int32)),
        Question(2, np.zeros(1, np.int32)),
    ]
    ranker = fresh().learned([Answered(question, [7, 9]) for question in questions])
    assert np.isfinite(ranker.predict(questions)).all()
    assert ranker.predict([]).size == 0


def test_one_that_knows_nothing_says_what_is_typical() -> None:
    assert fresh().predict([question_of("a", None, [1]), question_of("b", None, [2])]) == pytest.approx(20.0)


def test_states_are_put_once_and_found_by_number(tmp_path: Path) -> None:
    states = States.of_run(open_store(f"file://{tmp_path}"), "count-1")
    ranker = fresh()
    for number in range(4):
        states.put(number, ranker)
        ranker = ranker.learned(iteration(np.random.default_rng(number)))
    states.put(3, fresh(seed=9))  # of another feeder that was thought dead
    assert states.get(3, NoBackbone()).version == 3
    states.collect(2)
    assert states.numbers() == [2, 3]


def test_a_run_may_start_with_what_another_learned(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    groups = iteration(np.random.default_rng(0))
    states = States.to_start_from(store, "count")
    states.put(1, fresh().learned(groups))
    for where in (states.key(1), f"file://{tmp_path}/{states.key(1)}"):
        ranker = start_from(where, store, NoBackbone())
        assert ranker.version == 0 and error(ranker, groups) < error(fresh(), groups)


def test_a_start_is_looked_at_before_the_run_begins(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    States.to_start_from(store, "count").put(1, fresh())
    check_start("rankers/count/v000001.safetensors", store, "none")
    with pytest.raises(RankerError, match=r"lengths\.start: .*v000002.* is not there; `streamrl ranker RUN`"):
        check_start("rankers/count/v000002.safetensors", store, "none")
    with pytest.raises(RankerError, match=r"backbone 'none', and lengths\.backbone is 'tiny'"):
        check_start("rankers/count/v000001.safetensors", store, backbone_name("/models/tiny/"))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a stored ranker"),
        (b"junk that is long enough to have a length", "not a stored ranker"),
        (packed_ranker(fresh()).replace(b'schema\\": 2', b'schema\\": 7'), "has schema 7; .* reads 2"),
        (packed_ranker(fresh()).replace(b'backbone\\": \\"none', b'backbone\\": \\"qwen'), "backbone 'qwen'"),
        (packed_ranker(fresh())[:-4], "can't be read"),
        (packed_ranker(fresh()).replace(b"kept.kinds", b"kept.kindz"), "kept.kinds is missing"),
        (
            packed_ranker(fresh()).replace(b"network.hidden_bias", b"network.hidden_biaz"),
            "hidden_bias is missing",
        ),
    ],
)
def test_a_file_that_can_not_be_used_is_named_with_what_to_do(data: bytes, reason: str) -> None:
    with pytest.raises(RankerError, match=f"v7.safetensors.*{reason}.*make another with `streamrl ranker`"):
        unpacked_ranker(data, NoBackbone(), "v7.safetensors")


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None, str | None], None]:
    """Sign with one of two keys, and trust one."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ed25519

    for name in ("own", "other"):
        key = ed25519.Ed25519PrivateKey.generate()
        raw = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        (tmp_path / f"{name}.pem").write_bytes(raw)
        public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"{name}.pub").write_bytes(public)

    def use(signing: str | None, trusted: str | None) -> None:
        monkeypatch.setenv("STREAMRL_SIGNING_KEY", str(tmp_path / f"{signing}.pem") if signing else "")
        monkeypatch.setenv("STREAMRL_TRUSTED_KEYS", str(tmp_path / f"{trusted}.pub") if trusted else "")

    return use


def test_with_keys_a_ranker_is_signed_and_checked_before_it_is_read(
    keys: Callable[[str | None, str | None], None],
) -> None:
    keys("own", None)
    ranker = fresh()
    data = packed_ranker(ranker)
    keys(None, "own")
    assert unpacked_ranker(data, NoBackbone(), "it").version == ranker.version
    body = 8 + int.from_bytes(data[:8], "little")
    changed = [
        data[:-1] + bytes([data[-1] ^ 1]), data[:body] + bytes(len(data) - body),
        data.replace(b'version\\": 0', b'version\\": 9'),
        data.replace(b"network.hidden_bias", b"network.hidden_biaz"),
    ]  # fmt: skip
    for wrong in changed:
        assert wrong != data
        with pytest.raises(Explained, match="it is signed by none of the keys"):
            unpacked_ranker(wrong, NoBackbone(), "it")
    keys(None, "other")
    with pytest.raises(Explained, match="it is signed by none of the keys"):
        unpacked_ranker(data, NoBackbone(), "it")
    keys(None, None)
    assert unpacked_ranker(data, NoBackbone(), "it").version == ranker.version
    plain = packed_ranker(fresh())
    keys(None, "own")
    with pytest.raises(Explained, match="it is not signed"):
        unpacked_ranker(plain, NoBackbone(), "it")


def test_the_header_names_schema_and_version() -> None:
    data = packed_ranker(fresh())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    about = json.loads(header["__metadata__"]["streamrl_ranker"])
    assert about == {"schema": 2, "backbone": "none", "version": 0}


def test_of_a_long_prompt_its_ends_are_kept() -> None:
    long = list(range(5000))
    text = question_of("a", None, long).text.tolist()
    assert len(text) == 768 and text[:256] == long[:256] and text[-512:] == long[-512:]
    assert question_of("a", None, long[:768]).text.tolist() == long[:768]
