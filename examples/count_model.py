"""Build the small model that the counting example starts from.

Nothing is downloaded: a Qwen2-style model of 0.8 million parameters is made from a config, with
a tokenizer of single characters, and is warm-started on demonstrations that mostly stop too
early. So it can count, but it has a bad habit, and reinforcement learning has to undo that.
"""

from __future__ import annotations

import importlib.util
import math
import random
import string
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, END = "<pad>", "<end>"
CHARACTERS = " :" + string.digits + string.ascii_lowercase

STEPS = 500
BATCH = 32
POOL = 16  # batches drawn at once and cut by length, so that little of a batch is padding
LEARNING_RATE = 3e-3
WARMUP = 30
EVEN = 0.35  # how many of the demonstrations are of any length alike
FULL = 0.25  # how many are meant to be complete; the others stop after any of their numbers


def _load_task() -> ModuleType:
    """Load count_task.py from this file's folder, wherever this file was loaded from."""
    path = Path(__file__).resolve().with_name("count_task.py")
    spec = importlib.util.spec_from_file_location("count_task", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


task = _load_task()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: byte-pair encoding without a single merge.

    It is byte-level, where a space is written "\u0120", because AutoTokenizer gives every Qwen2
    model a byte-level tokenizer whatever the folder says.
    """
    tokens = [PAD, END, *CHARACTERS.replace(" ", "\u0120")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=40,  # as many as the tokenizer has
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def demonstration(rng: random.Random, held_out: set[str]) -> tuple[str, str]:
    """A prompt and an answer that counts right, but that mostly stops too early.

    Some of the counts are drawn evenly, so that the model has also seen how long ones go on. No
    held-out prompt is used.
    """
    while True:
        count = rng.randint(1, task.LONGEST) if rng.random() < EVEN else task.draw_count(rng)
        word = task.draw_word(rng)
        prompt = task.make_prompt(count, word)
        if prompt not in held_out:
            break
    answer = task.make_answer(count, word)
    if rng.random() >= FULL:
        answer = " ".join(answer.split(" ")[: 1 + rng.randint(1, count)])
    return prompt, answer


def _batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """POOL batches of (tokens, labels); only the answers and their ends are labelled."""
    held_out = {problem["prompt"] for problem in task.problems("held_out")}
    pairs = [demonstration(rng, held_out) for _ in range(POOL * BATCH)]
    pairs.sort(key=lambda pair: len(pair[1]))
    batches = []
    for start in range(0, len(pairs), BATCH):
        chunk = pairs[start : start + BATCH]
        rows = [[*tokenizer.encode(prompt + answer), tokenizer.eos_token_id] for prompt, answer in chunk]
        width = max(map(len, rows))
        tokens = torch.full((len(rows), width), tokenizer.pad_token_id)
        labels = torch.full((len(rows), width), -100)
        for i, (row, (prompt, _)) in enumerate(zip(rows, chunk, strict=True)):
            tokens[i, : len(row)] = torch.tensor(row)
            labels[i, len(prompt) : len(row)] = tokens[i, len(prompt) : len(row)]
        batches.append((tokens, labels))
    rng.shuffle(batches)
    return batches


def build(folder: Path, seed: int, progress: Callable[[float, str], None]) -> None:
    """Warm-start a model from `seed` and write it to `folder` as a Hugging Face model."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    model.train()
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(STEPS):
        if not waiting:
            waiting = _batches(tokenizer, rng)
        tokens, labels = waiting.pop()
        cosine = 0.5 * (1 + math.cos(math.pi * step / STEPS))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min((step + 1) / WARMUP, max(cosine, 0.02))
        # Right padding needs no mask: with causal attention no real token sees it.
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            progress((step + 1) / STEPS, f"warm start: step {step + 1} of {STEPS}, loss {loss.item():.3f}")
    model.eval()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
