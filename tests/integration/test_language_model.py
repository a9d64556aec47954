"""A real Hugging Face model as the ranker's backbone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from producers.ranker import language_model
from producers.ranker.language_model import LanguageModel
from producers.ranker.ranker import Answered, NoBackbone, Ranker, question_of
from producers.ranker.states import RankerError, packed_ranker, unpacked_ranker
from tests.factories import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("backbone") / "tiny")


def test_what_it_says_of_a_prompt_depends_on_the_prompt_alone(folder: Path) -> None:
    texts = [[2 + (n * k) % 20 for k in range(1, 3 + n % 7)] for n in range(40)]
    questions = [question_of(str(number), "kind", text) for number, text in enumerate(texts)]
    together = LanguageModel(str(folder)).of(questions)
    alone = np.concatenate([LanguageModel(str(folder)).of([question]) for question in questions[:3]])
    assert together.shape == (40, 64) and together.dtype == np.float32
    assert together[:3].tobytes() == alone.tobytes()
    backwards = LanguageModel(str(folder)).of(questions[::-1])
    assert backwards[::-1].tobytes() == together.tobytes()
    np.testing.assert_allclose(np.sqrt(np.mean(together**2, axis=1)), 1.0, rtol=1e-3)


def test_a_ranker_learns_with_it_and_is_not_mixed_up_with_others(folder: Path) -> None:
    backbone = LanguageModel(str(folder))
    rng = np.random.default_rng(0)
    groups = [
        Answered(question_of(str(n), None, tokens.tolist()), [int(10 * tokens[0])] * 2)
        for n, tokens in enumerate(rng.integers(2, 22, (64, 3)))
    ]
    ranker = Ranker.fresh(0, backbone, typical=50.0)
    for _ in range(6):
        ranker = ranker.learned(groups)
    said = ranker.predict([group.question for group in groups])
    assert np.corrcoef(np.log(said), [np.log(group.lengths[0]) for group in groups])[0, 1] > 0.8
    again = unpacked_ranker(packed_ranker(ranker), backbone, "here")
    assert again.predict([group.question for group in groups]).tobytes() == said.tobytes()
    with pytest.raises(RankerError, match=r"backbone 'tiny', and lengths\.backbone is 'none'"):
        unpacked_ranker(packed_ranker(ranker), NoBackbone(), "here")


def test_prompts_of_any_number_and_length_are_read_and_few_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "_KEPT_BYTES", 8 * 4 * 64)
    read: list[int] = []
    backbone = LanguageModel(str(folder), read.append)
    questions = [question_of(str(n), None, [2 + n % 20] * (1 + 61 * (n % 5) ** 2)) for n in range(30)]
    said = backbone.of([*questions, *questions])
    assert sum(read) == 30 and len(read) > 3, "whoever waits for them sees that it goes on"
    assert said[:30].tobytes() == said[30:].tobytes() and np.isfinite(said).all()
    assert len(backbone._kept) == 8
    assert backbone.of(questions).tobytes() == said[:30].tobytes()
    assert backbone.of([]).shape == (0, 64)


def test_models_that_can_not_be_used_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RankerError, match=r"lengths\.backbone: .* is not a folder"):
        LanguageModel(str(tmp_path / "absent"))
    with pytest.raises(RankerError, match=r"lengths\.backbone: .* can't be loaded"):
        LanguageModel(str(tmp_path))
    with pytest.raises(RankerError, match="vocabulary of 24, and a prompt has token 99"):
        LanguageModel(str(folder)).of([question_of("a", None, [99])])
