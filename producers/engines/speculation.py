"""Speculation in vLLM: one step computes several tokens of a sample, and those that are drawn anyhow count.

begin_step ── drafts of running samples ──► vLLM's requests ──► a forward pass ──► verify: draw at each place
end_step ◄── how long it took                                     the first token that differs is the last ◄┘

A token is drawn by its sample's seed and its position alone (`sampler.py`). So a draft can't change which
token is drawn, nor its logprob, if logits don't depend on how many tokens go together: on a CPU they don't,
with `batch_invariant`.

vLLM's own speculation is switched on for the steps that have drafts, and for no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from producers.engines.acceptance import Acceptance
from producers.engines.draft_plan import MOST, DraftPlan
from producers.engines.drafter import Drafter
from producers.engines.engine import Pace, lasting_error
from producers.engines.pace import StepTimes
from producers.engines.sampler import StreamSampler, own_id

_LEARNS = 64  # plain steps between two looks at their times


class _On:
    """Stands in for vLLM's settings of speculation: its runner asks whether there are any, and for this."""

    def use_ngram_gpu(self) -> bool:
        return False


class Speculation:
    """Drafts for the running samples of one engine, as far as it pays."""

    def __init__(
        self, runner: Any, scheduler: Any, sampler: StreamSampler, drafter: Drafter,
        plan: Callable[[], DraftPlan] = DraftPlan,
    ) -> None:  # fmt: skip
        """`plan`: makes a plan that knows no times yet."""
        if runner.model_config.is_hybrid or runner.model_config.is_attention_free:
            raise lasting_error(
                "generator.speculation: this model keeps a state of each sample, and wrong guesses can't be "
                "taken out of it. Leave the setting out"
            )
        self._runner, self._scheduler, self._sampler, self._drafter = runner, scheduler, sampler, drafter
        runner.drafter, self._new_plan = None, plan
        self.learn(Pace([], []))
        self._acceptance = Acceptance()
        self._open: dict[str, Sequence[int]] = {}  # prompts
        self._guesses: dict[str, tuple[int, int, list[int]]] = {}  # since which token, match and tokens
        self._known: dict[str, int] = {}  # tokens that samples with drafts had before the step
        self._samples = 0  # that decode in the step; 0: others do something else in it
        self.ahead = 0  # the longest draft of the step
        self._rows = 0  # of the step's logits
        self._steps = 0  # without drafts
        self._drafted = self._accepted = self._made = 0

    def learn(self, pace: Pace) -> None:
        """Begin with step times that were measured without drafts."""
        self._plain = StepTimes()
        for samples, seconds in zip(pace.batches, pace.seconds, strict=True):
            self._plain.expect(samples, seconds)
        self._plan = self._new_plan()
        self._plan.learn(pace)

    def open(self, name: str, prompt: Sequence[int]) -> None:
        """Begin a sample."""
        self._open[name] = prompt
        self._drafter.open(name, prompt)

    def close(self, name: str, answer: Sequence[int] = ()) -> None:
        """End a sample, with all tokens of its answer."""
        if (prompt := self._open.pop(name, None)) is not None:
            self._guesses.pop(name, None)
            self._acceptance.forget(name)
            self._drafter.close(name, [*prompt, *answer])

    def known(self, name: str, otherwise: int) -> int:
        """Return how many tokens a sample had before the last step."""
        return self._known.get(name, otherwise)

    def counts(self) -> tuple[int, int]:
        """Return how many tokens were drafted, and how many of them were right."""
        return self._drafted, self._accepted

    def begin_step(self) -> None:
        """Give vLLM drafts for the next step, if they pay."""
        self._known, self.ahead, self._made, self._rows = {}, 0, 0, 0
        requests = self._scheduler.running
        self._samples = 0 if self._scheduler.waiting else len(requests)
        looked = self._plan.attention(len(requests)) if requests else 0
        if looked:
            for request, draft in self._drafts(requests[:looked], len(requests)):
                request.spec_token_ids = draft
                self._known[own_id(request.request_id)] = request.num_output_tokens
                self.ahead = max(self.ahead, len(draft))
        if self.ahead:
            self._runner.speculative_config, self._runner.rejection_sampler = _On(), self._verify

    def end_step(self, samples: int, seconds: float) -> float:
        """Note how long a step took. Return how many tokens a sample it made, at least 1."""
        self._runner.speculative_config = None
        if not self.ahead:
            self._plain.add(samples, seconds)
            self._steps += 1
            if self._steps % _LEARNS == 0:
                self._plan.learn(self._plain.pace())
        if self._samples:
            self._plan.step_took(self._samples, max(0, self._rows - self._samples), seconds)
        return max(1.0, self._made / samples)

    def _drafts(self, requests: Sequence[Any], samples: int) -> list[tuple[Any, list[int]]]:
        """Draft for some of the running samples. Return the requests for which it pays, with their drafts."""
        began = time.perf_counter()
        least = self._plan.least_chance(samples)
        able, chances, drafts = [], [], []
        for request in requests:
            name = own_id(request.request_id)
            if name not in self._open or request.num_computed_tokens != request.num_tokens - 1:
                continue  # its prompt is not computed yet
            text = request.all_token_ids
            self._judge(name, text)
            room = min(MOST, request.max_tokens - request.num_output_tokens - 1)
            if room <= 0 or self._acceptance.rests(name):
                continue
            draft, match = self._drafter.draft(name, text, room)
            found = self._acceptance.chances(name, match, len(draft), least)
            if draft:
                self._guesses[name] = len(text), match, draft
            if found:
                able.append(request)
                drafts.append(draft)
                chances.append(found)
        lengths = self._plan.lengths(samples, len(requests), chances)
        self._plan.drafting_took(len(requests), time.perf_counter() - began)
        return [
            (request, draft[:length])
            for request, draft, length in zip(able, drafts, lengths, strict=True)
            if length
        ]

    def _judge(self, name: str, text: Sequence[int]) -> None:
        """Compare the last guess with what came, whether or not vLLM was given it."""
        since, match, draft = self._guesses.pop(name, (0, 0, []))
        if draft:
            self._acceptance.judge(name, match, draft, text[since : since + len(draft)])

    def _verify(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling: Any) -> Any:
        """Draw tokens at all places of a step. Called by vLLM in the place of its rejection sampler."""
        from vllm.v1.outputs import SamplerOutput

        self._runner.speculative_config = None  # vLLM's own drafters are not asked
        counts = np.array(metadata.num_draft_tokens) + 1
        rows = np.repeat(np.arange(counts.size), counts)
        ends = counts.cumsum()
        aheads = np.arange(rows.size) - np.repeat(ends - counts, counts)
        drafts = np.full(rows.size, -1)
        drafts[aheads < counts[rows] - 1] = metadata.draft_token_ids.cpu().numpy()
        scaled = logits.to(torch.float32).div_(sampling.temperature[torch.from_numpy(rows)].unsqueeze(1))
        found = self._sampler.verify(scaled, rows, aheads, drafts)
        self._rows = rows.size
        self._made = sum(map(len, found))
        self._drafted += rows.size - counts.size
        self._accepted += self._made - counts.size
        tokens = np.full((counts.size, int(counts.max())), -1, dtype=np.int32)
        for row, drawn in enumerate(found):
            tokens[row, : len(drawn)] = drawn
        return SamplerOutput(
            sampled_token_ids=torch.from_numpy(tokens).to(logits.device), logprobs_tensors=None
        )
