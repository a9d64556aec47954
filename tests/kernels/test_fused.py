"""Fused operations compute what transformers does, forward and backward, and compile for an H100."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from consumers.fused import fused_gate, fused_logprobs, fused_norm, fused_rotation
from tests.triton_kernels import check_compiles, interpreted, print_launches

_MODULES = {"norm": fused_norm, "gate": fused_gate, "rotation": fused_rotation, "logprobs": fused_logprobs}


def _alike(
    fused: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], *operands: torch.Tensor
) -> None:
    """Compare results and gradients."""
    found = []
    for work in (fused, plain):
        mine = [one.clone().requires_grad_(one.is_floating_point()) for one in operands]
        out = work(*mine)
        weights = _drawn(*out.shape, seed=1)
        (out.float() * weights).sum().backward()
        found.append([out.float(), *(one.grad for one in mine if one.requires_grad)])
    near = 2e-2 if operands[0].dtype == torch.bfloat16 else 1e-5
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near * float(other.abs().max()))


def _drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def _types() -> tuple[torch.dtype, torch.dtype]:
    return torch.float32, torch.bfloat16


def norm() -> None:
    """Norms of rows that fill no block, more rows than programs have at a time, and rows apart in memory."""

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (weight * x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        )

    def fused(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fused_norm.rms_norm(x, weight, 1e-6)

    for dtype in _types():
        for shape in ((1, 7, 96), (2, 4500, 5), (3, 2)):
            _alike(fused, plain, _drawn(*shape, dtype=dtype), _drawn(shape[-1], dtype=dtype, seed=2))
    apart = _drawn(4, 6, 8).transpose(0, 1)
    torch.testing.assert_close(fused(apart, _drawn(8)), plain(apart, _drawn(8)))


def gate() -> None:
    """Gates of one and of several blocks."""

    def plain(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(one) * other

    for dtype in _types():
        for shape in ((1, 1), (3, 1000)):
            _alike(fused_gate.gated, plain, *(_drawn(*shape, dtype=dtype, seed=n) for n in range(2)))


def rotation() -> None:
    """Heads as linear layers make them, by tokens; a number that is no power of two; and a small size."""
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    for dtype in _types():
        for heads, size in ((3, 16), (2, 12)):
            angles = _drawn(1, 5, size // 2).repeat(1, 1, 2)
            cos, sin = angles.cos(), angles.sin()

            def fused(x: torch.Tensor, cos: torch.Tensor = cos, sin: torch.Tensor = sin) -> torch.Tensor:
                return fused_rotation.rotated(x.transpose(1, 2), cos, sin)

            def plain(x: torch.Tensor, cos: torch.Tensor = cos, sin: torch.Tensor = sin) -> torch.Tensor:
                return apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)[0]

            _alike(fused, plain, _drawn(1, 5, heads, size, dtype=dtype))


def logprobs() -> None:
    """Logprobs in chunks, with a temperature, and with tokens that have no probability at first."""
    targets = torch.tensor([3, 0, 5000, 7, 1])
    early = torch.tensor([True, True, False, True, True])
    for barred in ((), (0, 3)):
        for dtype in _types():

            def fused(
                states: torch.Tensor, weight: torch.Tensor, barred: tuple[int, ...] = barred
            ) -> torch.Tensor:
                return fused_logprobs.fused_logprobs(
                    states, weight, targets, temperature=0.8, rows=2,
                    barred=torch.tensor(barred, dtype=torch.long), early=early,
                )[0]  # fmt: skip

            def plain(
                states: torch.Tensor, weight: torch.Tensor, barred: tuple[int, ...] = barred
            ) -> torch.Tensor:
                logits = (states @ weight.t()).float() / 0.8
                for token in barred:
                    logits[early & (targets != token), token] = -torch.inf
                return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]

            _alike(fused, plain, _drawn(5, 32, dtype=dtype), _drawn(5001, 32, dtype=dtype, seed=3))
    states, weight = _drawn(5, 32), _drawn(5001, 32, seed=3)
    _, found = fused_logprobs.fused_logprobs(
        states, weight, targets, temperature=1.0, rows=4, barred=torch.empty(0, dtype=torch.long), early=early
    )
    torch.testing.assert_close(found, torch.distributions.Categorical(logits=states @ weight.t()).entropy())


def norm_launches() -> None:
    """Print how the kernels of norms are launched."""
    print_launches(fused_norm, norm)


def gate_launches() -> None:
    """Print how the kernels of gates are launched."""
    print_launches(fused_gate, gate)


def rotation_launches() -> None:
    """Print how the kernel of rotations is launched."""
    print_launches(fused_rotation, rotation)


def logprobs_launches() -> None:
    """Print how the kernels of logprobs are launched."""
    print_launches(fused_logprobs, logprobs)


@pytest.mark.parametrize("work", [norm_launches, gate_launches, rotation_launches, logprobs_launches])
def test_as_transformers_and_compiled_for_an_h100(work: Callable[[], None]) -> None:
    module: ModuleType = _MODULES[work.__name__.removesuffix("_launches")]
    check_compiles(module, interpreted(work))


def model() -> None:
    """A model with fused layers has the same logits and the same gradients; other norms keep their code."""
    from transformers import GemmaConfig, GemmaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from consumers.fused.fused_layers import use_fused_layers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
    for config, made in ((Qwen3Config, Qwen3ForCausalLM), (GemmaConfig, GemmaForCausalLM)):
        torch.manual_seed(0)
        one = made(config(**sizes)).eval()
        tokens = torch.arange(9)[None]
        found = []
        for fused in (False, True):
            if fused:
                use_fused_layers(one)
            one.zero_grad()
            logits = one(input_ids=tokens, use_cache=False).logits
            logits.square().sum().backward()
            found.append([logits, *(weight.grad.clone() for weight in one.parameters())])
        for before, after in zip(*found, strict=True):
            torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-5)
        fused_norms = [
            vars(module).get("forward") for module in one.modules() if "Norm" in type(module).__name__
        ]
        assert len(fused_norms) > 4
        assert all(fused_norms) == (made is Qwen3ForCausalLM)
        assert any("_gated" in str(vars(module).get("forward")) for module in one.modules()) == all(
            fused_norms
        )


def test_a_model_with_fused_layers_computes_the_same() -> None:
    interpreted(model)


def learner() -> None:
    """Logprobs, entropy and a step are those of the ways that have no kernels of their own."""
    import os
    import tempfile
    from pathlib import Path

    import numpy as np

    from consumers.batches.training_rows import TrainingRow
    from consumers.fused.fused_logprobs import takes_head
    from consumers.learners.learner import TorchLearner, unscored
    from consumers.losses.loss import Needs
    from tests.factories import make_sample, make_spec, make_tiny_model
    from tests.training import batches_of, total

    spec = make_spec(sampling={"temperature": 0.7, "min_tokens": 3}, trainer={"logits_chunk": 16})
    rows = [TrainingRow(make_sample(spec, n // 4, n % 4, length=4 + n), n // 4, n % 4) for n in range(8)]
    found = []
    with tempfile.TemporaryDirectory() as folder, torch.device("cpu"):
        model = str(make_tiny_model(Path(folder), width=32))
        for fused in (False, True):
            os.environ["STREAMRL_FUSED"] = "" if fused else "off"
            one = TorchLearner(model, spec)
            assert takes_head(one._model.lm_head, torch.zeros(1)) == fused
            scores = one.ask(unscored(rows, one.loss), Needs(before="step")).before
            stats = one.accumulate(batches_of(spec, rows))
            norm = one.step(total(rows, spec)).norm
            entropy, tokens = sum(one.entropy for one in stats), sum(one.entropy_tokens for one in stats)
            found.append([scores, np.array([entropy, tokens, norm])])
    for plain, kernels in zip(*found, strict=True):
        np.testing.assert_allclose(kernels, plain, rtol=1e-4, atol=1e-5)
    assert tokens > 0


def test_a_learner_with_kernels_computes_the_same() -> None:
    interpreted(learner)


def tried_model() -> None:
    """Weights of layers that were only tried are given back at once, not when garbage is looked for."""
    import gc
    import tempfile
    from pathlib import Path

    from consumers.learners.sharded_loading import without_weights
    from tests.factories import make_spec, make_tiny_model

    with tempfile.TemporaryDirectory() as folder, torch.device("cpu"):
        make_tiny_model(Path(folder), width=128)
        gc.collect()
        gc.disable()
        model = without_weights(folder, make_spec(model={"dtype": "bfloat16"}), torch.device("cpu"))
    assert any("_gated" in str(vars(module).get("forward")) for module in model.modules())
    there = [one for one in gc.get_objects() if isinstance(one, torch.nn.Parameter) and not one.is_meta]
    assert there == []


def test_layers_that_were_only_tried_leave_nothing() -> None:
    interpreted(tried_model)
