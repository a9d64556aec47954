"""Every reader of foreign bytes, 2,000 mutated inputs each: only errors that explain themselves.

`python -m tests.bench fuzz` does the same with 100,000.
"""

from __future__ import annotations

import pytest

from tests.bench._fuzz_targets import Target, targets
from tests.bench.fuzz import fuzz

INPUTS = 2_000
PEAK = 128 << 20  # bytes


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_only_explained_errors(target: Target) -> None:
    found = fuzz(target, INPUTS)
    assert not found.others, found.others.most_common(3)
    assert found.taken + found.explained == INPUTS
    assert found.peak < PEAK
