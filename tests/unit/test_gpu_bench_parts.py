"""The bench of one GPU: no part takes time or memory from another, or is lost since another one failed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.bench import gpu
from tests.bench._gpu_learner import Work, ours, padded
from tests.bench._gpu_model import sized_model


@pytest.fixture
def switched_back() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_only_exact_sums_are_timed_with_deterministic_algorithms(
    switched_back: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a learner with exact sums switches them on for its process."""
    work = Work(str(sized_model(tmp_path / "model", "tiny", "cpu")), "tiny", "cpu", 16, 64)
    seen = list[bool]()

    def timed(self: Work, step: Callable[[], object]) -> dict[str, float]:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return {}

    monkeypatch.setattr(Work, "timed", timed)
    for way in (lambda: padded(work, 256), lambda: ours(work, 256, work.spec(256, exact=False))):
        torch.use_deterministic_algorithms(True)
        way()
    assert seen == [False, False]


def test_figures_are_printed_though_another_part_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is made in a process of its own, too: else its memory would stay taken."""
    begun = list[str]()

    def run(argv: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        begun.append(argv[2].rpartition(".")[2])
        if begun[-1] == "_gpu_learner":
            raise subprocess.TimeoutExpired(argv, 300)
        return subprocess.CompletedProcess(argv, int(begun[-1] == "_gpu_engine"), 'RESULT {"figure": 1}')

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"_gpu_engine ended with exit code 1(.|\n)*_gpu_learner took"):
        gpu.main(quick=True, argv=["--device", "cpu", "--size", "tiny"])
    assert begun == ["_gpu_model", "_gpu_engine", "_gpu_learner", "_gpu_codec"]
    assert '_gpu_codec 4 {"figure": 1}' in capsys.readouterr().out
