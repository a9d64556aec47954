"""Samples that a tiny model really draws, so that their logprobs and rewards mean something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from msgspec import structs

from infra.weights.versions import WeightStore
from schemas.messages import Sample
from tests.fakes.crashing import World

LENGTH = 2  # tokens of each answer


@dataclass
class Drawing:
    """Draws the answers of a world's samples by the weights that they name."""

    world: World
    model: Any  # of transformers, whose weights are replaced
    tables: dict[int, torch.Tensor] = field(default_factory=dict)

    def __call__(self, sample: Sample) -> Sample:
        version = int(sample.versions[0])
        if version not in self.tables:
            store = WeightStore(self.world.context.store, self.world.context.run)
            self.tables[version] = self.table(store.fetch(version)[1])
        logprobs = self.tables[version]
        draw = torch.Generator().manual_seed(sample.seed + 1)
        first = int(torch.multinomial(logprobs[0].exp(), 1, generator=draw))
        second = int(torch.multinomial(logprobs[1 + first].exp(), 1, generator=draw))
        said = np.array([logprobs[0, first], logprobs[1 + first, second]], dtype=np.float32)
        tokens = np.array([first, second], dtype=np.int32)
        return structs.replace(sample, tokens=tokens, logprobs=said, reward=reward_of(first, second))

    @torch.no_grad()
    def table(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the logprobs of the first token, and those of the second one for each first token."""
        self.model.load_state_dict(dict(weights), strict=False)
        self.model.tie_weights()
        size = self.model.config.vocab_size
        prompt = torch.tensor([4, 5]).expand(size, 2)
        both = torch.cat([prompt, torch.arange(size)[:, None]], dim=1)
        logits = self.model(input_ids=both, use_cache=False).logits
        return torch.cat([logits[:1, 1], logits[:, 2]]).log_softmax(-1)

    def mean_reward(self, weights: Mapping[str, torch.Tensor]) -> float:
        """Return the mean reward of all answers that these weights may draw: no estimate, the exact mean."""
        odds = self.table(weights).exp()
        size = odds.shape[1]
        rewards = torch.tensor([[reward_of(a, b) for b in range(size)] for a in range(size)])
        return float((odds[0][:, None] * odds[1:] * rewards).sum())


def reward_of(first: int, second: int) -> float:
    """Return the reward of an answer: for even tokens, and some for a small second one."""
    return float(first % 2 == 0) + 0.5 * float(second < 8)


def drawing(world: World, model: str) -> Drawing:
    """Make a world draw its samples by the model that it trains."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    world.edit = found = Drawing(world, loaded)
    return found
