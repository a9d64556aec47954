"""What is otherwise decided by looking at the machine, and the setting that forces each such decision.

Whoever decides asks here, each time anew; tests run both ways of each choice on every machine. What libraries
decide by themselves is listed too, with the variables that they read. `docs/processors.md` has all of it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from infra.errors import Explained

_NUMBER = re.compile("[1-9][0-9]{0,4}")


class ChoiceError(Explained):
    """A setting that says nothing known, or asks for what this machine has not; the message names it."""


@dataclass(frozen=True)
class Choice:
    """One decision. Without its variable, or with an empty one, the machine decides."""

    variable: str
    decides: str
    unset: str  # how it is decided then
    ways: tuple[str, ...] = ()  # none: a number
    library: str = ""  # that reads the variable by itself, as the process begins

    def forced(self) -> str | None:
        """What the environment says. Raises ChoiceError if it is nothing known."""
        said = os.environ.get(self.variable, "").strip()
        known = said in self.ways if self.ways else bool(_NUMBER.fullmatch(said))
        if said and not known and not self.library:
            there = ", ".join(self.ways) or "numbers from 1 to 99999"
            raise ChoiceError(f"{self.variable}={said[:40]}: {there} are known; unset, it is {self.unset}")
        return said or None


LINEAR = Choice(
    "STREAMRL_LINEAR", "what computes linear layers on a CPU, in the trainer (fp32) and in the engine",
    "in the trainer mkl on Intel's CPUs and onednn on all others, in the engine onednn where it can",
    ("onednn", "mkl"),
)  # fmt: skip
DEVICE = Choice(
    "STREAMRL_DEVICE", "what models are trained on, what generates, and what scans weights if a GPU shall",
    "cuda if torch sees a GPU, else cpu", ("cpu", "cuda"),
)  # fmt: skip
NUMBA = Choice(
    "STREAMRL_NUMBA", "whether loops are compiled: of dispatch, exact sums, spreading, and over weights",
    "compiled if numba can be imported, else plain", ("compiled", "plain"),
)  # fmt: skip
SCAN = Choice(
    "STREAMRL_SCAN", "what scans the tiles of weights", "as STREAMRL_NUMBA says",
    ("compiled", "plain", "cuda"),
)  # fmt: skip
CORES = Choice(
    "STREAMRL_CORES", "how many cores there are, for threads that copy, hash and code weights",
    "those that the process may run on",
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

ALL = (LINEAR, DEVICE, NUMBA, SCAN, CORES, ROOM, ISA, ATEN, LLVM)


def cores() -> int:
    """How many cores this process may use."""
    said = CORES.forced()
    return int(said) if said else len(os.sched_getaffinity(0))


def cuda() -> bool:
    """Whether a GPU is there to be used."""
    import torch

    said = DEVICE.forced()
    if said == "cuda" and not torch.cuda.is_available():
        raise ChoiceError(f"{DEVICE.variable}=cuda, and torch sees no GPU: unset it, or mend the driver")
    return said != "cpu" and torch.cuda.is_available()


def compiles() -> bool:
    """Whether loops are compiled."""
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
