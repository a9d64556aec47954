"""The digest that is computed on a GPU: of all bits and of their order, however they are cut into tensors."""

from __future__ import annotations

import torch

from tests.triton_kernels import interpreted


def digests() -> None:
    """Digests of vectors that fill several blocks, and of ones that fill none."""
    from consumers.learners import fingerprint_gpu

    def digest_there(*parts: torch.Tensor) -> int:
        size = sum(part.nbytes for part in parts)
        return fingerprint_gpu.digest_there(iter(parts), size, parts[0].device)

    vector = torch.randn(70_001, generator=torch.Generator().manual_seed(0))
    expected = digest_there(vector)
    assert digest_there(*vector.split(999)) == expected
    for staged, few in ((4096, 1 << 20), (1 << 20, 512)):
        fingerprint_gpu._STAGED, fingerprint_gpu._FEW = staged, few
        found = digest_there(vector)
        assert (found == expected) == (few == 1 << 20)
    found = {digest_there(vector[:n]) for n in (0, 1, 2, 255, 256, 257, 70_000)} | {found}
    for place in (0, 7, 300, 69_999):
        other = vector.clone()
        other[place] = torch.nextafter(other[place], torch.tensor(9.0))
        found.add(digest_there(other))
    found.add(digest_there(vector.flip(0)))
    found.add(digest_there(torch.cat([vector, torch.zeros(1)])))
    assert len(found) == 14


def test_digests_of_vectors_on_a_gpu() -> None:
    interpreted(digests)
