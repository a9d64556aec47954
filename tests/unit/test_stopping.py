"""Where answers end: stop strings against a naive search, over tokens that are parts of characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from consumers.batches.micro_batches import micro_batch
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner
from infra.end_tokens import EndTokensError, end_tokens
from producers.engines.sampler import StreamSampler
from producers.stopping import Stopping, stopping_of
from schemas.fitness import fault
from schemas.runspec import RunSpec
from tests.factories import make_sample, make_spec, make_tiny_model

Decode = Callable[[Sequence[int]], str]
PIECES = ["stop", "st", "op", "ĠĠ", "Ġs", "</", "end", "Ċ", "é", "ä½"]


def byte_level() -> Tokenizer:
    """As most models have it: every byte is a token, some words are, and one is special."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*letters, *(p for p in PIECES if p not in letters)])}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return made


def sentence_pieces() -> Tokenizer:
    """As Llama 2 has it: words that begin with a space, and bytes for what is no word."""
    pieces = [
        "<unk>",
        *(f"<0x{n:02X}>" for n in range(256)),
        "▁",
        "▁s",
        "s",
        "t",
        "o",
        "p",
        "▁stop",
        "é",
        "\n",
    ]
    made = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def decode_by(tokenizer: Tokenizer) -> Decode:
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True))


BYTES, PIECED = byte_level(), sentence_pieces()
BY_BYTES, BY_PIECES = decode_by(BYTES), decode_by(PIECED)


def of_bytes(text: bytes) -> list[int]:
    """The tokens of single bytes."""
    letter = {byte: chr(byte) for byte in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    others = [byte for byte in range(256) if byte not in letter]
    letter |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [BYTES.token_to_id(letter[byte]) for byte in text]


def naive_end(decode: Decode, stop: Sequence[str], tokens: Sequence[int]) -> int | None:
    """After how many tokens the text first contains a stop string."""
    return next(
        (n for n in range(1, len(tokens) + 1) if any(one in decode(tokens[:n]) for one in stop)), None
    )


def end_of(stopping: Stopping, tokens: Sequence[int]) -> int | None:
    return next((n for n in range(1, len(tokens) + 1) if stopping.ends(tokens[:n])), None)


WORDS = st.sampled_from([BYTES.token_to_id(piece) for piece in [*PIECES, "<|im_end|>"]])
CHARACTERS = st.text("sé你😀 \n", max_size=6).map(lambda text: of_bytes(text.encode()))
ANSWERS = st.lists(
    WORDS.map(lambda token: [token])
    | CHARACTERS
    | st.integers(0, 255).map(lambda byte: of_bytes(bytes([byte]))),
    max_size=60,
).map(lambda parts: sum(parts, []))  # noqa: RUF017 - they are short
STOPS = st.lists(
    st.sampled_from(["stop", "  s", "</", "\n", "é", "你", "😀s", "s", "éé\n", " ", "opst", "</end"]),
    min_size=1,
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(tokens=ANSWERS, stop=STOPS)
def test_an_answer_ends_where_a_naive_search_finds_a_stop_string(tokens: list[int], stop: list[str]) -> None:
    stopping = Stopping(BY_BYTES, stop=stop)
    end = end_of(stopping, tokens)
    assert end == naive_end(BY_BYTES, stop, tokens)
    text = BY_BYTES(tokens[:end])
    first = min(text.find(one) for one in stop if one in text) if end else None
    assert stopping.text(np.array(tokens[:end], np.int32)) == text[:first]


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(1, PIECED.get_vocab_size() - 1), max_size=14)
    | st.lists(st.integers(257, PIECED.get_vocab_size() - 1), max_size=90),
    stop=st.lists(st.sampled_from(["stop", " s", "é", "\n", "top", " "]), min_size=1, max_size=3),
)
def test_the_same_with_pieces_that_begin_with_a_space(tokens: list[int], stop: list[str]) -> None:
    assert end_of(Stopping(BY_PIECES, stop=stop), tokens) == naive_end(BY_PIECES, stop, tokens)


@settings(max_examples=200, deadline=None)
@given(tokens=ANSWERS, stop=STOPS, least=st.integers(0, 40), data=st.data())
def test_the_end_depends_on_the_tokens_alone(
    tokens: list[int], stop: list[str], least: int, data: st.DataObject
) -> None:
    """Wherever the sample moved to another engine, and whatever that one has looked at before."""
    stopping, other = Stopping(BY_BYTES, stop=stop, min_tokens=least), Stopping(BY_BYTES, stop=stop)
    other.min_tokens = least
    other.ends(tokens)
    for n in range(1, len(tokens) + 1):
        cut = data.draw(st.integers(0, n - 1))
        said = stopping.ends(tokens[:n])
        assert other.ends(tokens[cut:n], tokens[:cut]) == said
        before, text = BY_BYTES(tokens[: n - 1]).rstrip("\ufffd"), BY_BYTES(tokens[:n])
        places = [(at, one) for one in stop for at in range(len(text)) if text.startswith(one, at)]
        assert said == (n > least and any(at + len(one) > len(before) for at, one in places))


def test_a_stop_string_over_the_boundary_and_in_a_long_answer() -> None:
    stopping = Stopping(BY_BYTES, stop=["</answer>"])
    made, drawn = of_bytes("é".encode() * 5_000 + b"</ans"), of_bytes(b"wer>")
    assert not stopping.ends(drawn[:3], made)
    assert stopping.ends(drawn, made)
    assert not stopping.ends([], made + drawn), "this engine has drawn nothing yet"
    assert stopping.text(np.array(made + drawn, np.int32)) == "é" * 5_000


