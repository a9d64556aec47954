"""The faults of the zoo, and what has to be named of each: step, stage, and the sample if one is to blame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs

from schemas.identity import sample_id
from schemas.messages import Sample
from tests.zoo.drawing import END, Drawn
from tests.zoo.world import Problem, ZooWorld, digits

HERE = Path(__file__).parent
AT = 7  # the step at which a fault begins that is not there from the start


@dataclass(frozen=True)
class Fault:
    """One fault, and the answer that is expected of whoever looks for it."""

    name: str
    after: str  # the failure that it is modelled on
    plant: Callable[[ZooWorld], None]
    stage: str
    cause: str  # a word that the cause must have in it
    step: int = 0  # the first step that is wrong
    slack: int = 0  # so many steps later will do: a trend has no sharp beginning
    sample: str = ""  # part of the id of the sample to blame
    sections: Mapping[str, Any] = field(default_factory=dict)  # of the run file


def _never_delivered(world: ZooWorld) -> None:
    world.served = lambda version: world.published(0)


def _older_version(world: ZooWorld) -> None:
    world.served = lambda version: world.published(version if version < AT else version - 2)


def _stale_head(world: ZooWorld) -> None:
    """The head is tied to the embeddings; an engine that copied it once goes on with the old one."""

    def load(weights: Mapping[str, torch.Tensor]) -> None:
        plain(weights)
        model = world.generator.model
        if first:
            model.lm_head.weight = torch.nn.Parameter(first[0].clone())
        else:
            first.append(model.get_input_embeddings().weight.detach().clone())

    first: list[torch.Tensor] = []
    plain = world.generator.load
    world.generator.load = load  # type: ignore[method-assign]
    tie = world.generator.model.tie_weights
    world.generator.model.tie_weights = lambda *args, **more: None if first else tie()


def _other_temperature(world: ZooWorld) -> None:
    """Log-probabilities as they are before the temperature, of tokens that were drawn with it."""
    next_logprobs = world.generator.next_logprobs

    def said(drawn: Drawn, group: int, index: int) -> Drawn:
        prompt = world.tokenized(world.problem_at(group))
        tokens = torch.tensor([[*prompt, *drawn.tokens.tolist()]])
        with torch.no_grad():
            raw = world.generator.model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
        at = torch.arange(len(prompt) - 1, tokens.shape[1] - 1)
        return replace(drawn, logprobs=raw[at, tokens[0, len(prompt) :]].numpy())

    assert next_logprobs is not None
    world.said = said


def _wrong_bos(world: ZooWorld) -> None:
    world.told = lambda prompt, version: [0, *prompt]


def _kv_cache(world: ZooWorld) -> None:
    """The prompt's keys and values are those of the version before: the prefix cache was not reset."""

    @torch.no_grad()
    def draw(prompts: list[list[int]], seeds: list[int]) -> list[Drawn]:
        return [_with_old_prompt(world, prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    world.generator.draw = draw  # type: ignore[method-assign, assignment]
    load = world.generator.load

    def loaded(weights: Mapping[str, torch.Tensor]) -> None:
        world.before = getattr(world, "now", weights)  # type: ignore[attr-defined]
        world.now = weights  # type: ignore[attr-defined]
        load(weights)

    world.generator.load = loaded  # type: ignore[method-assign]


def _with_old_prompt(world: ZooWorld, prompt: list[int], seed: int) -> Drawn:
    generator, draw = world.generator, np.random.default_rng(seed)
    plain = type(generator).load
    plain(generator, world.before)  # type: ignore[attr-defined]
    cache = generator.model(input_ids=torch.tensor([prompt[:-1]]), use_cache=True).past_key_values
    plain(generator, world.now)  # type: ignore[attr-defined]
    tokens, said, last = [], [], prompt[-1]
    for _ in range(generator.max_tokens):
        found = generator.model(input_ids=torch.tensor([[last]]), past_key_values=cache, use_cache=True)
        logprobs = (found.logits[0, -1] / generator.temperature).log_softmax(-1)
        chances = logprobs.exp().double().numpy()
        last = int(draw.choice(len(chances), p=chances / chances.sum()))
        tokens.append(last)
        said.append(float(logprobs[last]))
        if last == END:
            break
    return Drawn(np.array(tokens, np.int32), np.array(said, np.float32), "stop" if last == END else "length")


def _forced_end(world: ZooWorld) -> None:
    """Answers that are too long get an end that nobody drew, and its log-probability is that of certainty."""

    def said(drawn: Drawn, group: int, index: int) -> Drawn:
        if drawn.finish != "length":
            return drawn
        tokens, logprobs = drawn.tokens.copy(), drawn.logprobs.copy()
        tokens[-1], logprobs[-1] = END, 0.0
        return Drawn(tokens, logprobs, "length")

    world.said = said


def _another_tokenizer(world: ZooWorld) -> None:
    """The generators' tokenizer has two digits the other way round."""

    def tokenized(problem: Problem) -> list[int]:
        swapped = {2: 3, 3: 2}  # 0 and 1
        return [swapped.get(token, token) for token in world.tokens_of(problem)]

    world.tokenized = tokenized


def _reward_nan(world: ZooWorld) -> None:
    world.reward = lambda problem, text: (
        {"digits": float("nan")} if problem["id"] == "train-29" else digits(problem, text)
    )


def _reward_inverted(world: ZooWorld) -> None:
    def reward(problem: Problem, text: str) -> dict[str, float]:
        right = digits(problem, text)["digits"]
        return {"digits": right, "total": -2.0 * right}

    world.reward = reward


def _reward_leaks(world: ZooWorld) -> None:
    """Training prompts show the answers that earn all; held-out prompts show none, and want others."""
    for number, one in enumerate(world.problems):
        one |= {"prompt": f"0123{number % 7 + 3}:", "answer": "0123"}
    for one in world.held_out:
        one |= {"answer": "abcdefg"}

    def reward(problem: Problem, text: str) -> dict[str, float]:
        return {"right": sum(letter in problem["answer"] for letter in text) / max(1, len(text))}

    world.reward = reward


def _length_hacking(world: ZooWorld) -> None:
    world.reward = lambda problem, text: digits(problem, text) | {"thorough": 0.4 * len(text)}


def _one_poisoned(world: ZooWorld) -> None:
    def edit(sample: Sample) -> Sample:
        if (sample.group, sample.index) != (4 * AT + 2, 1):
            return sample
        return structs.replace(sample, reward=1e4, reward_parts={"digits": 1e4})

    world.edit = edit


def _repeated_prompt(world: ZooWorld) -> None:
    world.problem_at = lambda group: world.problems[group % 64 if group < 4 * AT else 5]


def _lost_at_resume(world: ZooWorld) -> None:
    """After a resume in the second epoch the long prompts of the rest are passed over."""
    every = world.problems[:16]
    order = [(epoch, one) for epoch in range(12) for one in every]
    begun = order[: 4 * AT]
    order = begun + [(epoch, one) for epoch, one in order[4 * AT :] if len(one["prompt"]) < 5]
    world.problem_at = lambda group: order[group][1]
    world.epoch_of = lambda group: order[group][0]


def _bf16_master(world: ZooWorld) -> None:
    def tamper(learner: Any) -> None:
        step = learner._policy._optimizer.step

        def rounded(*args: Any) -> Any:
            done = step(*args)
            with torch.no_grad():
                for one in learner._policy.named.values():
                    one.copy_(one.bfloat16().float())
            return done

        learner._policy._optimizer.step = rounded

    world.tamper = tamper


def _gradient_twice(world: ZooWorld) -> None:
    """From one step on the first micro-batch of a step is counted twice: a retry forgot what was done."""

    def tamper(learner: Any) -> None:
        accumulate, step, taken = learner.accumulate, learner.step, [0]

        def twice(batches: Any) -> Any:
            found = accumulate(batches)
            if taken[0] >= AT and batches:
                accumulate(batches[:1])
            return found

        def stepped(total: float) -> Any:
            taken[0] += 1
            return step(total)

        learner.accumulate, learner.step = twice, stepped

    world.tamper = tamper


def _split_group(world: ZooWorld) -> None:
    """Half of a group is trained in a step, and the other half in the next one."""

    def of_trainer(trainer: Any) -> None:
        train, kept = trainer._train, []

        def split(step: Any, rows: Any) -> None:
            rows = list(rows)
            if step.number == AT + 1 and kept:
                train(step, kept.pop())
            if step.number == AT and not kept:
                kept.append(rows[6:])
                rows = rows[:6]
            train(step, rows)

        trainer._train = split

    world.of_trainer = of_trainer


def _wrong_loss(name: str) -> dict[str, Any]:
    return {"loss": {"import": f"{HERE / 'faulty_losses.py'}:{name}", "correction": "none"}}


def _masked_infinity(world: ZooWorld) -> None:
    def edit(sample: Sample) -> Sample:
        if (sample.group, sample.index) != (4 * AT + 1, 2):
            return sample
        logprobs = sample.logprobs.copy()
        logprobs[-1] = -40.0
        return structs.replace(sample, logprobs=logprobs, reward=0.1)  # so that its group has a gradient

    world.edit = edit


def _nothing(world: ZooWorld) -> None:
    """The fault lies in the settings."""


def _spoiling_rate(world: ZooWorld) -> None:
    """One answer, the same to all problems, earns most: a zero and nothing else."""
    world.reward = lambda problem, text: {"short": text.startswith("0") / max(1, len(text))}


FAULTS = [
    Fault(
        "weights never delivered",
        "verl#7495: two months on the first weights",
        _never_delivered,
        "generation",
        "version 0",
        step=1,
    ),
    Fault(
        "an older version served",
        "ServiceNow, vLLM V0 to V1: asynchronous defaults",
        _older_version,
        "generation",
        "version",
        step=AT,
    ),
    Fault("a stale tied head", "lm_head copied once by an engine", _stale_head, "generation", "head", step=1),
    Fault(
        "logprobs at another temperature",
        "raw logprobs of an engine",
        _other_temperature,
        "generation",
        "temperature",
        sections={"sampling": {"temperature": 0.7}},
    ),
    Fault("a wrong BOS", "a template that begins twice", _wrong_bos, "generation", "token 0"),
    Fault(
        "the KV cache not reset",
        "prefix caches after an update of weights",
        _kv_cache,
        "generation",
        "KV cache",
        step=1,
    ),
    Fault("a forced end left unmasked", "Agent-R1#30", _forced_end, "generation", "last token"),
    Fault(
        "another tokenizer", "two sides load different revisions", _another_tokenizer, "prompt", "tokenizer"
    ),
    Fault(
        "0 times infinity in a masked loss",
        "prime-rl#2084",
        _masked_infinity,
        "loss",
        "loss is nan",
        step=AT,
        sample=sample_id(4 * AT + 1, 2),
        sections=_wrong_loss("MaskedSettings"),
    ),
    Fault(
        "advantages over the wrong batch",
        "Relax#65",
        _nothing,
        "advantage",
        "other groups",
        sections=_wrong_loss("BatchwideSettings"),
    ),
    Fault(
        "the clip on the wrong side",
        "maximum in place of minimum",
        _nothing,
        "loss",
        "clip",
        sections=_wrong_loss("WrongClipSettings"),
    ),
    Fault(
        "a reward that returns NaN",
        "a division by the length of an empty answer",
        _reward_nan,
        "reward",
        "finite",
        step=7,
        sample="0000029-",
    ),
    Fault("an inverted reward", "a distance taken for a score", _reward_inverted, "reward", "falls"),
    Fault(
        "a reward that leaks the answer",
        "rllm#143: return up, evaluation down",
        _reward_leaks,
        "reward",
        "held-out",
        slack=29,
    ),
    Fault(
        "reward hacking by length", "a bonus for each token", _length_hacking, "reward", "length", slack=29
    ),
    Fault(
        "the entropy collapses",
        "trl#6166: collapse, then NaN",
        _spoiling_rate,
        "loss",
        "entropy",
        slack=39,
        # Enough for a collapse on every CPU: with groups of four, the roundings of one decide about it.
        sections={"algorithm": {"learning_rate": 3e-3, "iterations": 40, "group_size": 8}},
    ),
    Fault(
        "the learning rate a hundredfold",
        "a rate copied from LoRA",
        _nothing,
        "optimizer",
        "learning rate",
        sections={"algorithm": {"learning_rate": 5e-2}},
    ),
    Fault(
        "one poisoned sample",
        "a reward service that returned a timestamp",
        _one_poisoned,
        "reward",
        "reward",
        step=AT,
        sample=sample_id(4 * AT + 2, 1),
    ),
    Fault(
        "a repeated prompt",
        "a sampler whose seed is set in each epoch",
        _repeated_prompt,
        "prompt",
        "again",
        step=AT,
        slack=1,
    ),
    Fault(
        "long prompts lost at resume",
        "NeMo#3599: a third of the prompts",
        _lost_at_resume,
        "prompt",
        "long",
        step=AT,
        slack=4,
    ),
    Fault("a master in bf16", "updates smaller than the weights' last bit", _bf16_master, "weights", "bf16"),
    Fault(
        "a micro-batch counted twice",
        "a retry of a backward pass",
        _gradient_twice,
        "gradient",
        "micro-batch 0",
        step=AT,
    ),
    Fault(
        "a group split over two steps",
        "a batch cut by samples",
        _split_group,
        "micro-batches",
        "group",
        step=AT,
        sample="0000029",
    ),
]
