"""The settings that a resumed run may change: those that don't change what is learned from a sample.

Each setting of a run file is in exactly one of these tables; a test fails for one that is in none. For the
settings of one loss, learner, engine or policy alone, the seam says it, and `free_on_resume` of its section.

kept      decides what is learned, or what is on the topics already: must not change
files     names a file or folder: the path may change if the content is the same
bits      changes how sums are rounded: what is learned is the same, the last bits are not
free      memory, places, deadlines, reports, who does what: may change
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from infra.contents import FILES, MODEL
from schemas.runspec import SEAMS, RunSpec
from schemas.seams import IMPORT
from schemas.section import keys_of

KEPT_SETTINGS = """
run seed
task: prompt_field id_field dataset_config chat system train_split held_out_split limit shuffle
model: dtype follow_routes
model.lora: rank alpha targets
sampling: temperature max_tokens max_prompt_tokens stop min_tokens
algorithm: mode recorded staleness order staleness_cap groups group_size optimizer_steps learning_rate
algorithm: warmup_steps betas weight_decay max_grad_norm
loss: kind average kl kl_in kl_estimator correction correction_cap correct_fresh
lengths: classes edges backbone start
trainer: compose bundle_tokens
generator: engine on_update
evaluation: problems per_problem
"""
OF_FILES = """
task: python jsonl dataset reward held_out_jsonl chat_template
model: path build
loss: reference import
trainer: import
generator: import
"""
BITS = """
trainer: learner ranks threads microbatch_tokens least_microbatches exact_sums
trainer: gradient_checkpointing logits_chunk offload_optimizer
generator: threads
"""
FREE = """
task: reward_deadline_s reward_workers max_failed_rewards
algorithm: iterations
trainer: checkpoint_every keep_checkpoints keep_weights
generator: slots
dispatch: policy import silence_s
evaluation: every
placement: kind store generators sites machines restarts share_gpus
placement.archive: every_minutes
placement.ranks: elsewhere address deployments
placement.engine_ranks: elsewhere address
placement.balance: least most dry deployment smoothed lasting settle worth margin
placement.kafka: bootstrap_servers replication retention_hours
deadlines: start_s progress_s
report trackers
prometheus: port
"""


def settings(table: str) -> list[str]:
    """Return the full names of the settings in a table, such as `task.python`."""
    found = []
    for line in table.split("\n"):
        section, colon, names = line.rpartition(":")
        found += [f"{section}.{name}" if colon else name for name in names.split()]
    return found


_FREE, _BITS, _FILES = set(settings(FREE)), set(settings(BITS)), set(settings(OF_FILES))


def refused(before: RunSpec, after: RunSpec, old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return why a run can't go on with these settings, in words; empty if it can.

    `old`, `new`: hashes of the files that the settings name, by `contents_of`. `old` is empty for an old run
    that recorded none; its paths must not change.
    """
    for name, was, now in _changed(before, after):
        if not _may(name) and name not in _FILES and _own_kind(name, after) not in ("free", "bits"):
            return f"was started with {name} = {was!r}; the run file now says {now!r}"
        if name in _FILES and not old:
            return f"was started with {name} = {was!r}; the run file now says {now!r}"
    for name in (*sorted(FILES), MODEL) if old else ():
        if old.get(name) != new.get(name):
            return _otherwise(name, after, new)
    for name in sorted(set(settings(OF_FILES))) if old else ():
        was, now = _of(before, name), _of(after, name)
        if was != now and not old.get(MODEL if name.startswith("model.") else name):
            return f"was started with {name} = {was!r}; the run file now says {now!r}"
    return ""


def other_bits(before: RunSpec, after: RunSpec) -> list[str]:
    """Return the changed settings that make sums be rounded otherwise."""
    changed = [name for name, *_ in _changed(before, after)]
    return [name for name in changed if name in _BITS or _own_kind(name, after) == "bits"]


def learned_otherwise(
    before: RunSpec, after: RunSpec, old: Mapping[str, str], new: Mapping[str, str]
) -> list[str]:
    """Return all settings that differ, and that no resume may change. Files differ by content."""
    changed = [name for name, *_ in _changed(before, after)]
    kept = [
        name
        for name in changed
        if not _may(name) and name not in _FILES and _own_kind(name, after) not in ("free", "bits")
    ]
    hashes = {name for name in (*FILES, MODEL) if old and old.get(name) != new.get(name)}
    paths = {name for name in changed if name in _FILES and not (old.get(name) and new.get(name))}
    return [*kept, *sorted(hashes | paths)]


def _otherwise(name: str, spec: RunSpec, new: Mapping[str, str]) -> str:
    where = _of(spec, name) if name != MODEL else spec.model.path or spec.model.build
    if name not in new:
        there = f"there is none at {where}" if where else "the run file names none"
        return f"was started with a file for {name}, but {there}: write where it is into the run file"
    setting = name if name != MODEL else "model.path" if spec.model.path else "model.build"
    return f"was started with other content of {setting}: {where} has been changed since, or is another file"


def _of(spec: RunSpec, name: str) -> Any:
    section, _, field = name.partition(".")
    return getattr(getattr(spec, section), "imported" if field == IMPORT else field)


def _own_kind(name: str, spec: RunSpec) -> str:
    """Return "kept", "bits" or "free" for a setting of one loss, engine and so on; empty for all others."""
    section, _, key = name.partition(".")
    seam = SEAMS.get(section)
    if seam is None or key in keys_of(seam.base):
        return ""
    return "free" if key in getattr(spec, section).free_on_resume else seam.on_resume


def _may(name: str) -> bool:
    """Return whether a setting, or the section that it is in, may change."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in _FREE | _BITS for count in range(1, len(parts) + 1))


def _changed(before: RunSpec, after: RunSpec) -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting that differs, with its old and new value. Either run file may lack a section."""
    old, new = _flat(before.model_dump(mode="json")), _flat(after.model_dump(mode="json"))
    for name in [*new, *(name for name in old if name not in new)]:
        if old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else key)
    return flat
