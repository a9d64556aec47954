"""Copies of weights stay on a GPU only where they have room beside all that training needs."""

from __future__ import annotations

import pytest
import torch

from consumers.learners.gpu_room import GpuRoom

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "reserved", "peak", "fits"),
    [
        (38, 40, 60, True),  # 80 GiB, of which 2 are taken beside tensors: 3 copies of 2 fit beside 60
        (38, 40, 64, False),  # steps need more than is reserved now
        (30, 40, 60, False),  # another process is there
    ],
)  # fmt: skip
def test_copies_that_fit(
    free: int, reserved: int, peak: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("mem_get_info", (free * GIB, 80 * GIB)), ("memory_reserved", reserved * GIB),
        ("max_memory_reserved", peak * GIB),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    room = GpuRoom(torch.device("cuda"), 3)
    for _ in range(2):
        assert not room.fits(2 * GIB)  # before the first step nobody knows what steps need
    room.stepped()
    assert room.fits(2 * GIB) == fits
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 0 if not fits else 80 * GIB)
    assert room.fits(2 * GIB) == fits  # the answer stays: copies of two places at a time would cost more
