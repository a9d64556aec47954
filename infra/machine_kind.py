"""The kind of this machine, as far as the bits of a training step depend on it."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path

from infra import choices, cpu_linear


@cache
def _cpu() -> str:
    """Return the CPU's vendor and model; empty if the system does not say them."""
    try:
        said = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = [re.search(rf"^{name}\s*:\s*(.*)$", said, re.MULTILINE) for name in ("vendor_id", "model name")]
    return " ".join(match[1] for match in found if match)


def kind_of_machine() -> str:
    """Return processor, its instructions, and versions of libraries, as one line."""
    import torch
    import transformers

    parts = [f"torch {torch.__version__}", f"transformers {transformers.__version__}"]
    if choices.cuda():
        parts.append(torch.cuda.get_device_name())
    else:
        linear = "mkl" if not cpu_linear.pays() else "onednn"
        parts += [_cpu(), torch.backends.cpu.get_cpu_capability(), f"linear layers by {linear}"]
        parts += [f"{one.variable}={said}" for one in (choices.ISA, choices.ATEN) if (said := one.forced())]
    return "; ".join(parts)
