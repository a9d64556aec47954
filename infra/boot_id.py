"""The name of this start of this machine: no other machine has it, and containers on it share it."""

from pathlib import Path

_FILE = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the name. Raises OSError where the kernel does not tell it."""
    return _FILE.read_text().strip()
