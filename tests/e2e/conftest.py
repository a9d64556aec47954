"""What whole runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.factories import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))
