"""Says what a profile depends on, and compares it with what a run would have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from infra.choices import cores
from infra.errors import Explained
from infra.machine_kind import kind_of_machine
from infra.weights.folder import ModelFolder
from schemas.profile import SIZES, Profile, ProfileIdentity
from schemas.runspec import RunSpec

_LIBRARIES = ("vllm", "deepspeed", "numpy", "numba", "peft")  # others are in the machine's kind
# of the sections generator and trainer: settings that change no time of a step or a call
_NO_MATTER = {
    "generator": {"on_update", "slots", "threads", "kv_cache_mib", "gpu_kv_cache_mib"},
    "trainer": {
        "ranks", "threads", "microbatch_tokens", "compose", "bundle_tokens", "least_microbatches",
        "checkpoint_every", "keep_checkpoints", "keep_weights", "zero_stage",
    },
}  # fmt: skip
# of the section task: what decides prompts, lengths and rewards; of files the name alone
_OF_TASK = ("python", "jsonl", "dataset", "dataset_config", "reward", "prompt_field", "chat",
            "train_split")  # fmt: skip
_OF_CONFIG = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "eos_token_id", "pad_token_id",
              "bos_token_id", "use_cache"}  # fmt: skip


class WrongProfile(Explained):
    """A profile was made of something else than a run would be; the message says what differs."""

    lasting = True


def profile_identity(spec: RunSpec, model: Path, *, root: str = "") -> ProfileIdentity:
    """Return what figures of this run file, model and machine depend on."""
    folder = ModelFolder(model)
    return ProfileIdentity(
        model=model_shape(model), root=root,
        parameters=sum(int(np.prod(shape)) for shape in folder.shapes.values()),
        machine=kind_of_machine(), cores=cores(), libraries=dict(_versions()),
        settings=profiled_settings(spec), sizes=sizes_of(spec),
    )  # fmt: skip


def model_shape(model: Path) -> str:
    """Return a hash of a model's config and of the shapes of its tensors; its weights do not matter."""
    config = json.loads((model / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in _OF_CONFIG}
    shapes = {name: list(shape) for name, shape in sorted(ModelFolder(model).shapes.items())}
    text = json.dumps([kept, shapes], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def sizes_of(spec: RunSpec) -> dict[str, int]:
    """Return the settings that a profile may be carried over from, at the cost of wider intervals."""
    generator, trainer = spec.generator, spec.trainer
    found = (
        generator.slots, generator.threads, trainer.ranks, trainer.threads, trainer.microbatch_tokens,
        spec.longest_sample,
    )  # fmt: skip
    return dict(zip(SIZES, found, strict=True))


def _versions() -> Iterator[tuple[str, str]]:
    for name in _LIBRARIES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def profiled_settings(spec: RunSpec) -> dict[str, str]:
    """Return the settings that a profile's figures depend on, as JSON, by name."""
    found: dict[str, object] = {
        "model.dtype": spec.model.dtype,
        "model.lora": None if spec.model.lora is None else spec.model.lora.model_dump(mode="json"),
        "loss.kind": spec.loss.kind,
        "loss.reference": spec.loss.reference,
        "loss.kl": getattr(spec.loss, "kl", None),
        "loss.correction": getattr(spec.loss, "correction", None),
    }
    for name in _OF_TASK:
        value = getattr(spec.task, name)
        found[f"task.{name}"] = value.rpartition("/")[2] if isinstance(value, str) else value
    for name, left_out in _NO_MATTER.items():
        section = getattr(spec, name).model_dump(mode="json", exclude=left_out)
        found |= {f"{name}.{key}": value for key, value in section.items()}
    return {name: json.dumps(value, sort_keys=True) for name, value in found.items()}


def identity_differences(profiled: ProfileIdentity, wanted: ProfileIdentity) -> list[str]:
    """Return in what a profile differs from what is wanted, as sentences; empty if it is of use."""
    found = []
    if profiled.model != wanted.model:
        found.append(
            f"the model: it was made of one with {profiled.parameters:,} parameters (config and shapes "
            f"{profiled.model[:12]}), and the run's has {wanted.parameters:,} ({wanted.model[:12]})"
        )
    if profiled.machine != wanted.machine:
        found.append(f"the machine: it was made on {profiled.machine!r}, and this is {wanted.machine!r}")
    if profiled.cores != wanted.cores:
        found.append(f"the cores: it was made with {profiled.cores}, and here are {wanted.cores}")
    found += differences_by_name("library", profiled.libraries, wanted.libraries)
    return found + differences_by_name("setting", profiled.settings, wanted.settings)


def differences_by_name(word: str, before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return which values differ, as sentences. `word`: for each of them."""
    return [
        f"the {word} {name}: it was {before.get(name, 'not there')}, and is {now.get(name, 'not there')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def check_profile(profile: Profile, wanted: ProfileIdentity, *, named: str, runfile: str) -> None:
    """Raise WrongProfile if a profile is not of the run's model, machine, libraries and settings.

    `named`: the profile's file.
    """
    if wrong := identity_differences(profile.identity, wanted):
        lines = "\n".join(f"  {one}" for one in wrong)
        raise WrongProfile(
            f"{named} is a profile of something else, so its times would be wrong:\n{lines}\n"
            f"Measure again, on the machine that the run shall have: streamrl profile {runfile} --again"
        )
