"""Processor seconds of all that runs on this machine."""

from __future__ import annotations

import os

import psutil

from infra.choices import cores


def machine_cpu_s() -> float | None:
    """Return the processor seconds of all processes since the machine started.

    None if only some of its cores may be used here: then the others do somebody else's work.
    """
    if cores() != os.cpu_count():
        return None
    times = psutil.cpu_times()
    parts = ("user", "nice", "system", "irq", "softirq")
    return float(sum(getattr(times, part, 0.0) for part in parts))
