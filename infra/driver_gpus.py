"""The GPUs that NVIDIA's driver counts, for machines whose /dev has no files of them, such as WSL.

A child process asks, and ends at once: a process in which CUDA has begun can't fork any more, and keeps the
GPUs that it saw then.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

LIBRARY = "libcuda.so.1"
_NONE = (100, 34)  # errors of CUDA: no GPU is there; the library is not the driver's
_PATIENCE_S = 20.0
_QUESTION = """
import ctypes, sys
driver, count = ctypes.CDLL(sys.argv[1]), ctypes.c_int()
print(driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)), count.value)
"""


@dataclass(frozen=True)
class CountedGpus:
    """The number of GPUs, and why it is unknown; empty: it is known."""

    count: int = 0
    problem: str = ""


@cache
def counted_gpus() -> CountedGpus:
    """Return how many GPUs the driver counts, also those that CUDA_VISIBLE_DEVICES hides.

    None, and no process is started, if the driver's library is not there.
    """
    try:
        ctypes.CDLL(LIBRARY)  # this alone begins nothing
    except OSError:
        return CountedGpus()
    others = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    words = [sys.executable, "-I", "-S", "-c", _QUESTION, LIBRARY]
    try:
        said = subprocess.run(
            words, capture_output=True, text=True, timeout=_PATIENCE_S, check=True, env=others
        ).stdout
        code, count = map(int, said.split())
    except subprocess.TimeoutExpired:
        return CountedGpus(0, f"{LIBRARY} took more than {_PATIENCE_S:.0f} s to count GPUs")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return CountedGpus(0, f"{LIBRARY} can't be asked for GPUs: {error}")
    if not code or code in _NONE:
        return CountedGpus(count)
    return CountedGpus(0, f"{LIBRARY} counts no GPUs: error {code} of CUDA")
