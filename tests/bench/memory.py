"""Peak memory of the trainer by setting, of its GPU or without one of the process, and tokens a second.

weights   all weights are trained: with activations kept or computed again (gradient_checkpointing), and
          with AdamW's moments in main memory (offload_optimizer)
adapter   an adapter of rank 16, beside a base whose linear layers are held in 16 bits, or in 4
          (streamrl quantize)

The peak includes the loading of the model. None: the memory did not suffice.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra import choices
from tests.bench._gpu_model import SHAPES, sized_model
from tests.bench.gpu import part

_AGAIN = {"gradient_checkpointing": True}
_ADAPTER = {"lora": {"rank": 16, "alpha": 32.0}}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weights": ({}, {}),
    "weights, checkpointing": ({}, _AGAIN),
    "weights, checkpointing, offloaded": ({}, _AGAIN | {"offload_optimizer": True}),
    "adapter": (_ADAPTER, {}),
    "adapter, checkpointing": (_ADAPTER, _AGAIN),
    "adapter, checkpointing, 4 bits": (_ADAPTER, _AGAIN),
}


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench memory", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    device = "cuda" if choices.cuda() else "cpu"
    parser.add_argument("--size", choices=SHAPES, default="tiny" if device == "cpu" or quick else "1.5b")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--samples", type=int, default=64 if device == "cuda" else 16)
    parser.add_argument(
        "--longest", type=int, default=2048 if device == "cuda" else 64, help="answer, tokens"
    )
    given = parser.parse_args(argv)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as name:
        for setting in given.settings:
            model, trainer = SETTINGS[setting]
            in_four_bits = "4 bits" in setting
            folder = Path(name) / f"model-{in_four_bits}"
            if not folder.exists():
                sized_model(folder, given.size, device, in_four_bits=in_four_bits)
            found[setting] = part(
                "_peak_memory", folder, given.size, device, given.samples, given.longest,
                json.dumps(model), json.dumps(trainer),
            )  # fmt: skip
            print(f"{setting}: {found[setting]}", flush=True)
    return found
