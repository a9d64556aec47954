"""An engine with lengths and speed to order: an answer has as many tokens as its prompt says, such as "020:".

Tokens are drawn by the model, so that weights and bits are real ones. A step takes `base_s`, and `context_s` more
for each token that its samples attend to: long answers cost more a token, as they do anywhere.
"""

import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from streamrl.engines import (
    DrawnAnswer,
    EngineSettings,
    Pace,
    StepTimes,
    digests_of,
    end_tokens,
    model_of,
    uniforms,
)

DIGIT_0 = 2  # its number in the tokenizer of `make_tiny_model`


class PacedSettings(EngineSettings):
    """Settings of the engine."""

    base_s: float = 0.0
    context_s: float = 0.0

    def make(self, model, spec):
        torch.set_num_threads(1)
        return PacedEngine(model, spec, self)


class PacedEngine:
    def __init__(self, model, spec, settings):
        dtype = getattr(torch, spec.model.dtype)
        self._net = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).requires_grad_(False).eval()
        self._end = end_tokens(model)[0]
        self._settings = settings
        self._requests, self._made, self._running = {}, {}, []
        self._times, self._patch = StepTimes(), None

    def submit(self, request):
        self._requests[request.id], self._made[request.id] = request, []

    def step(self, wait_s):
        running = sorted(self._requests.values(), key=lambda one: -one.priority)[: self._settings.slots]
        began = time.monotonic()
        with torch.no_grad():
            for request in running:
                self._draw(request)
        if running:
            context = sum(len(one.prompt) + len(one.made) + len(self._made[one.id]) for one in running)
            takes = self._settings.base_s + self._settings.context_s * context
            time.sleep(max(0.0, began + takes - time.monotonic()))
            self._times.add(len(running), time.monotonic() - began)
        return [done for request in running if (done := self._finished(request))]

    def _draw(self, request):
        made = self._made[request.id]
        place = len(request.made) + len(made)
        tokens = [*request.prompt, *request.made, *(token for token, _ in made)]
        logprobs = self._net(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
        if place + 1 >= _length(request):
            token = self._end
        else:
            others = logprobs.double().exp()
            others[self._end] = 0.0
            mass = others.cumsum(0)
            draw = uniforms(np.array([request.seed]), np.array([place]))[0]
            token = min(int(torch.searchsorted(mass, draw * mass[-1], right=True)), len(mass) - 1)
        made.append((token, float(logprobs[token])))

    def _finished(self, request):
        made = self._made[request.id]
        if made[-1][0] != self._end:
            return None
        done = DrawnAnswer(request.id, *_arrays(made), "stop")
        self.abort([request.id])
        return done

    def unfinished(self):
        return {name: len(made) for name, made in self._made.items()}

    def abort(self, ids):
        for name in ids:
            self._requests.pop(name, None)
            self._made.pop(name, None)

    def hand_over(self, ids):
        parts = [DrawnAnswer(name, *_arrays(self._made[name])) for name in ids if name in self._made]
        self.abort(ids)
        return parts

    def prepare(self, patch):
        self._patch = patch

    def install(self, *, recompute):
        self._patch.apply(model_of(dict(self._net.named_parameters())))
        return self.unfinished()

    def digests(self):
        return digests_of(dict(self._net.named_parameters()))

    def pace(self):
        pace = self._times.pace()
        return Pace(pace.batches, pace.seconds, keeps_bits=True)  # it has no cache: each token anew


def _length(request):
    digits = [token - DIGIT_0 for token in request.prompt if 0 <= token - DIGIT_0 <= 9]
    return int("".join(map(str, digits[:3])))


def _arrays(made):
    return (
        np.array([token for token, _ in made], dtype=np.int32),
        np.array([logprob for _, logprob in made], dtype=np.float32),
    )
