"""Hashes of weights: one per tensor, one root over all. The same of torch's tensors and of a file's bytes.

torch is imported where there are tensors: who only checks a file does without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from mmap import mmap
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    import torch

# safetensors' names of types, and ours
_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip


def tensor_digest(tensor: torch.Tensor) -> str:
    """Hash of dtype, shape and bits."""
    import torch

    plain = tensor.detach().to("cpu").contiguous()
    bits = plain.view(-1).view(torch.uint8).numpy()
    return _digest(str(plain.dtype).removeprefix("torch."), plain.shape, memoryview(bits))


def _digest(dtype: str, shape: Iterable[int], bits: memoryview) -> str:
    return blake3(f"{dtype}{list(shape)}".encode() + b"\0").update(bits).hexdigest(16)


def root_digest(digests: Mapping[str, str]) -> str:
    """Hash of all names and hashes, in the order of names."""
    whole = blake3()
    for name in sorted(digests):
        whole.update(f"{name}={digests[name]}\n".encode())
    return whole.hexdigest(16)


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Hash of each tensor."""
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def file_digests(data: bytes | bytearray | mmap) -> dict[str, str]:
    """Hash of each tensor in a safetensors file. ValueError if it isn't one."""
    size = int.from_bytes(data[:8], "little")
    body = memoryview(data)[8 + size :]
    found = {}
    try:
        header = json.loads(data[8 : 8 + size])
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            if not 0 <= begin <= end <= len(body):
                raise ValueError(f"{name} lies outside the file")
            found[name] = _digest(_NAMES[tensor["dtype"]], tensor["shape"], body[begin:end])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is damaged: {error!r}") from error
    return found
