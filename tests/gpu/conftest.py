"""Tests that need a GPU: `pytest -m gpu` runs them where there is one, and skips them elsewhere."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture(autouse=True)
def as_in_a_process_of_its_own() -> None:
    """A learner before, with exact sums, switched on what makes them; torch refuses some sums then."""
    torch.use_deterministic_algorithms(False)
