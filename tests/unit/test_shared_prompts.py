"""When an engine's samples share what was computed of their prompt. tests/integration has vLLM itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.run.checks import check_context, problems_of
from producers.engines.engine import EngineError
from producers.engines.shared_prompts import SharedPrompts, sharing_asked
from schemas.loading import RunFileError
from tests.factories import make_spec, make_tiny_mixture


@pytest.mark.parametrize(
    ("wanted", "invariant", "routed", "expected"),
    [
        (None, True, False, None), (None, False, False, False), (None, True, True, False),
        (True, True, False, True), (True, False, False, True), (False, True, False, False),
        (False, True, True, False),
    ],
)  # fmt: skip
def test_vllm_is_asked_for_it_where_it_may_be_used(
    wanted: bool | None, invariant: bool, routed: bool, expected: bool | None
) -> None:
    assert sharing_asked(wanted, invariant=invariant, routed=routed) is expected


def test_samples_whose_routes_are_recorded_can_not_share() -> None:
    words = r"generator\.prefix_caching: .*set model\.follow_routes: false"
    with pytest.raises(EngineError, match=words) as caught:
        sharing_asked(True, invariant=True, routed=True)
    assert caught.value.lasting


def test_that_is_said_before_the_start(tmp_path: Path) -> None:
    mixture = {"path": str(make_tiny_mixture(tmp_path / "mixture", "qwen3_moe"))}
    sharing = {"prefix_caching": True}
    (problem,) = [
        one for one in problems_of(make_spec(model=mixture, generator=sharing)) if "prefix_caching" in one
    ]
    assert "lack the routes" in problem
    with pytest.raises(RunFileError, match="lack the routes"):  # of a model that was not there before
        check_context(make_spec(model=mixture, generator=sharing), Path(mixture["path"]))
    for others in ({"model": mixture}, {"model": mixture | {"follow_routes": False}, "generator": sharing}):
        assert not [one for one in problems_of(make_spec(**others)) if "prefix_caching" in one]


def engine(has: bool) -> Any:
    return SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=has))
    )


def scheduler() -> Any:
    return SimpleNamespace(kv_cache_manager=SimpleNamespace(log_stats=False), requests={})


@pytest.mark.parametrize(
    ("wanted", "has", "keeps_bits", "on"),
    [
        (None, True, True, True), (None, True, False, False), (None, False, True, False),
        (True, True, False, True), (False, False, True, False),
    ],
)  # fmt: skip
def test_samples_share_where_bits_stay_the_same_or_where_it_is_said(
    wanted: bool | None, has: bool, keeps_bits: bool, on: bool
) -> None:
    assert SharedPrompts(engine(has), scheduler(), wanted, keeps_bits).on is on


def test_a_model_whose_prompts_vllm_can_not_keep_is_refused() -> None:
    with pytest.raises(EngineError, match=r"generator\.prefix_caching: .*Leave it out"):
        SharedPrompts(engine(False), scheduler(), True, keeps_bits=True)
