"""Decisions that depend on the machine, and the environment variable that forces each of them.

Code asks here each time that it decides, so tests can run both ways of each choice on every machine.
Decisions that libraries make by themselves are listed too, with the variables that the libraries read.
`docs/processors.md` describes all of them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from infra.container_limits import ContainerLimits
from infra.errors import Explained

_NUMBER = re.compile("[1-9][0-9]{0,4}")


class ChoiceError(Explained):
    """A variable has an unknown value, or asks for what this machine lacks; the message names it."""

    lasting = True


@dataclass(frozen=True)
class Choice:
    """A decision. If its variable is unset or empty, the machine decides."""

    variable: str
    decides: str
    unset: str  # how the machine decides, in words
    ways: tuple[str, ...] = ()  # known values; empty: a number from 1 to 99999
    library: str = ""  # the library that reads the variable by itself, as the process begins

    def forced(self) -> str | None:
        """Return the variable's value; None if it is unset or empty.

        Raise ChoiceError if the value is unknown, unless a library reads the variable by itself.
        """
        said = os.environ.get(self.variable, "").strip()
        known = said in self.ways if self.ways else bool(_NUMBER.fullmatch(said))
        if said and not known and not self.library:
            there = f"one of {', '.join(self.ways)}" if self.ways else "a number from 1 to 99999"
            raise ChoiceError(
                f"{self.variable}={said[:40]} is not allowed: set it to {there}, or unset it, which means: "
                f"{self.unset}"
            )
        return said or None


LINEAR = Choice(
    "STREAMRL_LINEAR", "what computes linear layers on a CPU, in the trainer (fp32) and in the engine",
    "in the trainer mkl on Intel's CPUs and onednn on all others, in the engine onednn where it can",
    ("onednn", "mkl"),
)  # fmt: skip
DEVICE = Choice(
    "STREAMRL_DEVICE", "what models are trained on, and what generates",
    "cuda if torch sees a GPU, else cpu", ("cpu", "cuda"),
)  # fmt: skip
NUMBA = Choice(
    "STREAMRL_NUMBA", "whether loops are compiled: of dispatch, exact sums, spreading, and over weights",
    "compiled if numba can be imported, else plain", ("compiled", "plain"),
)  # fmt: skip
SCAN = Choice(
    "STREAMRL_SCAN", "what scans the tiles of weights in main memory", "as STREAMRL_NUMBA says",
    ("compiled", "plain"),
)  # fmt: skip
FUSED = Choice(
    "STREAMRL_FUSED", "whether a trainer's norms, gates, rotations and logprobs, and an engine's draws, have "
    "kernels of their own", "on where a GPU computes them", ("off",),
)  # fmt: skip
ATTENTION = Choice(
    "STREAMRL_ATTENTION", "how a trainer computes attention of packed sequences on a GPU",
    "in one call where torch has a kernel for it, else in grids", ("grids",),
)  # fmt: skip
COPIES = Choice(
    "STREAMRL_COPIES", "where the copies of weights lie that are published from a GPU",
    "on the GPU if it has room, else in main memory", ("memory",),
)  # fmt: skip
CORES = Choice(
    "STREAMRL_CORES",
    "how many cores count for ranks of engines, and for threads that copy, hash and code weights",
    "the cores that the process may run on, or fewer if its container's quota is worth fewer",
)  # fmt: skip
ROOM = Choice(
    "STREAMRL_ROOM", "where a checkpoint's rest goes when training overtakes the store",
    "memory if it has room, else disk (TMPDIR) if it has, else training waits", ("memory", "disk", "none"),
)  # fmt: skip
ISA = Choice(
    "ONEDNN_MAX_CPU_ISA", "the newest instructions that oneDNN may use, such as AVX2, AVX512_CORE, "
    "AVX512_CORE_BF16 or AVX512_CORE_AMX", "all that the CPU has", library="oneDNN",
)  # fmt: skip
ATEN = Choice(
    "ATEN_CPU_CAPABILITY", "the vector instructions of torch's own loops: default, avx2 or avx512",
    "all that the CPU has", library="torch",
)  # fmt: skip
LLVM = Choice(
    "NUMBA_CPU_NAME", "the CPU that compiled loops are for, such as generic or x86-64-v3", "this one",
    library="numba",
)  # fmt: skip

ALL = (LINEAR, DEVICE, NUMBA, SCAN, FUSED, ATTENTION, COPIES, CORES, ROOM, ISA, ATEN, LLVM)


def cores() -> int:
    """Return how many cores this process may use."""
    said = CORES.forced()
    if said:
        return int(said)
    may_run_on = len(os.sched_getaffinity(0))
    return min(may_run_on, ContainerLimits().cores() or may_run_on)


def cuda() -> bool:
    """Return whether to use a GPU. Raise ChoiceError if one is forced and torch sees none."""
    import torch

    said = DEVICE.forced()
    if said == "cuda" and not torch.cuda.is_available():
        raise ChoiceError(f"{DEVICE.variable}=cuda, and torch sees no GPU: unset it, or mend the driver")
    return said != "cpu" and torch.cuda.is_available()


def compiles() -> bool:
    """Return whether numba compiles loops. Raise ChoiceError if that is forced and numba is missing."""
    said = NUMBA.forced()
    if said == "plain":
        return False
    try:
        import numba  # noqa: F401
    except ImportError as error:
        if said:
            raise ChoiceError(f"{NUMBA.variable}=compiled, and numba can't be imported: {error}") from error
        return False
    return True
