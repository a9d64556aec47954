"""The bench of one GPU: each of its parts runs anywhere with a tiny model, and without a GPU it says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from infra import choices
from tests.bench import gpu
from tests.bench._runs import ROOT

PLAIN = ("step_s", "tokens_per_s", "mfu", "first_over_best", "peak_gb")
RATIOS = ("tokens_over_padded", "memory_over_padded", "exact_sums_cost")
OURS = ("ours_256", "ours_inexact_256", "ours_512", "ours_inexact_512", "ours_128", "ours_checkpointed_1024",
        "ours_float32_128")  # fmt: skip
LEARNER = {
    *(f"learner.{name}.{key}" for name in ("padded_256", "padded_512", *OURS) for key in PLAIN),
    *(f"learner.{name}.made_ms" for name in OURS),
    "learner.exact_sum_ms",
    "learner.exact_sum_by_torch_ms",
    *(f"learner.{name}_{budget}" for name in RATIOS for budget in (256, 512)),
}
PAUSES = ("patch_s", "pause_ms", "still_ms", "prepare_ms", "digests_ms", "step_ms", "longest_step_beside_ms",
          "longest_step_beside_digests_ms")  # fmt: skip
ENGINE = {
    "engine.tokens_per_s", "engine.same_again", "engine.same_in_other_batch", "engine.same_after_a_prefill",
    *(f"engine.plain_tokens_per_s{way}" for way in ("", "_without_seeds", "_without_logprobs")),
    *(f"engine.tokens_over_plain{way}" for way in ("", "_without_seeds", "_without_logprobs")),
    *(f"engine.pauses.{share}.{key}" for share in ("1.5%", "2%", "2.8%", "6.9%", "100%") for key in PAUSES),
    *(f"engine.recompute.{key}" for key in ("pause_ms", "first_step_ms", "step_ms")),
    *(f"engine.logprob_gap.{dtype}.{key}" for dtype in ("bfloat16", "float32")
      for key in ("tokens", "mean", "p99", "largest")),
    *(f"engine.differs.{what}" for what in ("draws", "logprobs", "attention", "weights")),
    "engine.settings_compared",
}  # fmt: skip
CODEC = {
    *(f"codec.{share}.changed" for share in ("3%", "17%")),
    *(f"codec.{share}.compiled_{threads}.{key}" for share in ("3%", "17%") for threads in (1, 4, 8)
      for key in ("encode_gb_s", "decode_gb_s")),
}  # fmt: skip


def keys(found: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """The names of all figures, with the names of what they are in."""
    for name, value in found.items():
        if isinstance(value, Mapping) and value:
            yield from keys(value, f"{before}{name}.")
        else:
            yield before + name


def ran(*parts: str) -> Any:
    """Figures of some parts, by the command line."""
    said = ("--quick", "--device", "cpu", "--size", "tiny", "--parts", *parts)
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "gpu", *said], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("BENCH gpu ")[2])


@pytest.mark.thorough
def test_its_parts_run_with_a_tiny_model() -> None:
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda parts: ran(*parts), [("engine",), ("learner", "codec")])
    found = first | second
    different = found["engine"].pop("settings_that_differ")
    assert set(keys(found)) == LEARNER | ENGINE | CODEC
    learner, engine, codec = found["learner"], found["engine"], found["codec"]
    assert learner["tokens_over_padded_256"] > 0
    assert learner["ours_256"]["first_over_best"] >= 1
    assert engine["same_again"] == engine["same_in_other_batch"] == 1.0
    assert engine["tokens_over_plain"] > 0
    assert engine["settings_compared"] > 50
    assert not different
    assert all(gap["tokens"] == 8 * 16 and gap["mean"] < 0.01 for gap in engine["logprob_gap"].values())
    assert 0.02 < codec["3%"]["changed"] < 0.04 and 0.15 < codec["17%"]["changed"] < 0.19


@pytest.mark.skipif(choices.cuda(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(quick=True, argv=[]) == {"skipped": "no GPU: torch sees none, so nothing was measured"}
    assert not capsys.readouterr().out
