"""A language model as the ranker's backbone: it gives the mean of its last hidden states over the prompt.

The model is not trained: the ranker's network learns which numbers matter. Each prompt is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from producers.ranker.ranker import Question
from producers.ranker.states import RankerError, backbone_name

_TOKENS = 512  # from the prompt's end, as many as the ranker keeps: the question mostly comes last
_AT_ONCE = 16


class LanguageModel:
    """A Hugging Face model in a folder: the run's own, or another with the same tokenizer."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModel

        if not Path(folder).is_dir():
            raise RankerError(f"lengths.backbone: {folder} is not a folder with a Hugging Face model")
        try:
            model = AutoModel.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
        except Exception as error:  # transformers raises whatever it met
            raise RankerError(f"lengths.backbone: {folder} can't be loaded: {error}") from error
        self._torch, self._model = torch, model.eval()
        self._vocabulary = int(model.config.vocab_size)
        self.width = int(model.config.hidden_size)
        self.name = backbone_name(folder)
        self._read: dict[int, np.ndarray] = {}

    def of(self, prompts: Sequence[Question]) -> np.ndarray:
        fresh = {prompt.key: prompt for prompt in prompts if prompt.key not in self._read}
        # prompts of like length together, so that little of a batch is padding
        ordered = sorted(fresh.values(), key=lambda prompt: len(prompt.tokens))
        for start in range(0, len(ordered), _AT_ONCE):
            some = ordered[start : start + _AT_ONCE]
            for prompt, row in zip(some, self._hidden([p.text[-_TOKENS:] for p in some]), strict=True):
                self._read[prompt.key] = row
        return np.stack([self._read[prompt.key] for prompt in prompts])

    def _hidden(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        torch = self._torch
        longest = max(len(prompt) for prompt in prompts)
        tokens = torch.zeros((len(prompts), longest), dtype=torch.long)
        there = torch.zeros((len(prompts), longest), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            if len(prompt) and int(prompt.max()) >= self._vocabulary:
                raise RankerError(
                    f"lengths.backbone: {self.name} has a vocabulary of {self._vocabulary}, and a prompt has "
                    f"token {int(prompt.max())}: give a model with the run's tokenizer"
                )
            tokens[row, : len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
            there[row, : len(prompt)] = 1
        with torch.inference_mode():
            hidden = self._model(input_ids=tokens, attention_mask=there).last_hidden_state
        share = there / there.sum(1, keepdim=True).clamp(min=1)
        mean = (hidden * share[:, :, None]).sum(1)
        size = mean.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)
        return (mean / size).numpy().astype(np.float32)
