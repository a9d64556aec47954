"""Checks that a server of vLLM draws as a run needs it: by its settings, and by a few short answers.

alone ──► again ──► beside others ──► at twice the temperature
   seeds: the same tokens and logprobs      logprobs: of the drawn token, at the temperature
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from producers.engines.engine import EngineError, SampleRequest
from producers.engines.server_facts import BACKEND, CONTRACT, ServerFacts
from producers.engines.server_link import ServerLink
from producers.engines.streamed_answer import StreamedAnswer
from schemas.runspec import RunSpec
from schemas.shortening import shown

_PLACE_KEYS = frozenset(
    {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache",
     "return_dict", "output_hidden_states", "output_attentions", "label2id", "id2label",
     "bos_token_id", "eos_token_id", "pad_token_id"}
)  # fmt: skip
"""Keys of a model's config on which no logprob depends."""
_WINDOW = "sliding_window"
_TOKENS = 8  # of a trial
_BESIDE = 8  # trials that are drawn together
_LIKELIEST = 5  # logprobs of a place that are looked at
_ALIKE = -4.0  # log-probability of an answer below which eight seeds don't draw the same by chance
_CLOSE = 0.02  # of logits: two ways to them may differ by rounding
_ROUNDING = 1e-3  # of probabilities


@dataclass(frozen=True)
class Trial:
    """A short answer to be drawn."""

    request: SampleRequest
    temperature: float
    likeliest: int = 0


@dataclass(frozen=True)
class Trials:
    """Answers to be drawn, those of a round together."""

    rounds: list[list[Trial]]
    temperature: float


def trials_for(slots: int, vocabulary: int, temperature: float) -> Trials:
    """Return the answers that a server is checked by."""
    prompt = [number % vocabulary for number in (1, 2, 3)]
    most = min(_LIKELIEST, vocabulary)

    def trial(seed: int, heat: float, name: str) -> Trial:
        return Trial(SampleRequest(name, prompt, _TOKENS, seed, 0.0, endless=True), heat, most)

    beside = [trial(seed, temperature, f"trial-beside-{seed}") for seed in range(min(_BESIDE, slots))]
    rounds = [
        [trial(0, temperature, "trial-alone")], [trial(0, temperature, "trial-again")], beside,
        [trial(0, 2 * temperature, "trial-hot")],
    ]  # fmt: skip
    return Trials(rounds, temperature)


def check_trials(
    trials: Trials, answers: Sequence[Sequence[StreamedAnswer]], link: ServerLink, *, invariant: bool
) -> None:
    """Raise EngineError if the answers show that seeds or logprobs are not what a run needs."""
    (alone,), (again,), beside, (hot,) = answers
    problem = (
        _wrong_logprobs([alone, again, *beside, hot])
        or _wrong_temperature(alone, hot, trials.temperature)
        or _wrong_seeds(alone, again, beside, invariant=invariant)
    )
    if problem:
        raise link.wrong(problem, lasting=True)


def _wrong_logprobs(answers: Sequence[StreamedAnswer]) -> str:
    for one in answers:
        for token, logprob, likeliest in zip(one.tokens, one.logprobs, one.likeliest or [], strict=True):
            if abs(likeliest.get(token, math.inf) - logprob) > _ROUNDING:
                return f"gives token {token} the logprob {logprob}, and {likeliest} among the likeliest"
            if not all(one <= _ROUNDING for one in likeliest.values()):
                return f"gives the likeliest tokens logprobs that are none: {likeliest}"
            mass = sum(map(math.exp, likeliest.values()))
            if mass > 1 + _ROUNDING:
                return (
                    f"gives {len(likeliest)} tokens probabilities that add up to {mass:.4f}: start it with "
                    "--logprobs-mode processed_logprobs"
                )
    return ""


def _wrong_temperature(plain: StreamedAnswer, hot: StreamedAnswer, temperature: float) -> str:
    """Compare the logits of an answer's first place that both temperatures let one see."""
    assert plain.likeliest and hot.likeliest, "the trials ask for them"
    first, second = plain.likeliest[0], hot.likeliest[0]
    both = sorted(first.keys() & second.keys())
    if len(both) < 2:
        return "gives other tokens the highest logprobs at another temperature"
    logits = np.array([first[token] for token in both]) * temperature
    hot_logits = np.array([second[token] for token in both]) * 2 * temperature
    apart = np.abs((logits - logits[0]) - (hot_logits - hot_logits[0])).max()
    if apart > _CLOSE * (1 + np.abs(logits - logits[0]).max()):
        return (
            "gives logprobs that do not follow the temperature: start it with --logprobs-mode "
            "processed_logprobs"
        )
    return ""


def _wrong_seeds(
    alone: StreamedAnswer, again: StreamedAnswer, beside: Sequence[StreamedAnswer], *, invariant: bool
) -> str:
    if len(beside) > 1 and all(one.tokens == alone.tokens for one in beside) and sum(alone.logprobs) < _ALIKE:
        return f"draws the same {len(alone.tokens)} tokens with {len(beside)} seeds: it ignores seeds"
    if not _same(alone, again):
        return (
            f"draws {_said(again)} and then {_said(alone)} with one seed: start it with "
            "VLLM_BATCH_INVARIANT=1 on a GPU, and without speculation"
        )
    if invariant and not _same(alone, beside[0]):
        return (
            f"draws {_said(alone)} alone and {_said(beside[0])} beside others with one seed: start it with "
            "VLLM_BATCH_INVARIANT=1 on a GPU, or set generator.batch_invariant: false"
        )
    return ""


