"""Every Triton kernel compiles for an H100 as models of 7, 32 and 72 billion weights launch it.

Production's own code launches them, on tensors without memory. Of shapes, Triton sees sizes of blocks,
whether a number is a multiple of 16, and whether it is above 2^31.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch

from consumers.fused import fused_gate, fused_logprobs, fused_norm, fused_rotation
from consumers.learners import fixed_point_gpu
from infra.weights import four_bits_gpu
from infra.weights.codec import gpu_kernels
from infra.weights.four_bits import BLOCK_WEIGHTS
from producers.engines import gpu_draw
from tests.kernels.test_codec_gpu import launches as codec_launches
from tests.triton_kernels import check_compiles, interpreted, kernels_in, launches_at

ROOT = Path(__file__).parents[2]
# Of Qwen2.5's 7B, 32B and 72B: width, width between gate and down, heads.
MODELS = ((3584, 18_944, 28), (5120, 27_648, 40), (8192, 29_568, 64))
HEAD, VOCABULARY, WEIGHTS = 128, 152_064, 7_615_616_512
TOKENS, LONGEST = 16_384, 131_072  # of a micro-batch; of the longest sequence, alone in one


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cpu")


def both_ways(
    work: Callable[..., torch.Tensor], *, made: Sequence[tuple[int, ...]] = (),
    kept: Sequence[tuple[int, ...]] = (),
) -> None:  # fmt: skip
    """Go forward and backward, as `model.dtype` float32 and bfloat16 have it.

    `made`: shapes of what linear layers make, in bf16 then. `kept`: of what is in fp32 either way.
    """
    for dtype, mixed in (
        (torch.float32, nullcontext()),
        (torch.bfloat16, torch.autocast("cpu", torch.bfloat16)),
    ):
        operands = [*(empty(*one, dtype=dtype) for one in made), *(empty(*one) for one in kept)]
        with mixed:
            out = work(*(one.requires_grad_() for one in operands))
        out.sum().backward()


def norms() -> None:
    for width, *_ in MODELS:
        both_ways(lambda x, weight: fused_norm.rms_norm(x, weight, 1e-6), kept=[(1, TOKENS, width), (width,)])


def gates() -> None:
    for _, width, _ in MODELS:
        for tokens in (TOKENS, LONGEST):
            both_ways(fused_gate.gated, made=[(1, tokens, width)] * 2)


def rotations() -> None:
    for _, _, heads in MODELS:
        both_ways(
            lambda x, cos, sin: fused_rotation.rotated(x.transpose(1, 2), cos, sin),
            made=[(1, TOKENS, heads, HEAD)], kept=[(1, TOKENS, HEAD)] * 2,
        )  # fmt: skip


def logprobs() -> None:
    def fused(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        targets, early = empty(TOKENS, dtype=torch.int64), empty(TOKENS, dtype=torch.bool)
        return fused_logprobs.fused_logprobs(
            states, weight, targets, temperature=1.0, rows=8192, barred=targets[:0], early=early
        )[0]

    width = MODELS[-1][0]
    both_ways(fused, made=[(TOKENS, width)], kept=[(VOCABULARY, width)])


def draws() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        gpu_draw.drawn_there(empty(256, VOCABULARY, dtype=dtype), empty(256, dtype=torch.float64))


def sums() -> None:
    """Add up all gradients of a model, of its critic, and as many as one rank of eight has."""
    for size in (WEIGHTS, WEIGHTS + MODELS[-1][0] + 1, WEIGHTS // 8):
        fixed_point_gpu.add_and_clear_there(empty(size), empty(size, dtype=torch.int64), 2.0**32)


def four_bits() -> None:
    size = VOCABULARY * MODELS[-1][0]
    codes, largest = empty(size // 2, dtype=torch.uint8), empty(size // BLOCK_WEIGHTS, dtype=torch.bfloat16)
    four_bits_gpu.whole_there(codes, largest, empty(16), size, BLOCK_WEIGHTS)


# The modules with kernels, and what launches them all. The codec's go by data, which has to be there: in
# blocks of one size, of runs whose indexes fit into 32 bits.
LAUNCHES: dict[ModuleType, Callable[[], object]] = {
    fused_norm: norms, fused_gate: gates, fused_rotation: rotations, fused_logprobs: logprobs,
    gpu_draw: draws, fixed_point_gpu: sums, four_bits_gpu: four_bits, gpu_kernels: codec_launches,
}  # fmt: skip


def test_every_file_with_kernels_is_compiled() -> None:
    rooms = ("schemas", "infra", "producers", "consumers", "flows")
    found = {file for room in rooms for file in (ROOT / room).rglob("*.py") if kernels_in(file)}
    assert found == {Path(str(module.__file__)) for module in LAUNCHES}


@pytest.mark.parametrize("module", LAUNCHES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_kernels_compile_for_an_h100(module: ModuleType) -> None:
    work = LAUNCHES[module]
    check_compiles(module, interpreted(work) if work is codec_launches else launches_at(module, work))


def test_kernels_are_compiled_for_so_many_warps_as_they_are_launched_with() -> None:
    """Of one warp, the registers do not hold a row of 8,192."""
    said = json.loads(launches_at(fused_norm, norms))
    fewer = [(name, given, named | {"num_warps": 1}) for name, given, named in said]
    with pytest.raises(AssertionError, match=r"registers are spilled.*'block': 'constexpr'.*'num_warps': 1"):
        check_compiles(fused_norm, json.dumps(fewer))


def test_large_numbers_are_compiled_in_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(
        "triton.compiler.compile", lambda source, **_: compiled.append(source.signature["size"])
    )
    monkeypatch.setattr("tests.triton_kernels._check_fits", lambda *_: None)
    kernel = fixed_point_gpu.add_kernel
    check_compiles(fixed_point_gpu, launches_at(fixed_point_gpu, sums))
    assert set(compiled) == {"i64", "i32"}
    assert fixed_point_gpu.add_kernel is kernel, "it is no longer written down"
