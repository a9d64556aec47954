"""What stands before tensors that go from one stretch of layers to the next: always as many bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from producers.engines.engine import EngineError
from producers.engines.stretch_links import _header, _said_in

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
KINDS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SHAPES = st.lists(st.integers(0, 1 << 18), max_size=3)


@given(st.dictionaries(NAMES, st.tuples(KINDS, SHAPES), max_size=4))
def test_names_dtypes_and_shapes_arrive(given_tensors: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    tensors = {
        name: torch.empty(shape, dtype=kind, device="meta") for name, (kind, shape) in given_tensors.items()
    }
    header = _header(tensors)
    assert (header.shape, header.dtype) == ((1024,), torch.uint8)
    assert {name: (dtype, shape) for name, dtype, shape in _said_in(header)} == {
        name: (str(kind).removeprefix("torch."), shape) for name, (kind, shape) in given_tensors.items()
    }


def test_more_tensors_than_have_room_are_refused() -> None:
    with pytest.raises(EngineError, match="100 tensors"):
        _header({f"a tensor with a long name {number}": torch.zeros(1) for number in range(100)})