def _same(one: StreamedAnswer, other: StreamedAnswer) -> bool:
    return one.tokens == other.tokens and one.logprobs == other.logprobs


def _said(one: StreamedAnswer) -> str:
    return f"tokens {one.tokens.tolist()} with logprobs {[round(each, 6) for each in one.logprobs]}"


def check_facts(facts: ServerFacts, spec: RunSpec, model: str, link: ServerLink) -> None:
    """Raise EngineError with everything that is wrong about a server's settings, and the flags to give it."""
    if problems := wrong_facts(facts, spec, model):
        raise link.wrong("; ".join(["does not fit this run", *problems]), lasting=True)


def wrong_facts(facts: ServerFacts, spec: RunSpec, model: str) -> list[str]:
    """Return what is wrong about a server's settings. `model`: a folder; empty: it is not known yet."""
    if facts.contract != CONTRACT:
        return [f"its StreamRL has contract {facts.contract}, this one {CONTRACT}: install the same version"]
    slots, longest = spec.generator.slots, spec.longest_sample
    found = {
        f"it computes in {facts.dtype}: --dtype {spec.model.dtype}": facts.dtype != spec.model.dtype,
        f"it holds {facts.longest} tokens of a sample: --max-model-len {longest}": facts.longest < longest,
        f"it draws {facts.slots} samples at once: --max-num-seqs {slots}, or set generator.slots: "
        f"{facts.slots}": facts.slots < slots,
        f"its logprobs are {facts.logprobs_mode}: --logprobs-mode processed_logprobs":
            facts.logprobs_mode != "processed_logprobs",
        "it keeps prefixes that older weights computed: --no-enable-prefix-caching": facts.prefix_caching,
        "it splits prompts, and on a CPU vLLM can't wind a seed back: --no-enable-chunked-prefill":
            facts.chunked_prefill and facts.device == "cpu",
        "it has pipeline or data parallelism: start it without": facts.workers != facts.ranks,
        f"it has {facts.front_ends} processes that answer, and a claim is held by one: --api-server-count 1":
            facts.front_ends != 1,
        f"it has {facts.ranks} ranks of tensor parallelism: --tensor-parallel-size {spec.generator.devices}, "
        f"or set generator.tensor_parallel: {facts.ranks}": facts.ranks != spec.generator.devices,
        "it has expert parallelism, and here slices of each expert are expected: start it without "
        "--enable-expert-parallel": facts.whole_experts,
        f"it quantizes weights ({facts.quantization}): start it without --quantization":
            bool(facts.quantization),
        "it has adapters: start it without --enable-lora": facts.adapters,
        f"it holds keys and values in {facts.cache_dtype}, and not in {spec.model.dtype} as the model: "
        "--kv-cache-dtype auto": facts.cache_dtype not in ("auto", spec.model.dtype),
        "it offloads weights to main memory, and new ones are written where it computes: start it without "
        "--cpu-offload-gb and --offload-group-size": facts.offloads,
        f"{facts.unfit_experts}: --moe-backend triton": bool(facts.unfit_experts) and not facts.quantization,
        "it guesses tokens with a model of its own: start it without --speculative-config":
            facts.speculation,
        f'it takes no patches of weights: --weight-transfer-config \'{{"backend": "{BACKEND}"}}\'':
            not facts.transfers,
        "it can't count its tokens: start it with VLLM_USE_V2_MODEL_RUNNER=0": not facts.counts_tokens,
        f"its model has {facts.vocabulary} tokens to draw": facts.vocabulary < 1,
    }  # fmt: skip
    problems = [problem for problem, wrong in found.items() if wrong]
    return problems + (_other_model(facts, model_config(model)) if model else [])


def model_config(model: str) -> dict[str, Any]:
    """Return the config of the model in a folder."""
    from transformers import AutoConfig

    try:
        found: dict[str, Any] = AutoConfig.from_pretrained(model).to_dict()
    except Exception as error:  # the library's errors have no common base class
        raise EngineError(f"the config of {model} can't be read: {error}") from error
    return found


def _other_model(facts: ServerFacts, own: dict[str, Any]) -> list[str]:
    """Compare models by their configs, and by the vocabulary that the server says: drawn tokens are in it."""
    config, own = _without_windows(facts.config), _without_windows(own)
    config |= {"vocab_size": facts.vocabulary} if "vocab_size" in own else {}
    both = sorted((config.keys() & own.keys()) - _PLACE_KEYS)
    differ = [key for key in both if _plain(config[key]) != _plain(own[key])]
    if not differ:
        return []
    said = ", ".join(f"{key}: {shown(config[key])} there, {shown(own[key])} here" for key in differ[:3])
    return [f"it has another model ({said}): start it with the folder of this run's model"]


def _without_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in which no window is None: transformers also says 0, which vLLM changes."""
    return {name: None if name == _WINDOW and value == 0 else value for name, value in config.items()}


def _plain(value: object) -> object:
    """Return a value as JSON has it: lists and tuples are the same there."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return value
