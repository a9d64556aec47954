"""Configs of models: bounded, and numbers only where they make sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import model_config
from infra.model_config import count_in, read_config


def test_a_config_is_an_object_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(OSError):
        read_config(tmp_path)
    for text, message in (
        ("[1]", "no JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "Expecting"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(tmp_path)
    file.write_text('{"num_experts": 8}')
    assert read_config(tmp_path) == {"num_experts": 8}
    monkeypatch.setattr(model_config, "_LARGEST", 17)
    with pytest.raises(ValueError, match="more than 17 bytes"):
        read_config(tmp_path)


def test_the_first_number_that_makes_sense_counts() -> None:
    config = {"a": "8", "b": True, "c": 0, "d": 1 << 16, "e": 4, "f": 5}
    assert count_in(config, *"abcdef") == 4
    assert count_in(config, *"abcd") == 0
