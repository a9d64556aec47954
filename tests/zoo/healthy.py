"""Healthy runs, of all kinds: nothing must be found in them."""

from __future__ import annotations

from typing import Any

from schemas.runspec import RunSpec
from tests.zoo.world import zoo_spec

_KINDS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo with a reference": {"loss": {"kind": "grpo", "kl": 0.05}},
    "dapo": {"loss": {"kind": "dapo"}},
    "dr_grpo": {"loss": {"kind": "dr_grpo"}},
    "gspo": {"loss": {"kind": "gspo"}},
    "cispo": {"loss": {"kind": "cispo"}},
    "rloo": {"loss": {"kind": "rloo"}},
    "reinforce_pp": {"loss": {"kind": "reinforce_pp"}},
    "ppo": {"loss": {"kind": "ppo", "value_learning_rate": 1e-3}},
    "async": {"algorithm": {"mode": "async", "staleness": 1}},
    "async, in order of arrival": {
        "algorithm": {"mode": "async", "staleness": 1, "order": "arrival", "staleness_cap": 3},
    },
    "several steps": {
        "algorithm": {"optimizer_steps": 2, "iterations": 15},
        "loss": {"correction": "decoupled"},
    },
    "colder": {"sampling": {"temperature": 0.7}},
    "a long warm-up": {"algorithm": {"warmup_steps": 20}},
    "gradient checkpointing": {"trainer": {"gradient_checkpointing": True}},
    "floats": {"trainer": {"exact_sums": False}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "lora": {"model": {"lora": {"rank": 4}}, "algorithm": {"learning_rate": 1e-3}},
    "tb with replay": {"loss": {"kind": "tb", "replay": 0.5}},
    "small groups": {"algorithm": {"group_size": 2, "groups": 8}},
}


def healthy_runs(seed: int) -> dict[str, RunSpec]:
    """Return the settings of a healthy run of each kind; each kind has a seed of its own."""
    return {
        name: zoo_spec(**sections, seed=seed + number)
        for number, (name, sections) in enumerate(_KINDS.items())
    }
