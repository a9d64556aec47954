"""Hashes tensors that lie on a GPU, and checks there that they are finite: the same hashes as in main memory.

tensor ──► finite? (there)
   └─────► piece ──► pinned memory ──► hash      several threads, each with a stream of its own
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from infra.weights import spent
from infra.weights.digest import TensorHash
from infra.weights.gpu_bits import GpuBits, device_of, gpu_bits_of
from infra.weights.gpu_transfer import downloaded, own_stream, settled

_PIECE = 8 << 20  # bytes: a transfer takes far longer than to start it, and pinned memory stays small


def inspected_there(tensors: Mapping[str, torch.Tensor], threads: int) -> dict[str, tuple[str, bool]]:
    """Return each tensor's hash, and whether it is finite, by name. All lie on one GPU."""
    model = {name: gpu_bits_of(tensor) for name, tensor in tensors.items()}
    if not model:
        return {}
    settled(device_of(model))
    order = sorted(model, key=lambda name: -model[name].nbytes)  # largest first: threads end together
    with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
        found = dict(zip(order, pool.map(lambda name: _inspect(model[name]), order), strict=True))
    return {name: found[name] for name in tensors}


@spent.counted()
def _inspect(bits: GpuBits) -> tuple[str, bool]:
    with own_stream(bits.tensor.device):
        hashed = TensorHash(bits.dtype, bits.shape)
        for piece in bits.tensor.view(torch.uint8).split(_PIECE):
            hashed.update(downloaded(piece)[0].data)
        return hashed.hexdigest(), bits.finite()
