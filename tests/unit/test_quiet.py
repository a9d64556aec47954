"""No command shows the progress bars of a library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from consumers.learners.forward import load_policy
from flows.explain.own_model import OwnModel
from producers.ranker.language_model import LanguageModel
from tests.factories import make_spec, make_tiny_model

LOADERS: dict[str, Callable[[str], object]] = {
    "learner": lambda folder: load_policy(folder, make_spec(), torch.device("cpu")),
    "explain": lambda folder: OwnModel(folder, 1.0),
    "ranker": LanguageModel,
}


@pytest.mark.parametrize("who", LOADERS)
def test_whoever_loads_a_model_shows_no_bar(
    who: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path / "model")
    logging.enable_progress_bar()
    capfd.readouterr()
    LOADERS[who](str(model))
    said = capfd.readouterr()
    assert "Loading" not in said.err + said.out
