"""ZeRO on a GPU, with one rank over NCCL: it steps as torch does, and its moments lie where they shall."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from consumers.learners.host_moments import MOMENTS
from consumers.learners.learner import Learner
from tests.factories import make_tiny_model
from tests.integration.test_ranks import DTYPES, Straight, apart, learning, masters, spec_of
from tests.training import train

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
NEAR = 1e-2  # a part of how far weights moved; DeepSpeed adds gradients of micro-batches as floats


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), width=320))


@pytest.fixture(scope="module")
def straight(model: str) -> dict[str, Straight]:
    """By dtype; computed before this process is a rank."""
    return {dtype: Straight(model, spec_of(dtype)) for dtype in DTYPES}


def moments_lie_on(learner: Any) -> set[str]:
    """The kinds of devices that hold the optimizer's moments."""
    states = learner._local._adam.state.values()
    return {state[key].device.type for state in states for key in MOMENTS}


def check_third(learner: Learner, expected: Straight, floor: float = 0.0) -> None:
    """Compare three steps; `floor`: a distance that is near in any case."""
    moved = apart(expected.third, expected.start)
    assert apart(masters(learner), expected.third) < max(NEAR * moved, floor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("stage", "offloaded"), [(1, False), (1, True), (3, False), (3, True)])
def test_zero_steps_as_torch_does(
    model: str, straight: dict[str, Straight], stage: int, offloaded: bool, dtype: str
) -> None:
    """And goes on from the state of torch; moments lie on the GPU, or in main memory if that is said."""
    expected, rough = straight[dtype], dtype == "bfloat16"
    rounding = apart(straight["bfloat16"].third, straight["float32"].third) if rough else 0.0
    spec = spec_of(dtype, learner="deepspeed", zero_stage=stage, offload_optimizer=offloaded)
    near = 5e-2 if rough else 1e-3
    with learning(model, spec) as learner:
        assert train(learner, spec, 3) == pytest.approx(expected.norms[:3], rel=near)
        check_third(learner, expected, 0.5 * rounding)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        assert moments_lie_on(learner) == {"cpu" if offloaded else device}
        published = learner.weights()
        assert {tensor.dtype for tensor in published.values()} == {getattr(torch, dtype)}
        assert learner.made().root
        learner.restore(expected.state)
        assert all(torch.equal(one, expected.state[name]) for name, one in masters(learner).items())
        (norm,) = train(learner, spec, 1)
        assert norm == pytest.approx(expected.norms[3], rel=near)
