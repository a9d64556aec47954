"""Tests that need a GPU: `pytest -m gpu` runs them where there is one, and skips them elsewhere."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
