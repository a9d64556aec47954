"""What the ranker costs: an iteration of long prompts, very many prompts at once, and a language model."""

from __future__ import annotations

import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from producers.ranker.language_model import LanguageModel
from producers.ranker.ranker import Answered, NoBackbone, Question, Ranker, question_of
from tests.factories import make_tiny_model

_GROUPS, _ITERATIONS = 64, 12
_LONG = (500, 2000)  # tokens of a prompt
_MANY, _MANY_TOKENS = 100_000, 100
_MODEL = {"layers": 4, "width": 256}


def window_cost() -> dict[str, float]:
    """Return the CPU time of iterations of 64 groups with long prompts: the first, and the others' median."""
    rng = np.random.default_rng(0)
    ranker = Ranker.fresh(1, NoBackbone(), typical=100.0)
    asking, learning = [], []
    for iteration in range(_ITERATIONS):
        groups = [
            Answered(_question(f"{iteration}-{number}", int(rng.integers(*_LONG)), rng), [40 + number] * 8)
            for number in range(_GROUPS)
        ]
        began = time.process_time()
        ranker.predict([group.question for group in groups])
        asking.append(time.process_time() - began)
        began = time.process_time()
        ranker = ranker.learned(groups)
        learning.append(time.process_time() - began)
    return {
        "predict_ms": round(1e3 * float(np.median(asking[1:])), 1),
        "learn_ms": round(1e3 * float(np.median(learning[1:])), 1),
        "first_learn_ms": round(1e3 * learning[0], 1),
    }


def many_at_once() -> dict[str, float]:
    """Return time and peak memory of ranking very many prompts at once."""
    rng = np.random.default_rng(0)
    ranker = Ranker.fresh(1, NoBackbone(), typical=100.0)
    ranker = ranker.learned([Answered(_question("a", 100, rng), [9]), Answered(_question("b", 50, rng), [5])])
    questions = [_question(str(number), _MANY_TOKENS, rng) for number in range(_MANY)]
    began = time.process_time()
    ranker.predict(questions)
    spent = time.process_time() - began
    tracemalloc.start()
    try:
        ranker.predict(questions)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return {"prompts": _MANY, "cpu_s": round(spent, 2), "peak_mb": round(peak / 1e6, 1)}


def backbone_cost() -> dict[str, float]:
    """Return how long a small language model reads a prompt, by its length, and reads it again."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder:
        backbone = LanguageModel(str(make_tiny_model(Path(folder) / "tiny", **_MODEL)))
    found: dict[str, float] = {}
    for tokens in (32, 256):
        questions = [_question(f"{tokens}-{n}", tokens, rng, words=24) for n in range(_GROUPS)]
        began = time.process_time()
        backbone.of(questions)
        found[f"prompt_of_{tokens}_ms"] = round(1e3 * (time.process_time() - began) / _GROUPS, 2)
    began = time.process_time()
    backbone.of(questions)
    found["again_ms"] = round(1e3 * (time.process_time() - began) / _GROUPS, 3)
    return found


def _question(name: str, tokens: int, rng: np.random.Generator, words: int = 50_000) -> Question:
    """A prompt of words some of which come far more often than others."""
    return question_of(name, None, (words ** rng.random(tokens)).astype(int).tolist())
