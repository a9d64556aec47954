"""One GPU: training, drawing, weights into a running engine and the codec, each beside the usual way.

Each part is a process of its own. Without a GPU nothing is measured, and a line says so; `--device cpu --size
tiny` only tries the parts.

engine    tokens a second, and over plain vLLM's: with logprobs and a seed for each sample, as ours has them,
          without seeds, and without both; which settings differ; shares of equal samples again, in another
          batch, and after a prefill of half of their tokens; seconds to make a patch for 1.5 to 100 % of
          the weights, milliseconds of its pause, of which `still_ms` come when the step under way has ended,
          and of the longest steps beside preparing and hashing it; of the pause and the next step where
          samples are computed anew; how far logprobs are from the learner's
learner   seconds a step, tokens a second, MFU, memory, and over a plain loop of padded batches; what exact
          sums cost, of a step and each gradient; the same with checkpointing, and in fp32
codec     deltas made and applied, where 3 and 17 % of the weights change: GB of weights a second, by way and
          threads, and over the compiled way on one thread
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from infra import choices
from tests.bench._gpu_engine import DIFFERS
from tests.bench._gpu_model import SHAPES
from tests.bench._runs import ROOT

# With --quick on an H100 each of the two engines starts in one to two minutes, and draws and takes in weights
# for another one. The learner takes about two minutes, of which half of one is for fp32; gaps of logprobs and
# the codec take half a minute each. So all is expected to take seven: added up from single figures, and not
# measured.
_PARTS = ("engine", "learner", "codec")  # the first ones are done if time runs out
_QUICK_S, _MOST_S = 300, 1200  # that a process of a part may take


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
        return {"skipped": "no GPU: torch sees none, so nothing was measured"}
    if given.device == "cpu":
        os.environ[choices.DEVICE.variable] = "cpu"  # of the parts, too
    tiny, found = given.size == "tiny", dict[str, Any]()
    samples, longest = (16, 64) if tiny else (256, 4096)
    slots, tokens = (8, 16) if tiny else (256, 512)
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as name:
        folder, run = str(Path(name) / "model"), partial(part, most_s=_QUICK_S if quick else _MOST_S)
        run("_gpu_model", folder, given.size, given.device)
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            "engine": lambda: _engines(run, folder, slots, tokens),
            "learner": lambda: run("_gpu_learner", folder, given.size, given.device, samples, longest),
            "codec": lambda: run("_gpu_codec", 4 if tiny else 256 if quick else 1024),
        }
        failed = []
        for one in (one for one in _PARTS if one in given.parts):
            try:
                found[one] = ways[one]()
            except RuntimeError as error:  # the others are measured nevertheless
                failed.append(str(error))
    if failed:
        raise RuntimeError("\n".join(failed))
    return found


def _engines(run: Callable[..., dict[str, Any]], folder: str, slots: int, tokens: int) -> dict[str, Any]:
    """Return figures of our engine, and beside plain vLLM's with the arguments that ours gives vLLM."""
    own = run("_gpu_engine", "ours", folder, slots, tokens)
    plain = run("_gpu_engine", "plain", folder, slots, tokens)
    settings, others = own.pop("settings"), plain.pop("settings")
    found = own | {"logprob_gap": run("_gpu_gap", folder), "differs": DIFFERS}
    found["settings_compared"] = len(settings)
    found["settings_that_differ"] = {
        name: [settings.get(name), others.get(name)]
        for name in sorted(settings.keys() | others.keys())
        if settings.get(name) != others.get(name)
    }
    for name, speed in plain.items():
        found[f"plain_{name}"] = speed
        found[name.replace("tokens_per_s", "tokens_over_plain")] = own["tokens_per_s"] / speed
    return found


def part(name: str, *words: object, most_s: float = _MOST_S) -> dict[str, Any]:
    """Run a part in a process of its own, on the device that this one has chosen.

    Its figures are printed as well: what comes later may fail, or have no time left.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"tests.bench.{name}", *map(str, words)],
            cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True, timeout=most_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{name} took more than {most_s:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}:\n{done.stdout[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT ")[2])
    shown = {key: value for key, value in found.items() if key != "settings"}
    print(name, *words, json.dumps(shown), flush=True)
    return found
