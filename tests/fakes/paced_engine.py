"""An engine with lengths and speed to order: an answer has as many tokens as its prompt says, such as "020:".

Tokens are drawn evenly, by seed; their logprobs are the model's, so that weights and bits are real ones. A
step takes `context_s` for each token that its samples attend to: in long answers a token takes longer, as it
does anywhere. numpy alone computes the small Qwen2 of `make_tiny_model`, so the engine starts in a second.
"""

import json
import time
from pathlib import Path

import numpy as np

from infra.weights.digest import model_digests
from producers.engines.engine import DrawnAnswer, EngineSettings, Pace
from producers.engines.pace import StepTimes
from producers.engines.sampler import uniforms

FILLED = 128  # tokens to whose multiples a sequence is filled up
END, DIGIT_0, WORDS = 1, 2, 24  # numbers in the tokenizer of `make_tiny_model`


class PacedSettings(EngineSettings):
    """Settings of the engine."""

    context_s: float = 0.0

    def make(self, model, spec):
        return PacedEngine(Path(model), self)


class PacedEngine:
    def __init__(self, model, settings):
        self._net = TinyQwen2(json.loads((model / "config.json").read_text()))
        self._settings, self._times = settings, StepTimes()
        self._requests, self._made, self._patch = {}, {}, None

    def submit(self, request):
        self._requests[request.id], self._made[request.id] = request, []

    def step(self, wait_s):
        running = sorted(self._requests.values(), key=lambda one: -one.priority)[: self._settings.slots]
        began = time.monotonic()
        for request in running:
            self._draw(request)
        if running:
            context = sum(len(one.prompt) + len(one.made) + len(self._made[one.id]) for one in running)
            time.sleep(max(0.0, began + self._settings.context_s * context - time.monotonic()))
            self._times.add(len(running), time.monotonic() - began)
        return [done for request in running if (done := self._finished(request))]

    def _draw(self, request):
        made = self._made[request.id]
        place = len(request.made) + len(made)
        draw = float(uniforms(np.array([request.seed]), np.array([place]))[0])
        made.append(END if place + 1 >= _length(request) else 2 + int(draw * (WORDS - 2)))

    def _finished(self, request):
        if self._made[request.id][-1] != END:
            return None
        return self.hand_over([request.id], finish="stop")[0]

    def unfinished(self):
        return {name: len(made) for name, made in self._made.items()}

    def abort(self, ids):
        for name in ids:
            self._requests.pop(name, None)
            self._made.pop(name, None)

    def hand_over(self, ids, finish=""):
        parts = []
        for request in (self._requests[name] for name in ids if name in self._requests):
            made = np.array(self._made[request.id], np.int32)
            before = [*request.prompt, *request.made]
            logprobs = self._net.logprobs(np.array([*before, *made]))[len(before) - 1 :]
            parts.append(DrawnAnswer(request.id, made, logprobs, finish))
        self.abort(ids)
        return parts

    def prepare(self, patch):
        self._patch = patch

    def install(self, *, recompute):
        self._patch.apply(self._net.weights)
        return self.unfinished()

    def digests(self):
        return model_digests(self._net.weights)

    def pace(self):
        pace = self._times.pace()
        return Pace(pace.batches, pace.seconds, keeps_bits=True)


def _length(request):
    digits = [token - DIGIT_0 for token in request.prompt if 0 <= token - DIGIT_0 <= 9]
    return int("".join(map(str, digits[:3])))


class TinyQwen2:
    """A Qwen2 in float32."""

    def __init__(self, config):
        self.weights = {}
        self._layers, self._heads = config["num_hidden_layers"], config["num_attention_heads"]
        self._shared = self._heads // config["num_key_value_heads"]
        self._size = config["hidden_size"] // self._heads
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self._turns = theta ** -(np.arange(0, self._size, 2) / self._size)
        self._eps = config["rms_norm_eps"]

    def _weight(self, name):
        bits = self.weights[f"model.{name}"]
        return bits.data.view(np.float32).reshape(bits.shape)

    def _linear(self, name, x):
        bias = self._weight(f"{name}.bias") if f"model.{name}.bias" in self.weights else 0.0
        return x @ self._weight(f"{name}.weight").T + bias

    def _norm(self, name, x):
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self._eps)
        return x / scale * self._weight(f"{name}.weight")

    def _turned(self, x):
        angles = np.arange(len(x))[:, None] * self._turns
        angles = np.concatenate([angles, angles], -1)[:, None].astype(np.float32)
        half = self._size // 2
        return x * np.cos(angles) + np.concatenate([-x[..., half:], x[..., :half]], -1) * np.sin(angles)

    def _attention(self, layer, x):
        q, k, v = (
            self._linear(f"{layer}.self_attn.{name}_proj", x).reshape(len(x), -1, self._size)
            for name in "qkv"
        )
        q, k = self._turned(q), np.repeat(self._turned(k), self._shared, 1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(self._size)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        mass = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", mass / mass.sum(-1, keepdims=True), np.repeat(v, self._shared, 1))
        return self._linear(f"{layer}.self_attn.o_proj", mixed.reshape(len(x), -1).astype(np.float32))

    def logprobs(self, tokens):
        """Return the logprob of each token but the first, after those before it.

        Sequences are filled up, so that products have one shape: their last bits depend on it, and those of a
        sample that goes on elsewhere shall be the same.
        """
        count = len(tokens)
        tokens = np.concatenate([tokens, np.zeros(-count % FILLED, tokens.dtype)])
        x = self._weight("embed_tokens.weight")[tokens]
        for number in range(self._layers):
            layer = f"layers.{number}"
            x = x + self._attention(layer, self._norm(f"{layer}.input_layernorm", x))
            h = self._norm(f"{layer}.post_attention_layernorm", x)
            gate = self._linear(f"{layer}.mlp.gate_proj", h)
            up = self._linear(f"{layer}.mlp.up_proj", h)
            x = x + self._linear(f"{layer}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        logits = self._norm("norm", x) @ self._weight("embed_tokens.weight").T
        logits = logits - logits.max(-1, keepdims=True)
        found = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return found[np.arange(count - 1), tokens[1:count]].astype(np.float32)
