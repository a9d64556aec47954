"""As for unit tests."""

from tests.unit.conftest import _no_waiting_for_disks

__all__ = ["_no_waiting_for_disks"]
