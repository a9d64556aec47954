"""What is checked before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.checks import check_context
from schemas.loading import RunFileError
from tests.factories import make_spec


def test_a_model_too_small_for_the_longest_sample_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 24}))
    check_context(make_spec(sampling={"max_tokens": 16, "max_prompt_tokens": 8}), tmp_path)
    with pytest.raises(RunFileError, match=r"= 25, but the model in .* holds 24 tokens"):
        check_context(make_spec(sampling={"max_tokens": 16, "max_prompt_tokens": 9}), tmp_path)