def test_what_is_complete_among_the_first_tokens_does_not_count() -> None:
    stopping = Stopping(BY_BYTES, stop=["a"], min_tokens=3)
    tokens = of_bytes(b"aaaa")
    assert [stopping.ends(tokens[:n]) for n in range(1, 5)] == [False, False, False, True]
    assert stopping.text(np.array(tokens, np.int32)) == "aaa"
    assert stopping.text(np.array(tokens[:3], np.int32)) == "aaa"


def test_a_special_token_may_be_named(tmp_path: Path) -> None:
    BYTES.save(str(tmp_path / "tokenizer.json"))
    stopping = stopping_of(str(tmp_path), make_spec(sampling={"stop": ["<|im_end|>", "é"]}))
    end = BYTES.token_to_id("<|im_end|>")
    assert stopping.ends([end]) and stopping.ends(of_bytes("é".encode())) and not stopping.ends([end, 0])
    assert stopping.text(np.array([*of_bytes(b"yes"), end], np.int32)) == "yes"


def test_no_stop_string_costs_nothing() -> None:
    def fail(tokens: Sequence[int]) -> str:
        raise AssertionError("nothing is decoded")

    stopping = Stopping(fail)
    assert not stopping.looks
    spec = make_spec()
    assert spec.sampling.stop == [] and spec.sampling.min_tokens == 0


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"stop": ["a"] * 17}, "at most 16"),
        ({"stop": [""]}, "at least 1 char"),
        ({"stop": ["a" * 257]}, "at most 256"),
        ({"stop": ["\ufffd"]}, "half a character"),
        ({"stop": ["a\0"]}, "U\\+0000 is not allowed"),
        ({"min_tokens": 17}, r"min_tokens \(17\) is more than max_tokens \(16\)"),
        ({"min_tokens": -1}, "greater than or equal to 0"),
    ],
)
def test_settings_that_can_not_be(sampling: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_spec(sampling=sampling)


def test_end_tokens_are_those_of_the_tokenizer_and_of_the_generation_config(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    assert end_tokens(str(model)) == [1]
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 5, 99]}')  # the vocabulary has 24
    assert end_tokens(str(model)) == [1, 5, 7]
    (model / "generation_config.json").unlink()
    assert end_tokens(str(model)) == [1]
    (model / "config.json").write_text("{")
    with pytest.raises(EndTokensError, match=r"the end tokens can't be found, which sampling\.min_t"):
        end_tokens(str(model))


class Batch:
    """What the sampler reads of vLLM's batch."""

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self.req_ids = [f"{name}-12345678" for name in answers]
        self.req_output_token_ids = list(answers.values())


def test_barred_tokens_are_not_drawn_and_the_others_share_their_probability() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 9)
    logits[:, 4] = 30.0  # without the bar it is drawn always
    sampler = StreamSampler(5, [4, 7])
    for name, before in (("young", 0), ("moved", 5), ("at the end", 3)):
        sampler.open(name, 1, before)
    sampler.batch = Batch({"young": [1, 1, 1, 1], "moved": [], "at the end": [1]})
    tokens, _ = sampler.forward(logits.clone(), {}, None, None)
    assert int(tokens[0]) not in (4, 7) and int(tokens[1]) == 4 and int(tokens[2]) not in (4, 7)
    rest = [token for token in range(9) if token not in (4, 7)]
    expected = logits[0, rest].log_softmax(-1)[rest.index(int(tokens[0]))]
    assert sampler.close("young")[-1] == pytest.approx(float(expected), abs=1e-6)


def learner_of(model: Path, least: int) -> tuple[TorchLearner, RunSpec]:
    spec = make_spec(sampling={"min_tokens": least, "temperature": 0.7}, model={"path": str(model)})
    return TorchLearner(str(model), spec), spec


def test_the_trainer_bars_the_same_tokens(tmp_path: Path) -> None:
    """Logprobs, gradient and entropy, of two answers in one micro-batch."""
    model = make_tiny_model(tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 6]}')
    learner, spec = learner_of(model, 3)
    rows = []
    for n, tokens in enumerate(([8, 9, 10, 6, 1], [12, 6, 14, 15])):
        drawn, logprobs = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
        rows.append(TrainingRow(make_sample(spec, 0, n, tokens=drawn, logprobs=logprobs), 0, n))
    batch = micro_batch(rows, None, learner.loss, 0)
    found = learner._forward.logprobs(learner._model, batch)
    entropy, counted = learner._forward.entropy()
    assert np.isfinite(float(entropy)) and counted
    found.sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in learner._model.parameters())
    expected = []
    for row in rows:
        whole = torch.tensor([*row.sample.prompt_tokens.tolist(), *row.sample.tokens.tolist()])
        logits = learner._model.lm_head(learner_states(learner, whole)) / 0.7
        for place, token in enumerate(row.sample.tokens.tolist()):
            given = logits[len(row.sample.prompt_tokens) - 1 + place].detach().clone()
            if place < 3:
                given[[one for one in (1, 6) if one != token]] = -torch.inf
            expected.append(float(given.log_softmax(-1)[token]))
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=2e-6)


def learner_states(learner: TorchLearner, tokens: torch.Tensor) -> torch.Tensor:
    from consumers.batches.packing import pack_sequences
    from consumers.learners.forward import _states

    packing = pack_sequences([len(tokens)])
    filled = torch.cat([tokens, tokens.new_zeros(packing.positions.shape[0] - len(tokens))])
    return _states(learner._model, filled, packing)[: len(tokens)]


def test_an_answer_that_is_too_short_is_not_trained() -> None:
    spec = make_spec(sampling={"min_tokens": 5})
    assert fault(make_sample(spec, 0, 0, length=5), spec) == ""
    assert fault(make_sample(spec, 0, 0, length=4), spec) == "the answer has 4 tokens; 5 are the least"
