"""The bench of one GPU: each of its parts runs anywhere with a tiny model, and without a GPU it says so."""

from __future__ import annotations

import pytest

from infra import choices
from tests.bench import gpu


@pytest.mark.timeout(300)
def test_its_parts_run_with_a_tiny_model() -> None:
    found = gpu.main(quick=True, argv=["--device", "cpu", "--size", "tiny"])
    learner, engine, codec = found["learner"], found["engine"], found["codec"]
    assert learner["tokens_over_padded_256"] > 0
    assert learner["ours_256"]["first_over_best"] >= 1
    assert engine["same_again"] == engine["same_in_other_batch"] == 1.0
    assert engine["tokens_over_plain"] > 0
    assert set(engine["pauses"]) == {"2%", "100%"}
    assert 0.01 < codec["changed"] < 0.1
    assert set(codec) == {"changed", "compiled_1", "compiled_4", "compiled_8"}


@pytest.mark.skipif(choices.cuda(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(quick=True, argv=[]) == {"skipped": "no GPU"}
    assert capsys.readouterr().out == "no GPU: torch sees none, so nothing was measured\n"
