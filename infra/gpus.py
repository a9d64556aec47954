"""The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them, without loading torch."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infra import choices
from infra.driver_gpus import counted_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia\d+")
_QUERY = ("name", "memory.free", "memory.total", "driver_version")
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class GpuFound:
    """A GPU, as the driver describes it."""

    name: str
    free_mib: int
    total_mib: int
    driver: str


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that processes of ours may use; none if STREAMRL_DEVICE is cpu.

    As in CUDA, a name that is no GPU's hides itself and all after it. As in torch, a name that is there twice
    hides all. Files in /dev are counted; where there are none, as in WSL, the driver is asked once.
    """
    said = os.environ.get(VISIBLE)
    if choices.DEVICE.forced() == "cpu" or said == "":
        return []
    count = sum(bool(_DEVICE.fullmatch(one.name)) for one in devices.iterdir()) if devices.is_dir() else 0
    count = count or counted_gpus().count
    if said is None or not count:
        return [str(number) for number in range(count)]
    found: list[str] = []
    for name in (one.strip() for one in said.split(",")):
        if not name or name.startswith("-") or (name.isdigit() and int(name) >= count):
            break
        found.append(name)
    return found if len(set(found)) == len(found) else []


def described_gpus() -> list[GpuFound]:
    """Return all GPUs with their memory, as `nvidia-smi` says it; none if it can't be asked."""
    found: list[GpuFound] = []
    if (program := shutil.which("nvidia-smi")) is None:
        return found
    words = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        said = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE_S, check=True).stdout
        for name, free, total, driver in csv.reader(said.splitlines(), skipinitialspace=True):
            found.append(GpuFound(name, int(free), int(total), driver))
    return found
