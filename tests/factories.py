"""Things that many tests need: a small spec, samples, a context on fakes, a tiny model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infra.memory_bus import MemoryBus
from infra.roles.context import RoleContext
from infra.roles.heart import Heart
from infra.runs import RunRecord
from infra.stores.opening import open_store
from infra.weights.bits import model_of
from infra.weights.patch import PatchFile
from schemas.admission import latest_iteration, oldest_version
from schemas.messages import TRAIN, Sample
from schemas.runspec import RunSpec
from schemas.topics import Topics

if TYPE_CHECKING:
    import torch

TASK = """
def problems(split):
    count, base = (64, 0) if split == "train" else (16, 1000)
    return [{"id": str(base + n), "prompt": f"{n % 10}:", "kind": str(n % 5)} for n in range(count)]

def reward(problem, completion):
    return {"digits": sum(c.isdigit() for c in completion) / 16}
"""

OWN_LEARNER = '''
from pydantic import Field
from streamrl.learners import TorchSettings

class Gentle(TorchSettings):
    """Settings of the learner."""

    softly: bool = Field(True, description="Whether it is gentle.")
'''


def make_spec(**sections: Any) -> RunSpec:
    """A small run; sections replace keys, as in `algorithm={"groups": 4}`."""
    data: dict[str, Any] = {
        "run": "test",
        "seed": 7,
        "task": {"python": "task.py"},
        "model": {"path": "model"},
        "sampling": {"max_tokens": 16, "max_prompt_tokens": 8},
        "algorithm": {"iterations": 3, "groups": 4, "group_size": 2, "learning_rate": 1e-3},
        "lengths": {"classes": 2},
        "trainer": {"microbatch_tokens": 64, "bundle_tokens": 32, "checkpoint_every": 2},
        "deadlines": {"progress_s": 600, "start_s": 600},
    }
    for name, section in sections.items():
        data[name] = {**data[name], **section} if isinstance(data.get(name), dict) else section
    return RunSpec.model_validate(data)


def make_context(spec: RunSpec, folder: Path, *, role: str = "trainer", run: str = "test-1") -> RoleContext:
    """A context on the fake bus and a store in a folder."""
    store = open_store(f"file://{folder}/store")
    record = RunRecord(
        id=run,
        spec=spec,
        bootstrap_servers="none",
        store=store.url,
        model=str(folder / "model"),
        created_at=0.0,
    )
    bus = MemoryBus()
    topics = Topics(run, spec.lengths.classes)
    bus.create_topics(topics.all())
    return RoleContext(
        record, store, bus, topics, logging.getLogger("streamrl.test"), role, 0, bus.writer(),
        Heart(run, role, 0), threading.Event(),
    )  # fmt: skip


def make_sample(spec: RunSpec, group: int, index: int, **fields: Any) -> Sample:
    """A sample that a trainer of `spec` takes."""
    algorithm = spec.algorithm
    length = fields.pop("length", 3 + (group * 5 + index * 3) % 9)
    version = oldest_version(group, algorithm.groups, algorithm.lookahead)
    draw = np.random.default_rng([group, index])
    values: dict[str, Any] = {
        "run": "test-1", "purpose": TRAIN, "group": group, "index": index, "attempt": 0,
        "size": algorithm.group_size, "problem_id": str(group), "epoch": 0,
        "iteration": latest_iteration(group, algorithm),
        "mini": group % algorithm.optimizer_steps if algorithm.order == "window" else 0,
        "bundle": group, "bundle_groups": 1, "prompt_tokens": np.array([4, 5], dtype=np.int32),
        "tokens": draw.integers(2, 20, length).astype(np.int32),
        "logprobs": -draw.random(length).astype(np.float32),
        "version_starts": np.zeros(1, dtype=np.int32), "versions": np.array([version], dtype=np.int32),
        "roots": ["r"], "seed": group * 100 + index, "finish": "stop", "reward": float(draw.random()),
        "reward_parts": {}, "reward_error": "", "predicted": float(length),
        "length_class": group % spec.lengths.classes, "min_version": version, "generator": "g",
        "admitted_at": 0.0, "started_at": 0.0, "finished_at": 0.0, "scored_at": 0.0,
    }  # fmt: skip
    return Sample(**{**values, **fields})


def make_patch(tensors: Mapping[str, torch.Tensor], root: str = "r") -> PatchFile:
    """Weights for an engine, whatever it holds."""
    return PatchFile({}, model_of(tensors), since=None, root=root)


def make_model_files(folder: Path) -> Path:
    """A folder that looks like a model, to all who don't load it: no torch is needed to make it."""
    import json

    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": np.zeros((4, 2), np.float32)}, folder / "model.safetensors")
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate("?0123456789+=:")}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.save(str(folder / "tokenizer.json"))
    return folder


def make_tiny_model(folder: Path, *, seed: int = 0, layers: int = 2, width: int = 64, heads: int = 2) -> Path:
    """A Qwen2 model (of some 60,000 parameters) with random weights and a tokenizer of characters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=24, hidden_size=width, intermediate_size=width, num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=1,
            pad_token_id=0, bos_token_id=None,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # a random model is nearly uniform: make it prefer something
    return _saved(model, folder)


TINY_MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 48, "head_dim": 32, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64},
    "olmoe": {"num_experts": 8, "intermediate_size": 48},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 48},
}


def make_tiny_mixture(folder: Path, kind: str, *, seed: int = 0, **config: Any) -> Path:
    """A mixture of experts of one of TINY_MIXTURES, with random weights and a tokenizer of characters."""
    return make_tiny_kind(
        folder, kind, seed=seed, **{"num_experts_per_tok": 2, **TINY_MIXTURES[kind], **config}
    )


def make_tiny_kind(folder: Path, kind: str, *, seed: int = 0, **config: Any) -> Path:
    """A model of a kind (a config's model_type), with random weights and a tokenizer of characters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "vocab_size": 24, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 256, "eos_token_id": 1, "pad_token_id": 0,
        "bos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**common, **config}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # norms stay as they are
                parameter.mul_(4.0)
    return _saved(model, folder)


def _saved(model: Any, folder: Path) -> Path:
    """Save a model of 24 tokens, and a tokenizer of characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<end>", *"0123456789:- abcdefg"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>")
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_chat_tokenizer(folder: Path, template: str | None = CHAT_TEMPLATE) -> Path:
    """A tokenizer of 260 tokens: bytes, and four special ones. It puts <s> before each text by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=words, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>", "<end>", "<|im_start|>", "<|im_end|>"])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="<end>", chat_template=template,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return folder


def make_chat_model(folder: Path, *, seed: int = 0) -> Path:
    """A tiny Llama with that tokenizer; <end> and <|im_end|> end its answers."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=260, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
            tie_word_embeddings=True, bos_token_id=256, eos_token_id=257, pad_token_id=257,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    model.generation_config = GenerationConfig(eos_token_id=[257, 259], pad_token_id=257)
    model.save_pretrained(folder)
    return make_chat_tokenizer(folder)
