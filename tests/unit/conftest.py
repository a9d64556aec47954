"""What all unit tests do without."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_disks() -> None:
    """No unit test cuts the power: what a process has written stays, also when it is killed."""
    os.fsync = lambda fd: None
