"""Activations whose bits don't depend on the rows that are computed with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from producers.engines.cpu_activations import Functions, use_vectors_in

OURS = Functions()
ROWS = 333


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


def noise(width: int) -> torch.Tensor:
    return 3 * torch.randn(ROWS, 2 * width, generator=torch.Generator().manual_seed(width))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["silu", "gelu", "sigmoid"])
@pytest.mark.parametrize("width", [1, 72, 200, 4864])
@pytest.mark.parametrize("whole", [True, False])
def test_a_row_has_the_bits_that_it_has_alone(
    name: str, width: int, dtype: torch.dtype, *, whole: bool
) -> None:
    x = noise(width).to(dtype)[:, :width]  # a gate that lies beside what it is multiplied by
    x = x.contiguous() if whole else x
    made = getattr(OURS, name)(x)
    alone = torch.cat([getattr(OURS, name)(row) for row in x.split(1)])
    assert made.is_contiguous() and torch.equal(made, alone)
    plain = getattr(torch if name == "sigmoid" else functional, name)
    torch.testing.assert_close(made, plain(x), atol=2e-6 if dtype is torch.float32 else 0.02, rtol=0)


def test_without_it_bits_depend_on_other_rows() -> None:
    """Here, too: a test that could not fail would show nothing."""
    x = noise(1)[:, :1].contiguous()
    assert not torch.equal(torch.sigmoid(x), torch.cat([torch.sigmoid(row) for row in x.split(1)]))


def test_layers_of_torch_compute_that_way() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.SiLU(), torch.nn.GELU(approximate="tanh"))
    use_vectors_in(model)
    changed = model[1].forward
    use_vectors_in(model)
    assert model[1].forward is changed
    x = noise(1)[:, :1].contiguous()
    assert torch.equal(model[1](x), OURS.silu(x))
    assert torch.equal(model[2](x), OURS.gelu(x, approximate="tanh"))
    assert torch.equal(OURS.relu(x), functional.relu(x))
