"""Makes the dictionary that records of steps are packed with: `python -m tests.step_dictionary`.

It is a record of a step of no samples, with all names and words that nearly every step has. Make a new one
only if the fields of StepRecord have changed much, and keep the files of all others: old records need them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from schemas.messages import StepRecord
from schemas.metrics import METRICS, REWARD_PART
from schemas.packed import hash_of_dictionary
from schemas.stages import tolerances
from schemas.wire import _laid_out
from tests.fakes.fill import fill

_FOLDER = Path(__file__).parents[1] / "schemas" / "dictionaries"
_MACHINES = (
    "torch 2.13.0+cu130; transformers 5.19.0; NVIDIA H100 80GB HBM3",
    "torch 2.13.0+cpu; transformers 5.19.0; GenuineIntel Intel(R) Xeon(R) CPU; AVX2; linear layers by mkl",
    "torch 2.13.0+cu130; transformers 5.19.0; AuthenticAMD AMD EPYC; AVX512; linear layers by onednn",
)


def step_dictionary() -> bytes:
    """Return the content of a dictionary."""
    names = [name.replace("NAME", "").replace("_N", "_0") for name in METRICS]
    record = fill(
        StepRecord, run="count-1", last_of_iteration=True, problem_ids=["train-00000"],
        metrics=dict.fromkeys([*names, f"{REWARD_PART}exact"], 0.0), made_on=_MACHINES[-1],
        failed_reason="TimeoutError", root_out="0" * 32, recipe="0" * 16, seeds_digest="0" * 16,
        tolerances=np.array(tolerances("float32")),
    )  # fmt: skip
    others = [np.array(tolerances("bfloat16")).tobytes(), *map(str.encode, _MACHINES[:-1])]
    return b"".join([*others, _laid_out(record, differences=True)])


if __name__ == "__main__":
    content = step_dictionary()
    (_FOLDER / f"{hash_of_dictionary(content)}.bin").write_bytes(content)
    sys.stdout.write(f"{hash_of_dictionary(content)}: {len(content)} bytes\n")
