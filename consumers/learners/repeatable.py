"""Makes sums on a GPU repeatable: by default its kernels add in the order in which their threads come.

With exact sums (`trainer.exact_sums`) micro-batches may be added up in any order. That helps only if a
micro-batch's own gradient has the same bits each time that it is computed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from infra.errors import Explained

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads it when it is first used
_REPEATABLE = (":4096:8", ":16:8")  # with any other workspace torch refuses cuBLAS


class NotRepeatable(Explained):
    """The model has an operation that no GPU computes with the same bits each time."""

    lasting = True


def repeat_sums(device: torch.device) -> None:
    """Have torch compute with the same bits each time, from now on in this process."""
    if device.type != "cuda":
        return  # on a CPU it does
    if os.environ.get(_WORKSPACE) not in _REPEATABLE:
        os.environ[_WORKSPACE] = _REPEATABLE[0]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # finds errors of ours, and takes time


@contextmanager
def named_if_not_repeatable() -> Iterator[None]:
    """Turn torch's refusal into an error that names the setting."""
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        raise NotRepeatable(
            f"trainer.exact_sums needs repeatable sums, and the model has one that is not ({error}): set "
            "trainer.exact_sums to false"
        ) from error
