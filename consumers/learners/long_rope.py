"""Gives all samples of a run the same rotary frequencies, of models that have two sets (longrope: Phi-3).

transformers takes the long ones if any sample of a micro-batch is longer than the model was first trained on:
a sample's logprobs would depend on those beside it. vLLM takes them if any sample of the run may be so long,
and so does the trainer.
"""

from __future__ import annotations

from typing import Any

_KIND = "longrope"


def choose_frequencies(model: Any, longest: int) -> None:
    """Have a model compute as it does for a sample of `longest` tokens, the most that a run may have."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        if getattr(module, "rope_type", None) != _KIND:
            continue
        first_trained_on = module.config.rope_parameters["original_max_position_embeddings"]
        if longest > first_trained_on:
            made, _ = ROPE_INIT_FUNCTIONS[_KIND](module.config, module.inv_freq.device, first_trained_on + 1)
            module.register_buffer("inv_freq", made, persistent=False)
            module.original_inv_freq = made  # which is taken for short samples
