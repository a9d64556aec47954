"""vLLM is told of a longer query where FlashAttention has two kernels; here by stand-ins for vLLM."""

from __future__ import annotations

import ast
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flows.run.inspection.architectures import source_of
from producers.engines.prefill_bits import prefills_keep_bits, use_one_kernel

BACKENDS = "vllm.v1.attention.backends"


@pytest.mark.parametrize(
    ("size", "queries", "keys", "given", "expected"),
    [(64, 14, 2, 1, 10), (64, 14, 2, 300, 300), (32, 8, 8, 1, 65), (128, 12, 2, 1, 1)],
)
def test_a_step_is_told_of_a_longer_query(
    size: int, queries: int, keys: int, given: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Builder:
        headdim, num_heads_q, num_heads_kv = size, queries, keys

        def build(self, *_: Any) -> Any:
            return SimpleNamespace(max_query_len=given)

    there = ModuleType("flash_attn")
    there.FlashAttentionMetadataBuilder = Builder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"{BACKENDS}.flash_attn", there)
    for _ in range(2):
        use_one_kernel()
        assert Builder().build(0, "metadata").max_query_len == expected


@pytest.mark.parametrize(
    ("names", "version", "size", "expected"),
    [
        (["FLASH_ATTN"], 3, 64, True),
        (["FLASH_ATTN"], 3, 128, True),
        (["FLASH_ATTN"], 3, 96, False),
        (["TRITON_ATTN"], None, 256, False),
        (["FLASH_ATTN"], 2, 64, False),
        (["TRITON_ATTN"], None, 64, True),
        (["FLASH_ATTN", "TRITON_ATTN"], 3, 64, True),
        (["FLASHINFER"], 3, 64, False),
        ([], 3, 64, False),
    ],
)
def test_bits_are_kept_where_that_was_seen(
    names: list[str], version: int | None, size: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ModuleType("fa_utils")
    there.get_flash_attn_version = lambda: version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"{BACKENDS}.fa_utils", there)
    groups = [SimpleNamespace(backend=SimpleNamespace(get_name=lambda name=name: name)) for name in names]
    model = SimpleNamespace(get_head_size=lambda: size)
    assert prefills_keep_bits(SimpleNamespace(attn_groups=[groups], model_config=model)) == expected


def test_the_installed_vllm_has_the_parts_that_are_changed() -> None:
    classes = {
        one.name: one
        for one in source_of("vllm", "v1/attention/backends/flash_attn.py").body
        if isinstance(one, ast.ClassDef)
    }
    builder, made = classes["FlashAttentionMetadataBuilder"], classes["FlashAttentionMetadata"]
    build = next(one for one in builder.body if isinstance(one, ast.FunctionDef) and one.name == "build")
    assert ast.unparse(build.returns or build) == "FlashAttentionMetadata"
    assert "max_query_len: int" in map(ast.unparse, made.body)
    code = ast.unparse(builder)
    assert all(f"self.{name} = " in code for name in ("headdim", "num_heads_q", "num_heads_kv"))
    # A schedule would be made before `build` ends, for the length that it was not told yet.
    assert "aot_schedule = self.aot_schedule and (not fast_build) and (not envs.VLLM_BATCH_INVARIANT)" in code
