"""How many cores a container's quota of processor time is worth; the kernel shows those of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_FILES = Path("/sys/fs/cgroup")


def quota_cores(groups: Path = _GROUPS, files: Path = _FILES) -> int | None:
    """Return the whole cores, at least one, that the smallest quota allows; None: there is no quota."""
    quotas = [
        allowed for folder in _folders(groups, files) for allowed in (_version_2(folder), _version_1(folder))
    ]
    found = [one for one in quotas if one is not None]
    return max(1, int(min(found))) if found else None


def _folders(groups: Path, files: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups, with those around them.

    A container may see its own group as the root, and still be told the group's place on the machine.
    """
    lines = groups.read_text().splitlines() if groups.exists() else []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = files / controllers if controllers else files
        folder = root / place.lstrip("/")
        while folder != root:
            yield folder
            folder = folder.parent
        yield root


def _version_2(folder: Path) -> float | None:
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)  # without a quota it says "max"
    return None


def _version_1(folder: Path) -> float | None:
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    return None
