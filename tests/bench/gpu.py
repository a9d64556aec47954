"""One GPU: training, drawing, weights into a running engine and the codec, each beside the usual way.

Each part is a process of its own. Without a GPU nothing is measured, and a line says so; `--device cpu --size
tiny` only tries the parts.

learner   tokens a second, MFU, memory, and over a plain loop of padded batches; what exact sums cost
engine    tokens a second, and over plain vLLM's with logprobs and without; shares of equal samples again, in
          another batch, and after a prefill of half of their tokens; milliseconds of the pause for 2 % of
          the weights changed, and for a whole version, and of the longest steps beside preparing and
          hashing them
codec     deltas made: GB of weights a second, by way and threads, and over the compiled way on one thread
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra import choices
from tests.bench._gpu_model import SHAPES, sized_model
from tests.bench._runs import ROOT

_PARTS = ("learner", "engine", "codec")


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--size", choices=SHAPES, default="0.5b" if quick else "1.5b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    given = parser.parse_args(argv)
    if given.device == "cuda" and not choices.cuda():
        print("no GPU: torch sees none, so nothing was measured")
        return {"skipped": "no GPU"}
    tiny, found = given.size == "tiny", dict[str, Any]()
    samples, longest = (16, 64) if tiny else (256, 4096)
    slots, tokens = (8, 16) if tiny else (256, 512)
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as name:
        folder = str(sized_model(Path(name) / "model", given.size, given.device))
        if "learner" in given.parts:
            found["learner"] = part("_gpu_learner", folder, given.size, given.device, samples, longest)
        if "engine" in given.parts:
            own = part("_gpu_engine", "ours", folder, slots, tokens)
            plain = part("_gpu_engine", "plain", folder, slots, tokens)
            found["engine"] = own | {
                "plain_tokens_per_s": plain["tokens_per_s"],
                "tokens_over_plain": own["tokens_per_s"] / plain["tokens_per_s"],
                "tokens_over_plain_without_logprobs": own["tokens_per_s"]
                / plain["tokens_per_s_without_logprobs"],
            }
        if "codec" in given.parts:
            found["codec"] = part("_gpu_codec", 4 if tiny else 256 if quick else 1024)
    return found


def part(name: str, *words: object) -> dict[str, Any]:
    """Run a part in a process of its own, on the device that this one has chosen."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.bench.{name}", *map(str, words)],
        cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}:\n{done.stdout[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT ")[2])
    return found
