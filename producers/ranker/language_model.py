"""A language model as the ranker's backbone: it gives the mean of its last hidden states over the prompt.

The model is not trained: the ranker's network learns which numbers matter. Prompts go through it in batches
of a few fixed shapes. So a prompt's numbers have the same bits in any company, and a feeder that starts again
ranks the same. The numbers of the newest prompts are kept.

It runs on the CPU, since a generator on this machine may have taken the GPU's memory. STREAMRL_DEVICE=cuda
says that there is room for both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from infra import choices
from infra.quiet import no_model_bars
from producers.ranker.ranker import Question
from producers.ranker.states import RankerError, backbone_name

_TOKENS = 512  # from the prompt's end, as many as the ranker keeps: the question mostly comes last
_SHORTEST = 16  # tokens of the narrowest batch; the others are twice as wide, four times, and so on
_BATCH_TOKENS = {"cpu": 512, "cuda": 16384}  # of each batch, whatever its shape: a CPU is busy with few
_KEPT_BYTES = 1 << 27


class LanguageModel:
    """A Hugging Face model in a folder: the run's own, or another with the same tokenizer."""

    def __init__(self, folder: str, read: Callable[[int], None] = lambda count: None) -> None:
        """`read`: called with the number of prompts after each batch of them, which can take minutes."""
        import torch
        from transformers import AutoModel

        if not Path(folder).is_dir():
            raise RankerError(f"lengths.backbone: {folder} is not a folder with a Hugging Face model")
        no_model_bars()
        self.device = "cuda" if choices.DEVICE.forced() == "cuda" and choices.cuda() else "cpu"
        try:
            model = AutoModel.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
        except Exception as error:  # transformers raises whatever it met
            raise RankerError(f"lengths.backbone: {folder} can't be loaded: {error}") from error
        self._read = read
        self._torch, self._model = torch, model.eval().to(self.device)
        self._vocabulary = int(model.config.vocab_size)
        self._longest = min(_TOKENS, int(getattr(model.config, "max_position_embeddings", _TOKENS)))
        self.width = int(model.config.hidden_size)
        self.name = backbone_name(folder)
        self._most_kept = _KEPT_BYTES // (4 * self.width)
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()  # by prompt; used last, stands last

    def of(self, prompts: Sequence[Question]) -> np.ndarray:
        found = np.zeros((len(prompts), self.width), np.float32)
        fresh: dict[int, list[int]] = {}  # places by prompt: one may be asked for twice
        for place, prompt in enumerate(prompts):
            row = self._kept.get(prompt.key)
            if row is None:
                fresh.setdefault(prompt.key, []).append(place)
            else:
                self._kept.move_to_end(prompt.key)
                found[place] = row
        by_width: dict[int, list[int]] = {}
        for places in fresh.values():
            by_width.setdefault(self._width_for(prompts[places[0]]), []).append(places[0])
        for width, firsts in by_width.items():
            rows = max(1, _BATCH_TOKENS[self.device] // width)
            for start in range(0, len(firsts), rows):
                some = [prompts[place] for place in firsts[start : start + rows]]
                for prompt, row in zip(some, self._hidden(some, rows, width), strict=True):
                    found[fresh[prompt.key]] = row
                    self._kept[prompt.key] = row
                self._read(len(some))
        while len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)
        return found

    def _width_for(self, prompt: Question) -> int:
        width = _SHORTEST
        while width < min(len(prompt.text), self._longest):
            width *= 2
        return min(width, self._longest)

    def _hidden(self, prompts: Sequence[Question], rows: int, width: int) -> np.ndarray:
        """Read prompts as a batch of this shape; unused rows are padding."""
        torch = self._torch
        tokens = torch.zeros((rows, width), dtype=torch.long)
        there = torch.zeros((rows, width), dtype=torch.long)
        there[:, 0] = 1  # a row without any token would divide by zero
        for row, prompt in enumerate(prompts):
            text = prompt.text[-self._longest :]
            if len(text) and not 0 <= int(text.min()) <= int(text.max()) < self._vocabulary:
                raise RankerError(
                    f"lengths.backbone: {self.name} has a vocabulary of {self._vocabulary}, and a prompt has "
                    f"token {int(text.max())}: give a model with the run's tokenizer"
                )
            tokens[row, : len(text)] = torch.from_numpy(text.astype(np.int64))
            there[row, : len(text)] = 1
        with torch.inference_mode():
            tokens, there = tokens.to(self.device), there.to(self.device)
            hidden = self._model(input_ids=tokens, attention_mask=there).last_hidden_state
            mean = (hidden * (there / there.sum(1, keepdim=True))[:, :, None]).sum(1)
            size = mean.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)
            return np.asarray((mean / size).float().cpu().numpy()[: len(prompts)])
