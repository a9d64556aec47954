"""`generator.quantization` in a run file: what it needs, and what it does not go with."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from consumers.steps.telling import gap_is_too_wide, largest_gap
from flows.run.checks import problems_of
from tests.factories import make_spec, make_tiny_mixture, make_tiny_model

CORRECTED = {"correction": "truncated", "correct_fresh": True}


def test_weights_are_plain_by_default() -> None:
    assert make_spec().generator.eight_bits == ""
    assert make_spec(generator={"quantization": "none"}).generator.eight_bits == ""
    assert make_spec(generator={"quantization": "int8"}, loss=CORRECTED).generator.eight_bits == "int8"


@pytest.mark.parametrize(
    "loss", [{}, {"correction": "truncated"}, {"kind": "cispo"}, {"kind": "rloo"}, {"kind": "ppo"}]
)
def test_a_loss_that_would_take_the_samples_for_the_trainer_s_own_is_refused(loss: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"generator\.quantization int8.*set loss\.correction: trunc"):
        make_spec(generator={"quantization": "int8"}, loss=loss)


@pytest.mark.parametrize(
    "loss",
    [
        CORRECTED, {**CORRECTED, "correction": "decoupled"}, {**CORRECTED, "kind": "rloo"}, {"kind": "tb"},
        {**CORRECTED, "kind": "gspo"},
    ],
)  # fmt: skip
def test_a_loss_that_corrects_for_it_is_taken(loss: dict[str, Any]) -> None:
    assert make_spec(generator={"quantization": "fp8"}, loss=loss).generator.eight_bits == "fp8"


def test_a_recorded_run_is_trained_by_any_loss() -> None:
    offline = {"mode": "offline", "recorded": "r-1"}
    assert make_spec(generator={"quantization": "fp8"}, algorithm=offline).generator.eight_bits == "fp8"


def test_servers_have_no_such_setting() -> None:
    served = {"engine": "served", "urls": ["http://127.0.0.1:8000"], "quantization": "int8"}
    with pytest.raises(ValidationError, match="served has no quantization; it has"):
        make_spec(generator=served, loss=CORRECTED)


def test_other_ways_are_named() -> None:
    with pytest.raises(ValidationError, match="'none', 'int8' or 'fp8'"):
        make_spec(generator={"quantization": "int4"}, loss=CORRECTED)


def test_on_gpus_the_rest_of_the_model_must_be_bfloat16(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, generator = str(make_tiny_model(tmp_path / "model")), {"quantization": "fp8"}
    monkeypatch.setattr("flows.run.checks.visible_gpus", lambda: ["0"])
    for dtype, wrong in (("float32", True), ("bfloat16", False)):
        model = {"path": path, "dtype": dtype}
        said = problems_of(make_spec(generator=generator, loss=CORRECTED, model=model))
        assert any("on GPUs generator.quantization needs bfloat16" in one for one in said) is wrong


def test_a_mixture_of_experts_is_refused_before_the_start(tmp_path: Any) -> None:
    mixture = make_tiny_mixture(tmp_path / "mixture", "qwen3_moe")
    generator = {"quantization": "int8"}
    spec = make_spec(model={"path": str(mixture)}, generator=generator, loss=CORRECTED)
    (problem,) = [one for one in problems_of(spec) if "quantization" in one]
    assert problem.startswith("generator.quantization: ") and "mixture of experts" in problem
    plain = make_spec(
        model={"path": str(make_tiny_model(tmp_path / "model"))}, generator=generator, loss=CORRECTED
    )
    assert not [one for one in problems_of(plain) if "quantization" in one]


def test_rounded_weights_may_be_farther_from_the_trainer_s() -> None:
    plain, rounded = make_spec(), make_spec(generator={"quantization": "int8"}, loss=CORRECTED)
    assert largest_gap(rounded) > largest_gap(make_spec(model={"dtype": "bfloat16"})) > largest_gap(plain)
    metrics = {"gap_tokens": 5.0, "logprob_gap": 1.0}
    assert gap_is_too_wide(metrics, plain) and not gap_is_too_wide(metrics, rounded)
    assert gap_is_too_wide({**metrics, "logprob_gap": 20.0}, rounded)
    assert not gap_is_too_wide({"gap_tokens": 0.0, "logprob_gap": 20.0}, rounded)
