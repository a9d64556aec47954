"""What training a large model costs beside computing it: a random one of 1 GB, per GB of trained weights.

The real trainer, publisher and checkpoints at their defaults, with a store in a folder; Kafka is a list in
memory, and samples are there as soon as weights are announced. Seconds are of the clock: the machine should
be quiet.

step_s_per_gb        on the training thread, beside forward, backward and optimizer: hashes, ledger
checkpoint_s_per_gb  on the training thread: to begin one, and until the next step may change what is written
publish_s_per_gb     beside training: from the end of a step until its version is in the store and announced
install_s_per_gb     a reader: from the version before to the newest, verified, and into an engine's weights
resume_s_per_gb      from the checkpoint in the store to a learner that goes on, verified
peak_over_model      the most memory that the trainer had, over the weights in fp32: these, gradient (1), its
                     exact sum (2) and the optimizer (2) are always there
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from consumers.learners.learner import TorchLearner
from consumers.steps.checkpoint import Checkpoints
from consumers.steps.publisher import Publisher
from flows.run.commands import TRAINER, environment
from infra.roles.context import RoleContext
from infra.weights.bits import Bits
from infra.weights.patch import PatchFile
from infra.weights.versions import WeightStore
from schemas.runspec import RunSpec
from tests.bench import _large_world
from tests.factories import make_spec

_BEGUN = "STREAMRL_BENCH_TRAINER"
_EVERY = 2  # iterations between checkpoints


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench large", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--gb", type=float, default=1.0, help="of the model in fp32 (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=6 if quick else 12, help="that are trained")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="that is published"
    )
    parser.add_argument("--threads", type=int, default=1, help="trainer.threads")
    parser.add_argument(
        "--folder", type=Path, help="where 10 times the model has room (default: a temporary one)"
    )
    given = parser.parse_args(argv)
    spec = make_spec(
        algorithm={"iterations": given.iterations, "groups": 2, "learning_rate": 1e-6},
        model={"dtype": given.dtype},
        trainer={
            "checkpoint_every": _EVERY, "microbatch_tokens": 8192, "bundle_tokens": 512,
            "threads": given.threads,
        },
    )  # fmt: skip
    _as_a_trainer(spec)
    with tempfile.TemporaryDirectory(prefix="streamrl-large-", dir=given.folder) as folder:
        found = _measured(spec, Path(folder), given.gb)
    Console(stderr=True).print(found)
    return found


def _as_a_trainer(spec: RunSpec) -> None:
    """Begin again with the environment that a trainer's process has: allocators can't be changed later."""
    if not os.environ.get(_BEGUN):
        env = {**os.environ, **environment(TRAINER, spec), _BEGUN: "1"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.bench", *sys.argv[1:]], env)


def _measured(spec: RunSpec, folder: Path, gigabytes: float) -> dict[str, Any]:
    size = _in_a_child(lambda: _large_world.make_model(folder / "model", gigabytes))
    gb = size / 1e9
    before = _resident("VmRSS")
    with _publishing() as published:
        context, watch = _large_world.train(spec, folder)
    peak = _resident("VmHWM") - before
    plain = [n for n in range(2, len(watch.beside)) if n not in watch.checkpoints]
    step_s = float(np.median([watch.beside[n] for n in plain]))
    stood = [
        begun + max(0.0, watch.beside[n] - step_s) for n, begun in watch.checkpoints.items()
        if n < len(watch.beside)
    ]  # fmt: skip
    found = {
        "gb": gb, "steps": len(watch.beside), "step_s_per_gb": step_s / gb,
        "checkpoint_s_per_gb": float(np.median(stood)) / gb,
        "publish_s_per_gb": float(np.median(published[1:])) / gb,
        "install_s_per_gb": _install_s(context) / gb,
        "resume_s_per_gb": _resume_s(context, spec, folder) / gb,
        "peak_over_model": peak / size,
        "optimizer_s_per_gb": watch.optimizer_s / len(watch.beside) / gb,
    }  # fmt: skip
    return {name: round(value, 3) for name, value in found.items()}


def _in_a_child(make: Any) -> int:
    """What is made there leaves no memory behind here."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(write, str(make()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        size = said.read()
    os.waitpid(child, 0)
    if not size:
        raise SystemExit("the model could not be made: is there room in the folder?")
    return int(size)


def _resident(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{which}:")).split()[1])


@contextmanager
def _publishing() -> Iterator[list[float]]:
    """Seconds of each version in the publisher's thread."""
    took: list[float] = []
    plain = Publisher._publish

    def timed(self: Publisher, *given: Any) -> None:
        began = time.perf_counter()
        plain(self, *given)
        took.append(time.perf_counter() - began)

    Publisher._publish = timed  # type: ignore[assignment,method-assign]
    try:
        yield took
    finally:
        Publisher._publish = plain  # type: ignore[method-assign]


def _install_s(context: RoleContext) -> float:
    """As a generator does: fetched and decoded onto what it has, verified, compared, and written."""
    weights = WeightStore(context.store, context.run)
    newest = max(weights.versions())
    _, copy = weights.update(None, newest - 1)
    engine = {name: Bits(bits.dtype, bits.shape, bits.data.copy()) for name, bits in copy.model.items()}
    began = time.perf_counter()
    manifest, copy = weights.update(copy, newest)
    patch = PatchFile(engine, copy.model, since=None, root=manifest.root)
    patch.read().apply(engine)
    return time.perf_counter() - began


def _resume_s(context: RoleContext, spec: RunSpec, folder: Path) -> float:
    learner = TorchLearner(str(folder / "model"), spec)
    try:
        began = time.perf_counter()
        restored = Checkpoints(context.store, context.run).restored(learner.restore, print)
        assert restored is not None and restored.iteration == spec.algorithm.iterations
        return time.perf_counter() - began
    finally:
        learner.close()
