"""The counting task with lengths that pay: counts of any size alike, and each right number earns more.

Running on costs nothing here. The model that the demo starts from stops too early, so nearly all that it can
earn is length.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

LONGEST = 72
SIZES = {"held_out": 1024, "train": 4096}


def _counting() -> ModuleType:
    file = Path(__file__).resolve().parents[2] / "examples" / "count_task.py"
    spec = importlib.util.spec_from_file_location("count_task", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_COUNTING = _counting()


def problems(split: str) -> Iterable[dict[str, Any]]:
    """The problems of one split: always the same ones, in the same order."""
    rng = random.Random(f"paying {split}")
    for index in range(SIZES[split]):
        count, word = rng.randint(1, LONGEST), _COUNTING.draw_word(rng)
        yield {
            "id": f"{split}-{index:05d}",
            "prompt": _COUNTING.make_prompt(count, word),
            "answer": _COUNTING.make_answer(count, word),
            "kind": f"{count:02d}",
        }


def reward(problem: dict[str, Any], completion: str) -> float:
    """How many of the longest answer's numbers are right before the first mistake."""
    wanted, written = problem["answer"].split(" "), completion.split(" ")
    right = 0
    while right < min(len(wanted), len(written)) and written[right] == wanted[right]:
        right += 1
    return right / (LONGEST + 1)
