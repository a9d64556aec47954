"""The kind of device that ranks compute on here: `python -m consumers.ranks.rank_device` says it.

The process that holds a rank's connection has no torch, and only torch knows. So it asks a process that ends
at once.
"""

from __future__ import annotations

import subprocess
import sys

from infra import choices
from infra.code import child_environment, module
from infra.errors import Explained

_PATIENCE_S = 300.0  # torch may come from a slow disk


class UnknownDevice(Explained):
    """Nobody can say what ranks would compute on here; the message says why."""

    lasting = True


def own_device() -> str:
    """Return cpu or cuda: the device of a learner in this process, which loads torch."""
    return "cuda" if choices.cuda() else "cpu"


def device_of_ranks() -> str:
    """Return likewise the device of ranks that this process starts. It loads no torch."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module("consumers.ranks.rank_device")], stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_PATIENCE_S, env=child_environment(), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UnknownDevice(f"torch could not be loaded here in {_PATIENCE_S:.0f} s: mend that") from error
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise UnknownDevice(f"what ranks would compute on here is unknown: {reason}")
    return done.stdout.split()[-1]


def main() -> None:
    """Write the device to stdout, or the reason why there is none to stderr."""
    try:
        sys.stdout.write(f"{own_device()}\n")
    except choices.ChoiceError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
